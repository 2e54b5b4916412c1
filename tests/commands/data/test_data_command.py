"""Tests `omni-async data`: what it finds in tables of prompts, and the conversions of public benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from omni_async.cli import main
from omni_async.data.preferences import PreferencePairs
from omni_async.data.prompts import load_prompts
from omni_async.media import Media
from omni_async.records.write.images import write_media
from tests.data.test_prompt_tables import png


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[str]:
    """Returns the lines on both streams, after the exit code was compared."""
    assert main(["data", *words]) == code
    out, err = capsys.readouterr()
    return [*err.splitlines(), *out.splitlines()]


def test_a_sound_table(capsys):
    Path("p.csv").write_text("caption,target,n\na,A,1\nabc,,2\n")
    assert told(capsys, "check", "p.csv", "data.columns.prompt=caption") == [
        "readable prompts: 2; rows that a run would refuse: 0",
        "characters: shortest 1, median 3, longest 3",
        "rows that also have: target 1, n 2",
    ]


@pytest.mark.parametrize("part", ["audio", "video"])
def test_audio_and_videos_are_decoded_and_counted(capsys, part):
    soundfile.write("a.audio.wav", np.zeros(800), 8000)
    write_media(Media(video=np.zeros((2, 3, 32, 32), np.uint8), fps=2.0), Path("a.video"))
    [file] = Path().glob(f"a.{part}*")
    Path("p.jsonl").write_text(f'{{"prompt": "a", "{part}": "{file}"}}\n{{"prompt": "b", "{part}": "p.jsonl"}}')
    found = told(capsys, "check", "p.jsonl", code=1)
    assert f"p.jsonl:2: {part} 'p.jsonl': the {part} cannot be decoded" in found[0]
    assert found[-1] == f"rows that also have: {part} 1"


def test_what_a_run_refuses_and_what_is_probably_not_meant(capsys, folder):
    rows: list[dict[str, Any]] = [
        {"prompt": "a cat"},
        {"prompt": "a cat"},
        {"prompt": "A  Cat"},
        {"prompt": " "},
        {"prompt": "\u200b\u2060"},
        {"prompt": "a\u200bb"},
        {"prompt": "one\rtwo"},
        {"prompt": "x", "image": "nowhere.png"},
        {"prompt": "x" * 4001},
        {"prompt": "a cat", "note": "again"},
    ]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = told(capsys, "check", "p.jsonl", code=1)
    where = f"omni-async: data.prompts: {folder}/p.jsonl"
    assert found[:4] == [
        f"{where}:4: the prompt is empty; write its text, or remove the row",
        f"{where}:5: the prompt '\\u200b\\u2060' has only invisible characters; remove the row",
        f"{where}:8: image: no such file: 'nowhere.png'",
        f"{where}:9: the prompt has 4001 characters, data.max_prompt_chars allows 4000",
    ]
    assert found[4] == "readable prompts: 6; rows that a run would refuse: 4" and found[7:] == [
        "warning: rows that repeat an earlier row: 1, the first: p.jsonl:2 as p.jsonl:1",
        "warning: rows that repeat a prompt with other columns: 1, the first: p.jsonl:10 as p.jsonl:1",
        "warning: prompts that differ only in case or spaces: 1, the first: p.jsonl:3 as p.jsonl:1",
        "warning: rows with carriage returns: 1, the first: p.jsonl:7; if the file's lines end with them alone, convert"
        " it with tr '\\r' '\\n'",
        "warning: rows with invisible characters: 1, the first: p.jsonl:6 a zero width space",
    ]


def test_one_question_about_several_images_is_no_repetition(capsys):
    for level in (1, 2):
        Path(f"{level}.png").write_bytes(png(level))
    rows = [{"prompt": "How many?", "image": f"{level}.png", "target": str(level)} for level in (1, 2, 2)]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "target": "3"}])))
    assert told(capsys, "check", "p.jsonl")[-2:] == [
        "warning: rows that repeat an earlier row: 1, the first: p.jsonl:3 as p.jsonl:2",
        "warning: rows that repeat a prompt with other columns: 1, the first: p.jsonl:4 as p.jsonl:1",
    ]


def test_a_file_with_carriage_returns_alone(capsys):
    Path("mac.txt").write_bytes(b"a cat\ra dog\ra cow\r")
    assert "rows with carriage returns: 1" in told(capsys, "check", "mac.txt")[-1]


def test_a_recipes_model_counts_tokens(capsys, folder, request):
    recipe = request.config.rootpath / "recipes/quickstart/quickstart.yaml"
    Path("p.txt").write_text("7\n" + "7" * 1100 + "\n")
    found = told(capsys, "check", "p.txt", "--recipe", str(recipe), code=1)
    assert found[0].startswith(f"omni-async: data.prompts: {folder}/p.txt:2: the prompt has 1105 tokens, and the text")
    assert found[-1] == "tokens by tokenizer: median 6, longest 1105, limit 1024, above it 1"


CONVERTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ocr": ("train.txt", 'A sign with "Hello World" on it.\n', {"target": "Hello World"}),
    "geneval": (
        "m.jsonl",
        '{"tag": "counting", "include": [{"class": "cat", "count": 2}], "prompt": "two cats"}\n',
        {"tag": "counting", "include": [{"class": "cat", "count": 2}]},
    ),
    "t2i_compbench": ("3d_spatial_val_seen.txt", "a cat in front of a dog\n", {"category": "3d_spatial"}),
    "pickscore": ("train.txt", "a cat\na cat\n", {}),
}


@pytest.mark.parametrize("form", CONVERTED)
def test_a_benchmarks_prompts(form, capsys):
    name, content, others = CONVERTED[form]
    Path(name).write_text(content)
    lines = told(capsys, "convert", form, name, "--out", "p.jsonl")
    assert lines == ["wrote p.jsonl: 1 prompts", *(["left out 1 repeated prompts"] if form == "pickscore" else [])]
    [prompt] = load_prompts("p.jsonl", "data.prompts", 100)
    assert ({"target": prompt.target} if prompt.target else {}) | prompt.metadata == others


@pytest.mark.parametrize(
    ("form", "content", "why"),
    [
        ("ocr", '{"prompt": "a sign"}', "m.jsonl:1: expected a text in double quotes"),
        ("geneval", '{"prompt": "a cat"}', "m.jsonl:1: include: expected GenEval's objects with a class, got None"),
        ("t2i_compbench", '{"text": "a cat"}', "m.jsonl:1: expected a prompt, got text"),
    ],
)
def test_another_format(form, content, why, capsys):
    Path("m.jsonl").write_text(content)
    assert why in told(capsys, "convert", form, "m.jsonl", "--out", "p.jsonl", code=2)[0]
    assert not Path("p.jsonl").exists()


def test_pairs_of_pick_a_pic(capsys):
    rows = [{"caption": f"p{i}", "jpg_0": png(10), "jpg_1": png(200), "label_0": i / 2} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), "pick.parquet")
    lines = told(capsys, "convert", "pickscore", "pick.parquet", "--out", "pairs.parquet")
    assert lines == ["wrote pairs.parquet: 2 pairs", "left out 1 ties"]
    pairs = PreferencePairs("pairs.parquet")
    assert [prompt.text for prompt in pairs.prompts()] == ["p0", "p2"]
    assert [[media.image[0, 0, 0] for media in pairs.media(i)] for i in range(2)] == [[200, 10], [10, 200]]


def test_a_table_without_rows_is_refused_as_a_run_does(capsys, folder):
    Path("p.csv").write_text("prompt,target\n")
    said = f"omni-async: data.prompts: {folder}/p.csv: holds no prompts; expected one a line"
    assert told(capsys, "check", "p.csv", code=1)[0] == said


def test_a_reason_that_many_rows_share_is_one_line(capsys, folder):
    Path("p.jsonl").write_text('{"prompt": "a"}\n' + '{"prompt": ""}\n' * 12 + '{"prompt": 3}\n')
    found = told(capsys, "check", "p.jsonl", code=1)
    where = f"omni-async: data.prompts: {folder}/p.jsonl"
    empty = "the prompt is empty; write its text, or remove the row"
    assert found[0] == f"{where}:2: {empty} (also 11 more: 3, 4, 5, 6, 7, ...)" and found[1].startswith(f"{where}:14: ")
    assert found[2] == "readable prompts: 1; rows that a run would refuse: 13"

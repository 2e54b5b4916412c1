"""Tests `omni-async score`."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
from msgspec.structs import replace
from PIL import Image

from omni_async import cli
from omni_async.commands.scoring import scoring
from omni_async.commands.scoring.report import histogram
from omni_async.commands.scoring.samples import find_samples
from omni_async.config import ConfigError
from omni_async.control.events import Shown
from omni_async.data.media_files import read_media
from omni_async.media import Media
from omni_async.records.write.images import write_media
from omni_async.runtime.driver.sample_files import _row
from omni_async.types import Prompt, PromptAudio, PromptImage, PromptVideo, Score
from tests.commands.scoring import judges
from tests.runtime.runtime_world import write_world

JUDGES = judges.__name__


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes a recipe whose reward is `Red`, and works in its folder."""
    write_world(tmp_path, reward=reward("Red"))
    monkeypatch.chdir(tmp_path)
    judges.calls.clear()
    judges.recorded.clear()
    judges.over.clear()
    return tmp_path / "recipe.yaml"


def reward(judge: str, **settings: Any) -> dict[str, Any]:
    scorers = [{"name": f"tests.commands.scoring.judges:{judge}", "params": settings.pop("params", {})}]
    return {"scorers": scorers, "backoff_s": 0, "probe": False, **settings}


def draw(folder: str, *reds: int) -> list[Path]:
    """Draws an image per number, 4 x 4 pixels of that much red, called `000.png` and so on."""
    Path(folder).mkdir(exist_ok=True)
    files = [Path(folder) / f"{red:03d}.png" for red in reds]
    for file, red in zip(files, reds, strict=True):
        Image.fromarray(np.full((4, 4, 3), (red, 0, 0), np.uint8)).save(file)
    return files


def scored(*words: str, judge: str = "", code: int = 0) -> dict[str, Any]:
    """Returns the JSON of `omni-async score`, which ends with this exit code; `judge` replaces the recipe's."""
    judges_ = [f"reward.scorers=[{{name: '{JUDGES}:{judge}'}}]"] if judge else []
    assert cli.main(["score", "recipe.yaml", *words, *judges_, "--json", "found.json"]) == code
    found: dict[str, Any] = json.loads(Path("found.json").read_text())
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["score", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("omni-async: ")


def test_a_folder_is_scored_and_shown_with_extremes(capsys):
    files = draw("images", 10, 20, 30, 40)
    files[1].with_suffix(".txt").write_text("a  cat\nasleep\n")
    files[2].with_suffix(".json").write_text('{"prompt": "a dog", "target": "WOOF", "style": "ink"}')
    found = scored("images", "reward.scorers.0.params.scale=2", "reward.batch=3")
    rows = {row["file"]: row for row in found["rows"]}
    assert [row["reward"] for row in rows.values()] == [20, 40, 60, 80]
    assert [prompt.text for prompt in judges.calls] == ["", "a cat asleep", "a dog", ""]
    assert judges.calls[2] == Prompt(2, "a dog", "WOOF", {"style": "ink"})
    assert rows["images/030.png"] | {"read": "WOOF", "reward/length": 5.0} == rows["images/030.png"]
    statistics = found["statistics"]["reward"]
    assert (statistics["mean"], statistics["min"], statistics["max"]) == (50, 20, 80)
    assert statistics["std"] == pytest.approx(math.sqrt(2000 / 3)) and statistics["quantiles"]["0.5"] == 50
    said = capsys.readouterr()
    assert "4 of 4 samples scored" in said.out and "length" in said.out
    lines = [line.split() for line in said.out.splitlines()]
    assert [line[5] for line in lines if line[:2] == ["│", "best"]] == ["images/040.png", "images/030.png"]
    assert [line[5] for line in lines if line[:2] == ["│", "worst"]] == ["images/010.png", "images/020.png"]
    assert "2 of 4 samples have no prompt" in said.err


def test_the_histogram_counts_every_value_once():
    lines = histogram([0.0, 0.05, 0.95, 1.0, 1.0])
    assert len(lines) == 10 and [int(line.split()[-1]) for line in lines] == [2, *[0] * 8, 3]
    assert histogram([3.0, 3.0])[0].split()[-1] == "2"


def test_repetitions_measure_the_judges_own_noise(capsys):
    draw("images", 10, 30)
    found = scored("images", "--repeat", "4", judge="Moody")
    statistics = found["statistics"]["reward"]
    assert statistics["own"] == pytest.approx(math.sqrt(4 / 3))
    assert (statistics["mean"], statistics["std"]) == (20, pytest.approx(math.sqrt(200)))
    assert [row["reward_std"] for row in found["rows"]] == pytest.approx([math.sqrt(4 / 3)] * 2)
    assert "std between samples 14.14, the judge's own 1.155, 0.082 of it" in capsys.readouterr().out
    steady = scored("images", "--repeat", "3", "reward.scorers.0.params.scale=0.1")
    assert steady["statistics"]["reward"]["own"] == 0.0


def test_rows_are_written_as_csv_and_parquet_and_extremes_as_a_grid():
    draw("images", 10, 20, 30)
    scored("images", "--out", "new/rows.csv", "--grid", "grid.png")
    with Path("new/rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], row["reward"], row["error"]) for row in rows][2] == ("images/030.png", "30.0", "")
    scored("images", "--out", "rows.parquet", "--grid", "grid.png")
    assert pq.read_table("rows.parquet").to_pylist()[0]["reward"] == 10.0
    with Image.open("grid.png") as grid:
        reds = np.asarray(grid.convert("RGB"))[60, :, :]
        assert (reds == (10, 0, 0)).all(axis=1).any(), "the worst is in the first row of tiles"
        assert not (reds == (30, 0, 0)).all(axis=1).any()


def test_results_are_written_even_if_nobody_reads_the_output(monkeypatch):
    draw("images", 10, 20, 30)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as nobody, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", nobody)
        with contextlib.suppress(SystemExit):  # of rich
            cli.main(["score", "recipe.yaml", "images", "--out", "rows.csv", "--grid", "grid.png"])
        with contextlib.suppress(BrokenPipeError):
            nobody.close()
    with Path("rows.csv").open(newline="") as file:
        assert [row["reward"] for row in csv.DictReader(file)] == ["10.0", "20.0", "30.0"]
    assert Path("grid.png").stat().st_size > 0


@pytest.mark.parametrize("full", ["--json", "--out", "--grid"])
def test_a_full_file_is_one_line_and_costs_nothing_else(full, capsys):
    draw("images", 10, 20)
    files = {"--json": "found.json", "--out": "rows.csv", "--grid": "grid.png"}
    Path(files[full]).symlink_to("/dev/full")  # a device that can be opened, and takes no byte
    assert cli.main(["score", "recipe.yaml", "images", *[word for pair in files.items() for word in pair]]) == 1
    printed = capsys.readouterr()
    _, line = printed.err.splitlines()  # the first is about prompts
    assert line == f"omni-async: {files[full]} could not be written: No space left on device"
    assert "2 samples" in printed.out
    assert all(Path(name).stat().st_size > 0 for option, name in files.items() if option != full)


def test_a_sidecar_comes_before_the_folders_prompt_file(capsys):
    files = draw("images", 1, 2, 3)
    Path("images/prompts.txt").write_text("one\ntwo\nthree\n")
    files[1].with_suffix(".txt").write_text("own")
    assert [one.prompt.text for one in find_samples([Path("images")], 100)] == ["one", "own", "three"]
    draw("images", 4)
    assert refused(capsys, "recipe.yaml", "images") == (
        "images/prompts.txt: 3 prompts for 4 files; expected a line per file"
    )


def test_a_runs_table_gives_back_its_prompts(tmp_path):
    run, samples = tmp_path / "run", tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    (run / "config.yaml").touch()
    carried = find_samples(draw("images", 7), 100)[0].files["image"].resolve()
    prompts = [Prompt(0, "a cat", "MEOW", {"metadata": 1, "video": 2, "reward": 3}), Prompt(1, "a dog", images=())]
    soundfile.write(carried.with_suffix(".wav"), np.zeros(800), 8000)
    heard = PromptAudio(str(carried.with_suffix(".wav")), "digest")
    [watched] = write_media(Media(video=np.zeros((2, 3, 32, 32), np.uint8), fps=2), carried.with_suffix(""))
    files = {"images": (PromptImage(str(carried), "digest"),), "video": (PromptVideo(str(watched), "digest"),)}
    with_image = replace(prompts[1], audio=(heard,), **files)
    sound = np.zeros((2, 8000), np.float32)
    film = Media(video=np.full((3, 3, 32, 32), 9, np.uint8), fps=8, audio=sound, sample_rate=8000)
    media = [Media(image=np.full((3, 4, 4), 5, np.uint8)), film]
    draw("run/samples", 1)[0].rename(samples / "train-000001.png")  # the grid, which is no sample
    rows = [
        _row(Shown(None, prompt, Score(0.5)), one, write_media(one, samples / f"train-000001-{i:02d}"))
        for i, (one, prompt) in enumerate(zip(media, [prompts[0], with_image], strict=True))
    ]
    (samples / "train-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"train-000001.jsonl:2: image: '\S+007.png' leads out of its folder; copy"):
        find_samples([run], 100)
    found = find_samples([run], 100, [carried.parent])
    assert [replace(one.prompt, images=(), audio=(), video=()) for one in found] == prompts
    assert [file.path for file in found[1].prompt.files] == [str(carried), str(watched), heard.path]
    again = [read_media(one.files) for one in found]
    assert np.array_equal(again[0].image, media[0].image) and np.array_equal(again[1].audio, film.audio)
    assert again[1].fps == 8 and again[1].video.shape == film.video.shape
    assert read_media({"video": found[1].files["video"]}).audio.shape[0] == 2, "a video's own sound"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.png"], "nowhere.png: no such file or folder"),
        (["empty"], "empty: holds no media; expected files with one of the suffixes .png, .jpg"),
        (["recipe.yaml"], "recipe.yaml: expected a folder or a file with one of the suffixes .png"),
        (["lost.jsonl"], "lost.jsonl:1: names no media; expected a path as image, video or audio"),
        (["clash.jsonl"], "clash.jsonl:1: metadata: 'style' is a column of the table, too"),
        (["ragged.csv"], "ragged.csv:2: more cells than the first line has columns"),
        (["broken.parquet"], "broken.parquet cannot be read as parquet: "),
        (["images", "--out", "scores.txt"], "--out: expected a file that ends in .csv or .parquet, got scores.txt"),
        (["images", "--grid", "grid.what"], "--grid: expected an image file, such as grid.png, got grid.what"),
        (["images", "--json", "images"], "--json: cannot write images: Is a directory"),
        (["images", "reward.scorers=[]"], "recipe.yaml: reward.scorers: required, at least one"),
        (["images", "reward.scorers=[{name: motion_smoothness}]"], "reward.scorers.0: scorer 'motion_smoothness' acc"),
        (["images", "reward.timeout_s=0"], "recipe.yaml: reward.timeout_s: "),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(words, said, capsys):
    draw("images", 10)
    Path("empty").mkdir()
    Path("lost.jsonl").write_text('{"prompt": "a"}\n')
    Path("clash.jsonl").write_text('{"prompt": "a", "image": "x.png", "style": 1, "metadata": {"style": 2}}\n')
    Path("ragged.csv").write_text("prompt,image\na,b,c\n")
    Path("broken.parquet").write_bytes(b"PAR1")
    assert refused(capsys, "recipe.yaml", *words).startswith(said)
    assert not judges.calls


def test_a_file_that_cannot_be_scored_is_a_row_with_its_error(capsys):
    draw("images", 10, 13, 30)
    Path("images/020.png").write_bytes(b"no image")
    Path("images/040.mp4").write_bytes(b"no video")
    Path("images/050.wav").write_bytes(b"no sound")
    found = scored("images")
    assert [row["reward"] for row in found["rows"]] == [10, None, None, 30, None, None] and found["failed"] == 4
    errors = [row["error"] for row in found["rows"]]
    assert "thirteen is unlucky" in errors[1] and errors[2].startswith("images/020.png: not a PNG")
    assert "the video cannot be decoded" in errors[4] and "the audio cannot be decoded" in errors[5]
    assert "4 of 6 samples could not be scored" in capsys.readouterr().out
    assert sum(prompt.index == 1 for prompt in judges.calls) >= 2, "and once more"


def test_a_sample_that_an_optional_scorer_failed_is_left_out(capsys):
    draw("images", 10, 13, 30)
    judges_ = f"{{name: '{JUDGES}:Steady'}}, {{name: '{JUDGES}:Red', on_failure: leave_out}}"
    found = scored("images", f"reward.scorers=[{judges_}]")
    assert [row["reward"] for row in found["rows"]] == [110, None, 130] and found["failed"] == 1
    assert found["rows"][1]["error"] == "no answer of tests.commands.scoring.judges:Red"
    assert found["statistics"]["reward"]["mean"] == 120
    assert "2 of 3 samples scored" in capsys.readouterr().out


def test_names_and_prompts_are_escaped(capsys):
    for file, name in zip(draw("images", 10, 20), (b"\x1b[2J.png", b"caf\xe9.png"), strict=True):
        file.rename(Path("images", os.fsdecode(name)))
    Path("images", os.fsdecode(b"caf\xe9.txt")).write_text("a \x1b[2J cat")
    Path("images", os.fsdecode(b"z\xe9.png")).write_bytes(b"no image")
    found = scored("images", "--out", "rows.csv")
    names = [row["file"] for row in found["rows"]]
    assert names == [r"images/\x1b[2J.png", r"images/caf\udce9.png", r"images/z\udce9.png"]
    assert found["failed"] == 1 and found["rows"][1]["prompt"] == "a \x1b[2J cat"
    assert "\x1b[2J" not in capsys.readouterr().out


def test_without_any_score_the_exit_code_is_1_and_no_grid_is_left():
    draw("images", 10)
    found = scored("images", "--grid", "grid.png", judge="Demanding", code=1)
    [row] = found["rows"]
    assert row["error"] == f"scorer '{JUDGES}:Demanding': the prompt has no target"
    assert not judges.calls and not Path("grid.png").exists() and found["statistics"] == {}


def test_ctrl_c_keeps_what_was_scored(capsys, monkeypatch):
    real = scoring.score_samples

    def record(config, reward, rows, checks, repeat, progress):
        def told(number):
            progress(number)
            if number == 2:
                judges.recorded.set()

        return real(config, reward, rows, checks, repeat, told)

    monkeypatch.setattr(scoring, "score_samples", record)
    draw("images", 10, 20, 60, 80)
    found = scored("images", "reward.batch=1", judge="Impatient", code=130)
    assert [row["reward"] for row in found["rows"]] == [10, 20]
    judges.over.set()
    assert "2 of 4 samples were not reached" in capsys.readouterr().err


KEPT = ("reward.cache.path=kept/scores.sqlite",)


@pytest.fixture
def kept(recipe: Path) -> None:
    write_world(recipe.parent, reward=reward("Exact", probe=True))
    draw("images", 10, 20, 30)


def asked(*words: str) -> tuple[int, dict[str, Any]]:
    """Returns how many samples the scorers were asked for by `omni-async score images`, and its JSON."""
    judges.calls.clear()
    assert cli.main(["score", "recipe.yaml", "images", *words, "--json", "found.json"]) == 0
    return len(judges.calls), json.loads(Path("found.json").read_text())


def test_a_second_score_calls_no_deterministic_scorer(kept, capsys):
    calls, first = asked(*KEPT)
    assert calls == 5 and first["cached"] == 0, "three files, and the two samples that scorers are tried with"
    calls, second = asked(*KEPT)
    assert calls == 0 and second["cached"] == 3
    assert second["rows"] == first["rows"] and second["statistics"] == first["statistics"]
    assert "3 answers of scorers came from reward.cache" in capsys.readouterr().out


def test_check_asks_scorers_whatever_is_kept_and_keeps_nothing(kept):
    for _ in range(2):
        judges.calls.clear()
        assert cli.main(["check", "recipe.yaml", *KEPT]) == 0
        assert len(judges.calls) == 2 and not Path("kept").exists()


def test_cases_without_a_cache(kept):
    assert asked()[0] == asked()[0] == 5
    assert asked(*KEPT)[0] == 5
    assert asked(*KEPT, "--repeat", "2")[0] == 2 + 6
    moody = "reward.scorers=[{name: 'tests.commands.scoring.judges:Red'}]"
    assert asked(*KEPT, moody)[0] == asked(*KEPT, moody)[0] == 5


def test_whatever_may_change_the_answer_is_another_question(kept):
    words = (*KEPT, "reward.probe=false")
    sidecar = Path("images/010.json")
    assert asked(*words)[0] == 3
    draw("images", 21)
    Path("images/021.png").rename("images/020.png")
    assert asked(*words)[0] == 1
    for fields in ({}, {"target": "x"}, {"target": "x", "style": "ink"}, {"target": "x", "style": "oil"}):
        sidecar.write_text(json.dumps({"prompt": "a cat", **fields}))
        assert (asked(*words)[0], asked(*words)[0]) == (1, 0), fields
    assert asked(*words, "reward.scorers.0.params.scale=2")[0] == 3
    assert asked(*words, "reward.scorers=[{name: 'tests.commands.scoring.judges:Lower'}]")[0] == 3
    assert asked(*words)[0] == 0, "what was known before still is"
    draw("images", 5)
    assert asked(*words)[0] == 1, "the number of a sample is no part of the question"
    weighted = asked(*words, "reward.scorers.0.weight=7")[1]["statistics"]
    assert weighted["reward"]["max"] == 210 and not judges.calls


def test_of_two_scorers_one_is_asked_and_a_failure_is_not_kept(kept):
    both = "reward.scorers=[{name: 'tests.commands.scoring.judges:Exact'}, {name: 'tests.commands.scoring.judges:Red'}]"
    words = (*KEPT, both, "reward.probe=false")
    draw("images", 13)
    _, first = asked(*words)
    assert first["failed"] == 1 and first["rows"][1]["reward"] is None
    _, second = asked(*words)
    assert second["rows"] == first["rows"] and second["cached"] == 3
    assert sum(prompt.index != 1 for prompt in judges.calls) >= 3
    assert sum(prompt.index == 1 for prompt in judges.calls) > 0, "what failed is asked again"


def test_a_file_that_is_no_cache_is_left_alone(kept, capsys):
    Path("kept").mkdir()
    Path(KEPT[0].partition("=")[2]).write_text("dear diary, " * 100)
    assert asked(*KEPT)[0] == asked(*KEPT)[0] == 5
    assert "warning: reward.cache.path: " in capsys.readouterr().err
    assert Path("kept/scores.sqlite").read_text().startswith("dear diary")

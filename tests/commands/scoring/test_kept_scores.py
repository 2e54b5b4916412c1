"""Tests that nothing is scored twice which `reward.cache` has, by `omni-async score` and by reward workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omni_async import cli
from omni_async.control.events import Shown
from omni_async.media import Media
from omni_async.records.write.images import write_media
from omni_async.runtime.driver.sample_files import _row
from omni_async.types import Prompt, Score
from tests.commands.scoring import judges
from tests.commands.scoring.test_score import draw, reward
from tests.runtime.runtime_world import write_world

KEPT = ("reward.cache.path=kept/scores.sqlite",)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_world(tmp_path, reward=reward("Exact", probe=True))
    monkeypatch.chdir(tmp_path)
    judges.calls.clear()
    draw("images", 10, 20, 30)
    return tmp_path


def asked(*words: str) -> tuple[int, dict[str, Any]]:
    """Returns how many samples the scorers were asked for by `omni-async score images`, and its JSON."""
    judges.calls.clear()
    assert cli.main(["score", "recipe.yaml", "images", *words, "--json", "found.json"]) == 0
    return len(judges.calls), json.loads(Path("found.json").read_text())


def test_a_second_score_of_the_same_folder_calls_no_deterministic_scorer_and_says_the_same(capsys):
    calls, first = asked(*KEPT)
    assert calls == 5 and first["cached"] == 0, "three files, and the two samples that scorers are tried with"
    calls, second = asked(*KEPT)
    assert calls == 0 and second["cached"] == 3
    assert second["rows"] == first["rows"] and second["statistics"] == first["statistics"]
    assert "3 answers of scorers came from reward.cache" in capsys.readouterr().out


def test_check_asks_scorers_whatever_is_kept_and_keeps_nothing():
    for _ in range(2):
        judges.calls.clear()
        assert cli.main(["check", "recipe.yaml", *KEPT]) == 0
        assert len(judges.calls) == 2 and not Path("kept").exists()


def test_without_a_file_or_with_repetitions_or_where_it_is_not_deterministic_the_scorer_is_asked():
    assert asked()[0] == asked()[0] == 5
    assert asked(*KEPT)[0] == 5
    assert asked(*KEPT, "--repeat", "2")[0] == 2 + 6
    moody = "reward.scorers=[{name: 'tests.commands.scoring.judges:Red'}]"
    assert asked(*KEPT, moody)[0] == asked(*KEPT, moody)[0] == 5


def test_another_pixel_prompt_target_key_parameter_or_class_is_another_question():
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
    assert asked(*words, "reward.scorers.0.weight=7")[1]["statistics"]["reward"]["max"] == 210, (
        "a weight is no question"
    )


def test_where_one_scorer_is_deterministic_the_other_is_asked_and_a_failure_is_not_kept():
    both = "reward.scorers=[{name: 'tests.commands.scoring.judges:Exact'}, {name: 'tests.commands.scoring.judges:Red'}]"
    words = (*KEPT, both, "reward.probe=false")
    draw("images", 13)
    _, first = asked(*words)
    assert first["failed"] == 1 and first["rows"][1]["reward"] is None
    _, second = asked(*words)
    assert second["rows"] == first["rows"] and second["cached"] == 3
    assert sum(prompt.index != 1 for prompt in judges.calls) >= 3
    assert sum(prompt.index == 1 for prompt in judges.calls) > 0, "what failed is asked again"


def test_samples_that_a_run_kept_are_known_by_their_pixels_and_prompt(folder):
    run = folder / "run"
    (run / "samples").mkdir(parents=True)
    (run / "config.yaml").touch()
    Path("images/010.json").write_text('{"prompt": "a cat", "style": "ink"}')
    assert asked(*KEPT)[0] == 5
    with Image.open("images/010.png") as image:
        media = Media(image=np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))
    prompt = Prompt(9, "a cat", metadata={"style": "ink"})
    row = _row(Shown(None, prompt, Score(0.5)), write_media(media, run / "samples" / "train-000001-00"))
    (run / "samples" / "train-000001.jsonl").write_text(json.dumps(row))
    judges.calls.clear()
    assert cli.main(["score", "recipe.yaml", "run", *KEPT, "reward.probe=false"]) == 0 and not judges.calls


def test_a_file_that_is_no_cache_is_left_alone_and_costs_no_score(capsys):
    Path("kept").mkdir()
    Path(KEPT[0].partition("=")[2]).write_text("dear diary, " * 100)
    assert asked(*KEPT)[0] == asked(*KEPT)[0] == 5
    assert "warning: reward.cache.path: " in capsys.readouterr().err
    assert Path("kept/scores.sqlite").read_text().startswith("dear diary")

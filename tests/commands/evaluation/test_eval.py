"""Tests `omni-async eval`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from omni_async import cli
from omni_async.commands.evaluation.results import Failed, compare, show
from omni_async.commands.evaluation.scores import record
from omni_async.commands.evaluation.settings import Settings
from omni_async.commands.evaluation.statistics import clustered_mean, paired_test
from omni_async.plugins.families import find_family
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.types import Score
from tests.commands.evaluation.conftest import PROMPTS
from tests.commands.scoring import judges
from tests.config.recipe import MINIMAL, load_text
from tests.support.configs import build


def evaluated(*words: str | Path, code: int = 0) -> Path:
    assert cli.main(["eval", *map(str, words), "--out", "compared"]) == code
    return Path("compared")


def table(file: Path) -> list[dict[str, str]]:
    return [*csv.DictReader(file.read_text().splitlines())]


def numbers(out: Path) -> dict[str, Any]:
    return {one["model"]: one["numbers"] for one in json.loads((out / "results.json").read_text())["models"]}


def test_a_run_is_compared_with_its_base_by_its_own_reward(finished, capsys):
    out = evaluated(finished.path, "--which", "base,1,3")
    models = ["base", "update-000001", "update-000003"]
    rows = table(out / "scores.csv")
    assert [(row["model"], row["prompt"], row["sample"]) for row in rows] == [
        (model, str(prompt), str(sample)) for model in models for prompt in range(3) for sample in range(2)
    ]
    rewards = {model: np.array([float(row["reward"]) for row in rows if row["model"] == model]) for model in models}
    for row in rows:
        image = np.array(Image.open(out / row["model"] / f"00{row['prompt']}-{row['sample']}.png"))
        assert float(row["reward"]) == pytest.approx(image.mean())
        assert float(row["reward/red"]) == pytest.approx(image[..., 0].mean())
    prompts = [0, 0, 1, 1, 2, 2]
    found = numbers(out)
    for model in models:
        expected = clustered_mean(rewards[model], prompts)
        assert [found[model]["reward"][key] for key in ("mean", "low", "high", "prompts")] == pytest.approx(
            [expected.mean, expected.low, expected.high, 3]
        )
    assert found["base"]["reward"]["minus_first"] is None
    against = found["update-000003"]["reward"]["minus_first"]
    test = paired_test(rewards["update-000003"] - rewards["base"], prompts)
    assert against["p"] == test.p and against["exact"]
    assert against["difference"]["mean"] == pytest.approx(rewards["update-000003"].mean() - rewards["base"].mean())
    assert against["p_holm"] >= against["p"]
    # The last round of the run had the same samples, and so the same mean.
    assert found["update-000003"]["reward"]["mean"] == pytest.approx(finished.summary.validation[-1].value)
    assert {row["number"] for row in table(out / "results.csv")} == {"reward", "reward/red"}
    assert "update-000003" in capsys.readouterr().out
    strip = Image.open(out / "filmstrip.png")
    assert (strip.width // 192, strip.height // 192) == (3, 3)


def test_p_values_are_corrected_and_pairs_need_both():
    def of(values):
        return {key: Score(value) for key, value in values.items()}

    keys = [(prompt, 0) for prompt in range(6)]
    scores = {
        "old": of(dict.fromkeys(keys, 0.0)),
        "new": of({key: 1.0 + key[0] for key in keys}),
        "partly": of(dict.fromkeys(keys[:2], 1.0) | {(9, 0): 5.0}),
    }
    failed = [Failed("partly", prompt, 0, "no") for prompt in range(2, 6)]
    results = compare([*scores], scores, failed, 6)
    old, new, partly = results.rows
    assert old.paired is None and new.paired is not None and partly.paired is not None
    assert (new.paired.p, new.paired.p_holm) == (2 / 64, 2 * 2 / 64)
    assert partly.paired.difference is not None
    assert (partly.paired.difference.samples, partly.paired.difference.mean, partly.estimate.samples) == (2, 1.0, 3)
    assert (partly.paired.p, partly.paired.p_holm) == (0.5, 0.5)
    assert [row.comparable for row in results.rows] == [True, True, False]
    console = Console(file=io.StringIO(), width=160)
    show(console, results)
    said = console.file.getvalue()
    assert "means of partly are over other samples than the first model's, and not comparable" in said
    assert "partly: 4 of 6 samples not scored: no" in said


def test_a_sample_without_a_score_is_left_out_and_tried_again(finished, capsys):
    Path("prompts.txt").write_text("lucky\nunlucky\n")
    words = (finished.path, "--which", "base,last", "--prompts", "prompts.txt", "--seeds", "2")
    out = evaluated(*words)
    found = json.loads((out / "results.json").read_text())
    assert [one["failed"] for one in found["models"]] == [2, 2]
    assert {one["why"].partition(":")[0] for one in found["failed"]} != {""}
    rows = table(out / "scores.csv")
    assert {(row["text"], row["reward"] == "", row["error"] == "") for row in rows} == {
        ("lucky", False, True),
        ("unlucky", True, False),
    }
    assert numbers(out)["base"]["reward"]["samples"] == 2
    said = capsys.readouterr().out
    for model in ("base", "update-000003"):
        assert f"{model}: 2 of 4 samples not scored: " in said
    assert "not comparable" not in said, "the same samples are left out of both"
    assert [sum(one["reasons"].values()) for one in found["models"]] == [2, 2]
    kept = (out / "scores.jsonl").read_text()
    judges.calls.clear()
    evaluated(*words)
    assert "unlucky" in {prompt.text for prompt in judges.calls}
    assert (out / "scores.jsonl").read_text() == kept


def test_without_any_score_there_is_no_number_and_exit_code_1(finished):
    Path("prompts.txt").write_text("unlucky\n")
    out = evaluated(finished.path, "--which", "base", "--prompts", "prompts.txt", "reward.outage_s=0", code=1)
    assert numbers(out) == {"base": {}}


def test_two_folders_are_compared_by_a_recipe_s_reward(finished, checkpoint):
    recipe = finished.path / "config.yaml"
    out = evaluated(checkpoint, finished.path, "--which", "last", "--recipe", recipe, "--limit", "1", "--seeds", "1")
    assert [*numbers(out)] == ["tiny", "update-000003"]
    assert numbers(out)["tiny"]["reward"]["low"] is None


def test_samples_and_scores_are_kept_and_a_model_may_be_added(finished, monkeypatch, capsys):
    drawn: list[str] = []
    generate = DiffusersEngine.generate

    async def generating(engine: DiffusersEngine, request: Any) -> Any:
        drawn.append(request.sample_id)
        return await generate(engine, request)

    monkeypatch.setattr(DiffusersEngine, "generate", generating)
    words = (finished.path, "--which", "base,2")
    out = evaluated(*words)
    before, first = numbers(out), len(drawn)
    assert (first, len(judges.calls)) == (12, 12)
    evaluated(*words, "reward.batch=3")
    assert (len(drawn), len(judges.calls), numbers(out)) == (12, 12, before)
    evaluated(finished.path, "--which", "base,2,3")
    assert (len(drawn), len(judges.calls)) == (18, 18 + 2)  # two that were scored before show that the judge is there
    assert numbers(out)["update-000002"]["reward"]["mean"] == before["update-000002"]["reward"]["mean"]
    capsys.readouterr()
    evaluated(*words, "reward.scorers=[{name: jpeg_size}]", code=2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("omni-async: --out: compared was made with reward ")


def test_ctrl_c_keeps_scores_and_the_same_command_scores_the_rest(finished, capsys):
    judges.impatient.append(4)
    words = (finished.path, "--which", "base,last", "reward.batch=1")
    out = evaluated(*words, code=130)
    assert "the same command resumes" in capsys.readouterr().err
    kept = len((out / "scores.jsonl").read_text().splitlines())
    assert 1 <= kept < 12
    judges.calls.clear()
    judges.impatient.clear()
    evaluated(*words)
    assert len(judges.calls) == 12 - kept + 2
    assert numbers(out)["base"]["reward"]["samples"] == 2 * len(PROMPTS)


def test_scores_of_another_judge_are_not_mixed_in():
    def asked(model, replicas):
        servers = [{"name": "judge", "model": model, "replicas": replicas}]
        scorers = [{"name": "vlm_judge", "params": {"server": "judge", "model": "judge"}}]
        return record(build({}, {"reward.servers": servers, "reward.scorers": scorers}))

    assert asked("models/a", 1) == asked("models/a", 2) != asked("models/b", 1)


def test_settings_are_recorded_without_credentials():
    scorer = "{name: vlm_judge, params: {server: qwen, model: qwen, token: hunter2}}"
    config = load_text(
        MINIMAL,
        f"reward.scorers=[{scorer}]",
        "reward.servers=[{name: qwen, model: a}]",
        "validation.prompts=v.txt",
        "rollout.calls=2",
        f"rollout.program={{name: refine, settings: {{judge: {scorer}}}}}",
    )
    recorded = json.dumps([record(config), Settings(config, find_family("qwen_image"), ()).record()])
    assert "hunter2" not in recorded and recorded.count("***") == 2


def test_wrong_input_is_refused_before_anything_is_drawn(finished, checkpoint, capsys):
    evaluated(checkpoint, "--prompt", "x", code=2)
    assert "reward.scorers: empty" in capsys.readouterr().err
    evaluated(finished.path, "reward.scorers=[{name: no_such_scorer}]", code=2)
    assert "no_such_scorer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluated(finished.path, "--which", "newest")
    assert "expected base, best, last or a number of updates, got 'newest'" in capsys.readouterr().err
    assert not Path("compared").exists()

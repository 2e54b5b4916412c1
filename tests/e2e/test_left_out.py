"""Tests what a run says of samples, prompts and groups that have no score, through the real command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_async.checkpoint import read_state
from omni_async.cli import main
from omni_async.commands.report.data import page_of
from omni_async.records.read.record import read_run
from omni_async.rollout.base import Trajectory
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.types import SampleRequest
from tests.e2e import scorers

QUICK = (
    *("rollout.group_size=2", "rollout.num_inference_steps=2", "rollout.sde.window={size: 1, range: [0, 1]}"),
    "trainer.groups_per_update=1",
    "reward.retries=0",
)
LEFT_OUT = "1 of 2 samples not scored: no face found; it cannot be the best"


def rounds(recipe: Path, *prompts: dict[str, Any]) -> str:
    file = recipe.with_name("validation.jsonl")
    file.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    return f"validation={{every: 1, prompts: {file}, num_inference_steps: 2, samples_per_prompt: 1}}"


def run_of(recipe: Path) -> Path:
    (folder,) = (
        path for path in (recipe.parent / "runs").iterdir() if path.is_dir() and (path / "config.yaml").exists()
    )
    return folder


def test_a_round_without_a_score_is_not_the_best(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lets the scorer fail the hard prompt from the third round on, so that the mean doubles."""
    monkeypatch.setattr(scorers.Forgetful, "left", 2)
    hard = rounds(recipe, {"prompt": "the digit 1"}, {"prompt": "the digit 2", "hard": True})
    kept = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=1", "staleness.max_updates=0")
    scored = "reward.scorers=[{name: 'tests.e2e.scorers:Forgetful'}]"
    job = (str(recipe), *QUICK, hard, scored, *kept)
    assert main(["train", *job, "trainer.updates=2"]) == 0
    said = capfd.readouterr().out.splitlines()
    folder = run_of(recipe)
    assert any(
        line.startswith("validation of version 2: reward 1.") and line.endswith(f"; {LEFT_OUT}") for line in said
    )
    curve = next(line for line in said if line.startswith("validation of versions 0 to 2 (3 rounds): reward 1."))
    assert curve.endswith(" over the 1 of 2 samples that both have scored")
    assert f"  version 2: {LEFT_OUT}" in said

    (line,) = [one for one in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if one["update"] == 2
               and "finished" not in one]  # fmt: skip
    assert (line["samples"], line["asked"], line["not_scored"]) == (1, 2, 1)
    assert line["reasons"] == [{"reason": "no face found", "samples": 1}] and abs(line["validation_gain"]) < 0.1
    summary = json.loads((folder / "summary.json").read_text())
    assert [one["samples"] for one in summary["validation"]] == [2, 2, 1]
    assert summary["validation"][2]["reasons"] == {"no face found": 1}
    assert summary["validation_change"]["samples"] == 1

    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"update-000001", "update-000002"}
    assert main(["status", str(folder)]) == 0
    assert f"version 2: {LEFT_OUT}" in capfd.readouterr().out
    assert main(["export", str(folder), "--which", "best", "--out", str(recipe.with_name("best"))]) == 0
    shown = capfd.readouterr()
    assert "weights of update 1 " in shown.out and "update 2 scored too few samples to be the best" in shown.err
    card = recipe.with_name("best").joinpath("README.md").read_text()
    assert f"update 2: {LEFT_OUT}" in card and "over the 1 of 2 samples that both have scored" in card
    for section, text in (
        ("verdict", f"Validation of version 2: {LEFT_OUT}."),
        ("curves", "not comparable as they are: 2 (1 of 2)"),
        ("alerts", f"Validation of version 2: {LEFT_OUT}."),
    ):
        assert text in json.dumps(page_of([read_run(folder)], "now", (section,)))

    # The best is still that of the first attempt when the run goes on.
    assert main(["train", *job, "trainer.updates=3", f"checkpoint.resume={folder}"]) == 0
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"update-000001", "update-000003"}
    state = read_state(folder / "checkpoints/update-000003").control
    assert [one.scored for one in state.rounds][:3] == [2, 2, 1]
    assert "validation of versions 0 to 3 (4 rounds)" in capfd.readouterr().out


def test_prompts_that_cannot_be_generated(
    recipe: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = DiffusersEngine.generate

    async def fails(engine: DiffusersEngine, request: SampleRequest) -> Trajectory:
        if request.prompt.text == "7":
            raise ValueError("3608 tokens, of which the encoder takes 1024")
        return await generate(engine, request)

    monkeypatch.setattr(DiffusersEngine, "generate", fails)
    overrides = (*QUICK, "trainer.updates=4", "rollout.retries=0", rounds(recipe, {"prompt": "7"}, {"prompt": "8"}))
    assert main(["train", str(recipe), *overrides, "data.shuffle=false"]) == 0
    said = capfd.readouterr().out
    folder = run_of(recipe)
    why = "generation failed: 3608 tokens, of which the encoder takes 1024"
    assert f"1 of 5 groups was dropped: {why}" in said.splitlines() and "rejected" not in said
    assert "validation of version 0: reward -" in said and f"1 of 2 samples not scored: {why}" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["counters"]["dropped"] == 1 == sum(summary["drop_reasons"].values())
    assert summary["reject_reasons"] == {}
    assert main(["status", str(folder)]) == 0
    assert f"1 of 5 groups was dropped: {why}" in capfd.readouterr().out.splitlines()
    page = json.dumps(page_of([read_run(folder)], "now", ("verdict", "endings")))
    assert f"1 of 5 groups was dropped: {why}." in page
    assert main(["export", str(folder), "--out", str(recipe.with_name("out"))]) == 0
    assert f"1 of 5 groups was dropped: {why}" in recipe.with_name("out").joinpath("README.md").read_text()

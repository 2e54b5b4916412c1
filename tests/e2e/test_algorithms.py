"""Tests every objective as a whole run: it trains, moves the weights, keeps the staleness budget and accounts for every
group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_async.config import ConfigError, load
from omni_async.preflight.check import preflight
from recipes.quickstart import build_preferences
from tests.e2e.runs import Run, check_every_group_ended_once, checkpoint_weights, command_line, left_behind, run

RECIPES = Path(__file__).parents[2] / "recipes" / "quickstart" / "algorithms"
_WINDOW = ("rollout.sde.window={size: 2, range: [0, 3]}",)
_FORWARD = ("rollout.sde=null", "algorithm.clip_range_nats=null", "algorithm.forward.draws=2")
_ADAMW = ("trainer.optimizer={name: adamw, lr: 1e-3}", "staleness.max_updates=1")

OBJECTIVES = {
    "flow_grpo": (),
    "dance_grpo": ("rollout.sde.kind=dance",),
    "mix_grpo": (
        "rollout.sde.window.schedule=progressive",
        "rollout.sde.window.updates_per_position=1",
        "algorithm.mix.log_ratio_coef=0.1",
    ),
    "grpo_guard": ("algorithm.kl_coef=0.01", "algorithm.clip_range_nats=null"),
    "flow_dppo": ("algorithm.clip_range_nats=null",),
    "gspo": ("rollout.sde.kind=cps",),
    "diffusion_nft": (*_FORWARD, "algorithm.kl_coef=1e-4"),
    "awm": (*_FORWARD, "algorithm.awm.ema_coef=0.1", "trainer.ema={every: 1}", "algorithm.awm.ratio=sum_first"),
    "diffusion_dpo": _FORWARD,
}


def moved(finished: Run) -> bool:
    first, last = (checkpoint_weights(finished.path / "checkpoints" / f"update-{n:06d}") for n in (1, 3))
    assert all(torch.isfinite(weight).all() for weight in last.values())
    return any(not torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains(recipe: Path, name: str) -> None:
    finished = run(recipe, f"algorithm.name={name}", *_ADAMW, "checkpoint.every=1", *OBJECTIVES[name])
    assert finished.summary.status == "done", finished.summary.reason
    check_every_group_ended_once(finished)
    assert moved(finished)
    assert len(finished.metrics) == 3 and all(line["grad_norm"] > 0 for line in finished.metrics)


CORRECTIONS = {
    "none": "{mode: none}",
    "decoupled": "{mode: decoupled, weights: importance, kappa_nats: 5.0}",
    "tempered": "{mode: decoupled, weights: tempered, kappa_nats: 5.0}",
    "m2po": "{mode: decoupled, m2: 0.5}",
    "interpolated": "{mode: interpolated, weights: importance, band: [0.2, 5.0]}",
    "trajectory": "{mode: decoupled, weights: importance, level: trajectory, k1: [0.1, 10.0], reject_level: sum}",
    "rejection": "{mode: bypass, k3: 1.0}",
}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_trains_and_logs_the_drift(recipe: Path, correction: str, steps: int) -> None:
    overrides = (
        f"algorithm.correction={CORRECTIONS[correction]}",
        f"trainer.steps_per_update={steps}",
        "checkpoint.every=1",
    )
    finished = run(recipe, *_ADAMW, *overrides)
    assert finished.summary.status == "done", finished.summary.reason
    assert moved(finished)
    for line in finished.metrics:
        assert {
            "log_ratio_nats/variance",
            "ess",
            "engine_mismatch_nats",
            "fresh_fraction",
            "row_staleness/mean",
        } <= line.keys()
        assert 0 < line["ess"] <= 1
        weighs = correction not in ("none",)
        assert ("weight/mean" in line) == weighs and ("masked" in line) == weighs
    fresh = finished.metrics[0]
    assert fresh["fresh_fraction"] == 1 and fresh["engine_mismatch_nats"] < 1e-2
    assert finished.metrics[-1]["row_staleness/max"] == 1


def test_exact_staleness_is_exact_and_repeatable(recipe: Path) -> None:
    overrides = (
        "staleness={max_updates: 2, exact: true}",
        "trainer.updates=5",
        "buffer.groups=6",
        "trainer.optimizer.lr=1.0",
    )
    first, again = (run(recipe, *overrides, f"run.name={name}") for name in ("first", "again"))
    ages = {line["group"]: line["staleness"] for line in first.ledger}
    assert [ages[group] for group in sorted(ages)] == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2]
    weights, expected = again.weights(), first.weights()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pairs.parquet"
    monkeypatch.setattr("sys.argv", ["build_preferences", "--out", str(path), "--pairs", "8"])
    build_preferences.main()
    return path


OFFLINE = (
    "algorithm.name=diffusion_dpo",
    *_FORWARD,
    "rollout.group_size=2",
    "data.prompts=null",
    "reward.scorers=[]",
    "algorithm.dpo.beta=100",
)


def check_offline(finished: Run) -> None:
    assert finished.summary.status == "done", finished.summary.reason
    assert moved(finished)
    ledger = finished.ledger
    assert [line["event"] for line in ledger] == ["trained"] * len(ledger) == ["trained"] * 6
    assert all(line["reward"] == 0.5 and line["staleness"] <= 1 and line["step_versions"] is None for line in ledger)
    actors = {
        event["args"]["name"] for event in finished.trace if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert actors == {"reader", "trainer"}, "no engine, no reward worker, nothing published"


def test_offline_dpo_trains_on_pairs_without_engines_or_scorers(recipe: Path, pairs: Path) -> None:
    check_offline(run(recipe, *OFFLINE, *_ADAMW, "checkpoint.every=1", f"data.preferences={pairs}"))


@pytest.mark.thorough
@pytest.mark.slow
def test_offline_dpo_on_ray(recipe: Path, pairs: Path) -> None:
    overrides = (*OFFLINE, *_ADAMW, "checkpoint.every=1", f"data.preferences={pairs}", "run.runtime=ray")
    answer = command_line(recipe, *overrides, timeout=200)
    assert answer.code == 0, answer
    check_offline(left_behind(recipe, overrides))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_forward_process_objective_on_ray_and_vllm_omni(recipe: Path) -> None:
    overrides = (
        "algorithm.name=diffusion_nft",
        *_FORWARD,
        *_ADAMW,
        "run.runtime=ray",
        "rollout.engine=vllm_omni",
        "checkpoint.every=1",
    )
    answer = command_line(recipe, *overrides, timeout=240)
    assert answer.code == 0, answer
    finished = left_behind(recipe, overrides)
    check_every_group_ended_once(finished)
    assert moved(finished)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_quickstart_recipes_are_accepted(path: Path) -> None:
    config = load(path)
    try:
        preflight(config)
    except ConfigError as error:  # the preference file is written by a script
        assert path.stem == "diffusion_dpo_offline" and "no such file" in str(error)
    assert config.algorithm.name == path.stem.removesuffix("_offline")

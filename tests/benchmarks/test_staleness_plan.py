"""Tests which runs the staleness experiment makes out of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.staleness import RECIPE
from benchmarks.staleness_plan import CORRECTIONS, Cell, Plan
from omni_async.config import ConfigError
from omni_async.config.algorithm import Correction
from omni_async.preflight.check import preflight
from tests.benchmarks.staleness_world import plan_in


def test_cells_are_all_combinations_with_seeds_outermost_then_s(tmp_path: Path) -> None:
    plan = plan_in(tmp_path, seeds=2, staleness=(0, 4), corrections=("none", "bypass"))
    names = [cell.name for cell in plan.cells()]
    assert names == [f"s{s}-{c}-seed{seed}" for seed in (0, 1) for s in (0, 4) for c in ("none", "bypass")]


@pytest.mark.parametrize("staleness", [0, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "correction"),
    [
        ("none", Correction(mode="none")),
        ("bypass", Correction(mode="bypass")),
        ("decoupled_tis", Correction(mode="decoupled", weights="importance", cap=2.0)),
        (
            "decoupled_kappa_tempered",
            Correction(mode="decoupled", weights="tempered", ess_target=0.7, cap=2.0, normalise=True, kappa_nats=1.25),
        ),
    ],
)
def test_a_cell_is_the_quickstart_with_exact_staleness_and_its_correction(
    staleness, name, correction, tmp_path
) -> None:
    plan = Plan(RECIPE, tmp_path / "o ut: #", 50, 2, (0, 2, 4, 8), CORRECTIONS, kappa_nats=1.25)
    config = plan.config(Cell(staleness, name, seed=1))
    preflight(config)
    assert config.algorithm.correction == correction
    assert (config.staleness.max_updates, config.staleness.exact) == (staleness, True)
    assert (config.run.runtime, config.rollout.engine, config.tracking.mlflow.enabled) == (
        "inprocess",
        "diffusers",
        False,
    )
    assert (config.run.seed, config.trainer.updates) == (1, 50)
    assert config.run.dir == str(tmp_path / "o ut: #" / f"s{staleness}-{name}-seed1") == str(plan.out / config.run.name)
    groups = (staleness + 1) * config.trainer.groups_per_update
    assert config.buffer.groups >= groups
    assert config.buffer.trajectories >= groups * config.rollout.group_size
    assert config.validation is not None and config.validation.every == 25
    assert config.checkpoint.every == 50
    assert config.algorithm.clip_range == 1e-3 and config.rollout.group_size == 12, "the rest is the recipe's"


def test_overrides_of_the_user_win_over_the_defaults_of_the_experiment(tmp_path: Path) -> None:
    extra = (
        "rollout.engine=emulated",
        "checkpoint.every=7",
        "validation.every=1",
        "buffer.groups=100",
        "buffer.trajectories=1",
    )
    config = plan_in(tmp_path, extra=extra).config(Cell(1, "none", 0))
    assert config.rollout.engine == "emulated"
    assert config.checkpoint.every == 7
    assert config.validation is not None and config.validation.every == 1
    assert config.buffer.groups == 100, "more slots than needed stay"
    assert config.buffer.trajectories == 2 * 2 * 2, "fewer do not"


def test_a_recipe_without_validation_stays_without(tmp_path: Path) -> None:
    assert plan_in(tmp_path, extra=("validation=null",)).config(Cell(0, "none", 0)).validation is None


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("trainer.updates=5", "use --updates"),
        ("trainer={updates: 5}", "use --updates"),
        ("staleness.max_updates=1", "use --staleness"),
        ("run.seed=3", "use --seeds"),
        ("run.dir=/elsewhere", "use --out"),
        ("algorithm.correction.mode=none", "use --corrections"),
        ("algorithm={name: gspo}", "use --corrections"),
    ],
)
def test_what_the_experiment_varies_cannot_be_overridden(override: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=hint):
        plan_in(tmp_path, extra=(override,)).config(Cell(0, "none", 0))


def test_neighbours_of_what_the_experiment_varies_can(tmp_path: Path) -> None:
    config = plan_in(tmp_path, extra=("trainer.updates_x=1",))
    with pytest.raises(ConfigError, match="unknown key"):
        config.config(Cell(0, "none", 0))
    assert (
        plan_in(tmp_path, extra=("trainer.micro_batch_size=5",)).config(Cell(0, "none", 0)).trainer.micro_batch_size
        == 5
    )

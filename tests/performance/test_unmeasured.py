"""Tests that a stage without a time in the profile is estimated where it can be, and reported either way; no stage
counts as zero in silence."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from omni_async.config import Config
from omni_async.config.algorithm import Correction
from omni_async.config.schema import Lora, Model, Placement
from omni_async.performance.law import unmeasured, with_estimates
from omni_async.performance.profile import NOTHING, Profile, ServiceTime
from omni_async.simulation.result import not_measured, times_of
from omni_async.simulation.simulate import simulate
from tests.tune.tune_world import job as make_job

SECOND = ServiceTime(fixed_s=1.0)
PROFILE = Profile(
    name="run",
    source="measured",
    generate=ServiceTime(unit_s=1.0),
    score=ServiceTime(unit_s=0.1),
    train=ServiceTime(fixed_s=0.3, unit_s=0.6),
    step=SECOND,
    export=SECOND,
    publish=SECOND,
    swap=SECOND,
)


def job(**trainer: object) -> Config:
    """Recomputes log-probs: the second optimizer step needs those of the policy before the first."""
    return make_job(algorithm={"correction": Correction(mode="decoupled")}, trainer={"steps_per_update": 2, **trainer})


@pytest.mark.parametrize(
    ("lora", "checkpointing", "passes"),
    [(None, False, 3), (None, True, 4), (Lora(), False, 2), (Lora(), True, 3)],
)
def test_a_forward_pass_is_estimated_from_what_training_does(lora, checkpointing, passes):
    config = replace(job(gradient_checkpointing=checkpointing), model=Model(path="model", lora=lora))
    assert with_estimates(PROFILE, config).proximal.mean(4) == pytest.approx(PROFILE.train.mean(4) / passes)
    assert f"1/{passes} of a group's training" in unmeasured(PROFILE, config, recomputes_proximal=True)[0]


def test_what_was_measured_stays():
    measured = replace(PROFILE, proximal=SECOND)
    assert with_estimates(measured, job()) == measured
    assert unmeasured(measured, job(), recomputes_proximal=True) == []


def test_a_job_that_needs_the_pass_pays_for_it_by_the_law_and_in_simulation():
    seconds = 2 * 1.0 + 4 * PROFILE.train.mean(8) * (1 + 1 / 3)
    assert times_of(job(), PROFILE).train == pytest.approx(seconds)
    found = simulate(job(), replace(PROFILE, generate=NOTHING), updates=20)
    assert found.step_s == pytest.approx(seconds + PROFILE.export.mean()), "the trainer is the bottleneck"


def test_the_estimate_is_reported_only_where_the_job_needs_it():
    [said] = not_measured(job(), PROFILE)
    assert said.startswith(
        "profile run has no time for proximal, the pass that recomputes log-probs for the correction: estimated as 1/3"
    )
    assert not_measured(job(steps_per_update=1), PROFILE) == []


def test_stages_that_nothing_can_be_said_about_are_named():
    config = replace(job(steps_per_update=1), placement=Placement(colocated=True))
    bare = replace(PROFILE, swap=NOTHING)
    assert not_measured(config, bare) == ["profile run has no time for swap, switch: counted as 0 s"]

"""Tests what an update needs before its first gradient, decided from the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from omni_async.roles.plan import plan_updates
from tests.roles.actor_world import FINAL_LATENTS, GROUP_STD, STEPS, make_config

KL = {"algorithm.kl_coef": 0.1}
TEMPERED = {"algorithm.correction": {"mode": "decoupled", "weights": "tempered"}}
TWO_STEPS = {"trainer.steps_per_update": 2}
REINFORCE = {"algorithm.name": "reinforce", "algorithm.clip_range": None}
OFF = {"trainer.streaming": "off"}
MIX = {"algorithm.mix": {"log_ratio_coef": 0.1}}
FORWARD = FINAL_LATENTS | {"algorithm.name": "diffusion_nft"}
PAIRS = FINAL_LATENTS | {"algorithm.name": "diffusion_dpo"}


def correction(**settings: Any) -> dict[str, Any]:
    return {"algorithm.correction": {"mode": "decoupled", **settings}}


def advantage(**settings: Any) -> dict[str, Any]:
    return {"algorithm.advantage": settings}


@pytest.mark.parametrize(
    ("changes", "mode", "reason"),
    [
        ({}, "unscaled", "applied to the gradient at the end"),
        ({"algorithm.name": "mix_grpo"}, "unscaled", "applied to the gradient at the end"),
        (OFF, "collect", "trainer.streaming is off"),
        (GROUP_STD | KL, "as_ready", "advantage.std: group needs the group alone"),
        (advantage(std="none"), "as_ready", "advantage.std: none needs the group alone"),
        (GROUP_STD | OFF, "collect", "trainer.streaming is off"),
        (KL, "collect", "a loss that does not scale with the advantage"),
        (MIX | {"algorithm.name": "mix_grpo"}, "collect", "does not scale with the advantage"),
        (GROUP_STD | TWO_STEPS, "collect", "applied whole"),
        (TEMPERED | GROUP_STD, "collect", "off-policy correction looks at the whole update"),
        (correction(m2=0.04) | GROUP_STD, "collect", "off-policy correction looks at the whole update"),
        (correction(kappa_nats=0.5), "unscaled", "applied to the gradient"),
        (correction(kappa_nats=0.5) | GROUP_STD, "as_ready", "needs the group alone"),
        (advantage(std="group", track_prompts=True), "collect", "prompts are tracked across groups"),
        (advantage(aggregate="gdpo", std="group"), "collect", "GDPO whitens"),
        (advantage(aggregate="advantages"), "collect", "a global std of every scorer"),
        (advantage(form="reward_weighted"), "collect", "in units of the global std"),
        (advantage(form="reward_weighted", std="none"), "as_ready", "needs the group alone"),
        (advantage(form="best_of_n"), "as_ready", "the best of a group"),
        (advantage(form="best_of_n", aggregate="advantages"), "collect", "a global std of every scorer"),
        (advantage(form="best_of_n", aggregate="gdpo"), "collect", "GDPO whitens"),
        (advantage(aggregate="advantages", std="group"), "as_ready", "needs the group alone"),
        (FORWARD, "collect", "does not scale with the advantage"),
        (FORWARD | GROUP_STD, "as_ready", "needs the group alone"),
        (FORWARD | TWO_STEPS | TEMPERED, "collect", "applied whole"),
        (PAIRS | advantage(aggregate="gdpo", track_prompts=True), "as_ready", "a preference needs its pair alone"),
        (PAIRS | TEMPERED, "as_ready", "a preference needs its pair alone"),
        (PAIRS | OFF, "collect", "trainer.streaming is off"),
    ],
)
def test_how_far_an_update_streams(changes, mode, reason):
    chosen = plan_updates(make_config(**changes))
    assert chosen.mode == mode
    assert reason in chosen.why
    if FINAL_LATENTS.keys() <= changes.keys():
        assert (chosen.proximal, chosen.weigh) == (False, False)
    pairs = changes.get("algorithm.name") == "diffusion_dpo"
    assert (chosen.paired, chosen.samples_per_group) == (pairs, 2 if pairs else 4)


@pytest.mark.parametrize(
    ("changes", "weigh"),
    [
        ({}, False),
        (TEMPERED, True),
        (correction(m2=0.04), True),
        # The optimizer step cannot apply a scale at the end that must not scale a penalty.
        (correction(weights="importance", normalise=True), False),
        (correction(weights="importance", normalise=True) | KL, True),
        (correction(weights="importance", normalise=True) | MIX, True),
        (correction(weights="importance") | KL, False),
        (correction(kappa_nats=0.5), False),
        (correction(kappa_nats=0.5) | KL, True),
        (correction(kappa_nats=0.5, denominator="all") | KL, False),
        (correction(mode="bypass", k1=[0.5, 2.0]) | KL, True),
        (REINFORCE | correction(mode="bypass", weights="importance"), False),
        (REINFORCE | correction(mode="bypass", weights="tempered"), True),
    ],
)
def test_weights_come_first_where_they_need_all_rows(changes, weigh):
    chosen = plan_updates(make_config(**changes))
    assert chosen.weigh is weigh
    assert chosen.proximal is weigh, "with one step per update the proximal policy is the one in training"


def window(size: int, fraction: float) -> dict[str, Any]:
    sde = {"window": {"size": size, "range": [0, STEPS - 1]}}
    return {"rollout.sde": sde, "algorithm.timestep_fraction": fraction}


def draws(fraction: float, **settings: Any) -> dict[str, Any]:
    return FORWARD | {"algorithm.forward": settings, "algorithm.timestep_fraction": fraction}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        (window(2, 1.0), 2),
        (window(4, 0.3), 1),
        (window(3, 0.67), 2),
        (draws(1.0), STEPS),
        (draws(0.5), 2),
        (draws(1.0, sigmas="schedule_wo_first"), STEPS - 1),
        (draws(0.1, draws=3), 3),
    ],
)
def test_rows_per_sample(changes, rows):
    assert plan_updates(make_config(**changes)).rows_per_sample == rows

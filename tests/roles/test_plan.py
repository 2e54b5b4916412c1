"""Tests what an update needs before its first gradient, decided from the configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from omni_async.algorithms.kinds import num_trained
from omni_async.roles.plan import Plan, plan_updates
from tests.roles.actor_world import FINAL_LATENTS, GROUP_STD, STEPS, make_config

MIX = {"algorithm.name": "mix_grpo"}
KL = {"algorithm.kl_coef": 0.1}
TEMPERED = {"algorithm.correction": {"mode": "decoupled", "weights": "tempered"}}


def plan(**changes: Any) -> Plan:
    return plan_updates(make_config(**changes))


def forward(name: str, **changes: Any) -> Plan:
    return plan(**{**FINAL_LATENTS, "algorithm.name": name, **changes})


def correction(**settings: Any) -> dict[str, Any]:
    return {"algorithm.correction": {"mode": "decoupled", **settings}}


def advantage(**settings: Any) -> dict[str, Any]:
    return {"algorithm.advantage": settings}


@pytest.mark.parametrize(
    ("changes", "mode", "reason"),
    [
        ({}, "unscaled", "applied to the gradient at the end"),
        ({"trainer.streaming": "on"}, "unscaled", "applied to the gradient at the end"),
        ({"trainer.streaming": "off"}, "collect", "trainer.streaming is off"),
        (GROUP_STD, "as_ready", "advantage.std: group needs the group alone"),
        (advantage(std="none"), "as_ready", "advantage.std: none needs the group alone"),
        (GROUP_STD | KL, "as_ready", "needs the group alone"),
        (GROUP_STD | {"trainer.streaming": "off"}, "collect", "trainer.streaming is off"),
        (KL, "collect", "a loss that does not scale with the advantage"),
        ({"trainer.steps_per_update": 2}, "collect", "applied whole"),
        (GROUP_STD | {"trainer.steps_per_update": 2}, "collect", "applied whole"),
        (TEMPERED | GROUP_STD, "collect", "off-policy correction looks at the whole update"),
        (correction(m2=0.04) | GROUP_STD, "collect", "off-policy correction looks at the whole update"),
        (correction(kappa_nats=0.5), "unscaled", "applied to the gradient"),
        (correction(kappa_nats=0.5) | GROUP_STD, "as_ready", "needs the group alone"),
        (advantage(std="group", track_prompts=True), "collect", "prompts are tracked across groups"),
        (advantage(std="none", track_prompts=True), "collect", "prompts are tracked across groups"),
        (advantage(aggregate="gdpo"), "collect", "GDPO whitens"),
        (advantage(aggregate="gdpo", std="group"), "collect", "GDPO whitens"),
        (advantage(aggregate="advantages"), "collect", "a global std of every scorer"),
        (advantage(aggregate="advantages", std="group"), "as_ready", "needs the group alone"),
        (MIX, "unscaled", "applied to the gradient at the end"),
        (MIX | {"algorithm.mix": {"log_ratio_coef": 0.1}}, "collect", "does not scale with the advantage"),
    ],
)
def test_the_configuration_decides_how_far_an_update_streams_and_says_why(changes, mode, reason) -> None:
    chosen = plan(**changes)
    assert chosen.mode == mode
    assert reason in chosen.why


@pytest.mark.parametrize(
    ("name", "changes", "mode", "reason"),
    [
        ("diffusion_nft", {}, "collect", "does not scale with the advantage"),
        ("diffusion_nft", GROUP_STD, "as_ready", "needs the group alone"),
        ("awm", KL | TEMPERED, "collect", "does not scale with the advantage"),
        ("diffusion_dpo", TEMPERED, "as_ready", "a preference needs its pair alone"),
        ("diffusion_dpo", advantage(aggregate="gdpo", track_prompts=True), "as_ready", "its pair alone"),
        ("diffusion_dpo", {"trainer.steps_per_update": 2}, "collect", "applied whole"),
        ("diffusion_nft", {"trainer.steps_per_update": 2, **TEMPERED, **KL}, "collect", "applied whole"),
        ("diffusion_dpo", {"trainer.streaming": "off"}, "collect", "trainer.streaming is off"),
    ],
)
def test_objectives_on_final_latents_stream_as_far_and_recompute_and_weigh_nothing(name, changes, mode, reason) -> None:
    chosen = forward(name, **changes)
    assert (chosen.mode, chosen.proximal, chosen.weigh) == (mode, False, False)
    assert reason in chosen.why


@pytest.mark.parametrize(
    ("changes", "weigh"),
    [
        ({}, False),
        (TEMPERED, True),
        (correction(m2=0.04), True),
        # A scale that the optimizer step could apply at the end would scale a penalty with it.
        (correction(weights="importance", normalise=True), False),
        (correction(weights="importance", normalise=True) | KL, True),
        (correction(weights="importance", normalise=True) | {"algorithm.mix": {"log_ratio_coef": 0.1}}, True),
        (correction(weights="importance") | KL, False),
        (correction(kappa_nats=0.5), False),
        (correction(kappa_nats=0.5) | KL, True),
        (correction(kappa_nats=0.5, denominator="all") | KL, False),
        (correction(mode="bypass", k1=[0.5, 2.0]) | KL, True),
        (correction(mode="bypass", k1=[0.5, 2.0], denominator="all") | KL, False),
    ],
)
def test_weights_come_first_where_they_look_at_all_rows_or_would_scale_a_penalty(changes, weigh) -> None:
    chosen = plan(**changes)
    assert chosen.weigh is weigh
    assert chosen.proximal is weigh, "with one step per update the proximal policy is the one in training"
    assert weigh <= (chosen.mode == "collect")


@pytest.mark.parametrize("mode", ["decoupled", "none", "bypass", "interpolated"])
def test_groups_get_a_proximal_pass_where_the_proximal_policy_is_gone_before_the_last_step(mode) -> None:
    one, two = (plan(**correction(mode=mode), **{"trainer.steps_per_update": steps}) for steps in (1, 2))
    assert (one.proximal, two.proximal) == (False, mode in ("decoupled", "none"))
    assert not (one.weigh or two.weigh)


def test_a_preference_takes_two_samples_of_a_group_and_everything_else_all() -> None:
    plans = plan(), forward("awm"), forward("diffusion_dpo")
    assert [(p.paired, p.samples_per_group) for p in plans] == [(False, 4), (False, 4), (True, 2)]


@pytest.mark.parametrize(
    ("size", "fraction", "rows"), [(2, 1.0, 2), (4, 1.0, 4), (4, 0.5, 2), (4, 0.3, 1), (4, 0.01, 1), (3, 0.67, 2)]
)
def test_rows_of_a_window(size, fraction, rows) -> None:
    sde = {"window": {"size": size, "range": [0, STEPS - 1]}}
    found = plan(**{"rollout.sde": sde, "algorithm.timestep_fraction": fraction})
    assert found.rows_per_sample == rows == num_trained(size, fraction)


@pytest.mark.parametrize(
    ("settings", "fraction", "rows"),
    [
        ({}, 1.0, STEPS),
        ({}, 0.5, 2),
        ({"sigmas": "schedule_wo_first"}, 1.0, STEPS - 1),
        ({"draws": 7}, 1.0, 7),
        ({"draws": 3}, 0.1, 3),
    ],
)
@pytest.mark.parametrize("name", ["diffusion_nft", "diffusion_dpo"])
def test_rows_of_final_latents_are_noise_draws(name, settings, fraction, rows) -> None:
    found = forward(name, **{"algorithm.forward": settings, "algorithm.timestep_fraction": fraction})
    assert found.rows_per_sample == rows

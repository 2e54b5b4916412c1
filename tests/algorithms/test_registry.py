"""Tests objectives by name: what each declares is what its function takes, and other packages may add theirs."""

from dataclasses import dataclass, replace

import msgspec
import pytest

from omni_async.algorithms import registry
from omni_async.algorithms.decay import nft_decay
from omni_async.algorithms.objectives.flow_grpo import flow_grpo
from omni_async.algorithms.registry import BUILT_IN, Objective, find_objective, objectives
from omni_async.config.algorithm import Algorithm, Awm, Mix, Nft

TRANSITION = {"flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "gspo"}
FORWARD = {"diffusion_nft", "awm", "diffusion_dpo"}
WITH_KL = Algorithm(kl_coef=0.04)


@dataclass
class EntryPoint:
    """An entry point as an installed package declares it."""

    name: str
    objective: Objective

    def load(self) -> Objective:
        return self.objective


def installed(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "omni_async.objectives"
        return [*points]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_the_family_is_there():
    assert objectives().keys() == TRANSITION | FORWARD
    assert {name for name, objective in objectives().items() if objective.kind == "transition"} == TRANSITION


@pytest.mark.parametrize("objective", BUILT_IN, ids=lambda objective: objective.name)
def test_every_entry_leads_to_its_own_function(objective):
    function = objective.load()
    assert callable(function)
    assert function.__name__ == objective.name
    assert find_objective(objective.name) is objective
    assert objective.summary and "\n" not in objective.summary


def test_what_each_needs_of_a_sample():
    for name in TRANSITION:
        means = {"means"} if name in ("grpo_guard", "flow_dppo") else set()
        assert set(find_objective(name).fields) == {"latents", "log_probs", "conditioning"} | means
    for name in FORWARD:
        assert set(find_objective(name).fields) == {"final", "conditioning"}


def test_what_must_stay_together():
    assert {name: objective.unit for name, objective in objectives().items() if objective.unit != "row"} == {
        "gspo": "sample",
        "awm": "sample",
    }


def test_only_losses_on_steps_without_a_penalty_scale_with_the_advantage():
    """Checks the declarations alone; the tests of the losses check that they scale."""
    for name in TRANSITION:
        assert find_objective(name).homogeneous(Algorithm())
        assert not find_objective(name).homogeneous(WITH_KL)
    assert not find_objective("mix_grpo").homogeneous(Algorithm(mix=Mix(log_ratio_coef=0.1)))
    assert find_objective("flow_grpo").homogeneous(Algorithm(mix=Mix(log_ratio_coef=0.1))), (
        "another objective's setting"
    )
    for name in FORWARD:
        assert not find_objective(name).homogeneous(Algorithm())


@pytest.mark.parametrize(
    ("name", "settings", "auxiliary"),
    [
        ("flow_grpo", Algorithm(), set()),
        ("flow_grpo", WITH_KL, {"reference"}),
        ("gspo", WITH_KL, {"reference"}),
        ("grpo_guard", WITH_KL, {"reference"}),
        ("dance_grpo", WITH_KL, set()),
        ("diffusion_nft", Algorithm(), {"old"}),
        ("diffusion_nft", WITH_KL, {"old", "reference"}),
        ("awm", Algorithm(), set()),
        ("awm", WITH_KL, {"reference"}),
        ("awm", Algorithm(awm=Awm(off_policy=True)), {"old"}),
        ("awm", Algorithm(awm=Awm(ema_coef=1.0)), {"ema"}),
        ("awm", Algorithm(awm=Awm(ema_coef_end=0.3)), {"ema"}),
        (
            "awm",
            Algorithm(awm=Awm(ema_coef=1.0, ema_coef_end=0.0, off_policy=True), kl_coef=0.1),
            {"ema", "old", "reference"},
        ),
        ("diffusion_dpo", Algorithm(), {"reference"}),
    ],
)
def test_further_policies_are_kept_only_where_the_settings_want_them(name, settings, auxiliary):
    assert find_objective(name).auxiliary(settings) == auxiliary


def test_the_old_policy_follows_as_its_objective_says():
    nft = find_objective("diffusion_nft")
    for kind in ("none", "slow", "late"):
        settings = Algorithm(nft=Nft(decay=kind))
        assert [nft.old_decay(settings, update) for update in (1, 80, 600)] == [
            nft_decay(kind, update) for update in (1, 80, 600)
        ]
    assert find_objective("awm").old_decay(Algorithm(), 600) == 0.0, "the policy at the start of the update"


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"algorithm\.name: expected one of \['awm', .*'flow_grpo', .*\], got 'ppo'"):
        find_objective("ppo")


def another(name: str) -> Objective:
    return Objective(name, "another package's", "forward", "builtins:len", ("final",))


def test_a_built_in_name_cannot_be_taken(monkeypatch):
    installed(monkeypatch, EntryPoint("flow_grpo", another("flow_grpo")))
    assert find_objective("flow_grpo").load() is flow_grpo


def test_settings_that_would_take_unknown_keys_are_refused():
    class Settings(msgspec.Struct):
        power: int = 2

    with pytest.raises(TypeError, match=r"objective 'theirs': settings must be a subclass of .*Section"):
        replace(another("theirs"), settings=Settings)

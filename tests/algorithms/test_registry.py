"""Tests objectives by name, those of other packages, and which recipes they can be part of."""

from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints, entry_points

import msgspec
import pytest

from omni_async.algorithms import checks
from omni_async.algorithms.checks import problems
from omni_async.algorithms.kinds import find_kind, samples_per_rank, trajectory_fields
from omni_async.algorithms.registry import Objective, find_objective, nft_decay, objective_names
from omni_async.config.algorithm import Algorithm, Awm, Mix, Nft
from omni_async.config.schema import Config
from omni_async.plugins import entry_points as lookup
from omni_async.plugins.families import SamplingSpec
from omni_async.runtime.preflight.listing import listing
from tests.algorithms.wrong_combinations import DPO, OFFLINE, RIGHT, TOKEN, WRONG
from tests.config.recipe import MINIMAL, load_text

WITH_KL = Algorithm(kl_coef=0.04)
THEIRS = Objective("theirs", "another package's", "forward", "builtins:len", ("final", "conditioning"))
NO_OBJECTIVE = {"name": "theirs"}


def test_losses_on_final_latents_do_not_scale_with_the_advantage_and_anothers_penalty_changes_nothing():
    assert not any(find_objective(name).homogeneous(Algorithm()) for name in ("diffusion_nft", "awm", "diffusion_dpo"))
    assert find_objective("flow_grpo").homogeneous(Algorithm(mix=Mix(log_ratio_coef=0.1)))


@pytest.mark.parametrize(
    ("name", "settings", "auxiliary"),
    [
        ("flow_grpo", Algorithm(), set()),
        *((name, WITH_KL, {"reference"}) for name in ("flow_grpo", "gspo", "grpo_guard", "awm", "token_gspo")),
        ("token_grpo", Algorithm(), set()),
        ("dance_grpo", WITH_KL, set()),
        ("diffusion_nft", Algorithm(), {"old"}),
        ("diffusion_nft", WITH_KL, {"old", "reference"}),
        ("awm", Algorithm(), set()),
        ("awm", Algorithm(awm=Awm(off_policy=True)), {"old"}),
        ("awm", Algorithm(awm=Awm(ema_coef=1.0)), {"ema"}),
        ("awm", Algorithm(awm=Awm(ema_coef_end=0.3)), {"ema"}),
        ("awm", Algorithm(awm=Awm(ema_coef=1.0, off_policy=True), kl_coef=0.1), {"ema", "old", "reference"}),
        ("diffusion_dpo", Algorithm(), {"reference"}),
    ],
)
def test_further_policies_are_kept_only_where_the_settings_want_them(name, settings, auxiliary):
    assert find_objective(name).auxiliary(settings) == auxiliary


@pytest.mark.parametrize(
    ("kind", "decays"),
    [
        ("none", {0: 0.0, 1000: 0.0}),
        ("slow", {0: 0.0, 1: 0.001, 499: 0.499, 500: 0.5, 5000: 0.5}),
        ("late", {0: 0.0, 74: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 208: 0.9975, 209: 0.999, 9000: 0.999}),
    ],
)
def test_the_old_policy_follows_by_a_published_schedule(kind, decays):
    settings = Algorithm(nft=Nft(decay=kind))
    for update, decay in decays.items():
        assert nft_decay(kind, update) == pytest.approx(decay, abs=1e-15)
        assert find_objective("diffusion_nft").old_decay(settings, update) == nft_decay(kind, update)
    assert find_objective("awm").old_decay(Algorithm(), 600) == 0.0, "the policy at the start of the update"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("fast", 1), "'none', 'slow' or 'late', got 'fast'"), (("slow", -1), "update must be >= 0, got -1")],
)
def test_impossible_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        nft_decay(*arguments)


@pytest.fixture
def installed(monkeypatch):
    """Returns a function that has packages register objectives: names, and attributes of this file."""

    def install(**points):
        found = EntryPoints(EntryPoint(name, f"{__name__}:{at}", lookup.OBJECTIVES) for name, at in points.items())
        others = [
            one for group in entry_points().groups for one in entry_points(group=group) if group != lookup.OBJECTIVES
        ]
        monkeypatch.setattr(lookup, "entry_points", lambda: EntryPoints([*found, *others]))

    return install


def test_an_unknown_objective_is_refused_with_the_known_ones(installed):
    installed(theirs="THEIRS")
    with pytest.raises(ValueError, match=r"^algorithm\.name: expected one of \['awm', .*'theirs', .*\], got 'ppo'$"):
        find_objective("ppo")
    for settings in ("{}", "{a: 1}"):
        config = load_text(MINIMAL, "algorithm.name=flow_grp", f"algorithm.settings={settings}")
        with pytest.raises(ValueError, match=r"^algorithm\.name: .*, got 'flow_grp'; did you mean 'flow_grpo'\?$"):
            next(problems(config))


def test_another_packages_objective_is_found_and_a_built_in_name_cannot_be_taken(installed):
    installed(theirs="THEIRS")
    assert "theirs" in objective_names() and find_objective("theirs") is THEIRS
    installed(flow_grpo="THEIRS")
    with pytest.raises(ValueError, match=rf"^algorithm\.name: 'flow_grpo' is built in, and .*'{__name__}:THEIRS'.;"):
        find_objective("flow_grpo")


def test_an_objective_that_could_only_fail_later_is_refused(installed, monkeypatch):
    installed(other="THEIRS")
    with pytest.raises(ValueError, match="'other' is registered for an objective that is called 'theirs'"):
        find_objective("other")
    with pytest.raises(TypeError, match="homogeneous: expected a function, got True"):
        replace(THEIRS, homogeneous=True)
    for compute, why in (("nowhere:f", "No module named 'nowhere'"), (f"{__name__}:NO_OBJECTIVE", "no function")):
        with pytest.raises(ValueError, match=f"objective 'theirs': compute: .*{why}"):
            replace(THEIRS, compute=compute).load()
    for kind, given, missing in (
        ("transition", ("latents", "conditioning"), "['log_probs']"),
        ("forward", ("conditioning",), "['final']"),
    ):
        theirs = replace(THEIRS, kind=kind, fields=given)
        monkeypatch.setattr(checks, "find_objective", lambda name, found=theirs: found)
        why = f"algorithm.name: objective 'theirs': fields: {kind!r} rows are made of {missing} too"
        assert next(checks.problems(load_text(MINIMAL))) == why


def test_the_list_marks_an_objective_that_cannot_be_used(installed):
    installed(theirs="NO_OBJECTIVE")
    [line] = [line.split(maxsplit=1)[1] for line in listing() if line.startswith("  theirs ")]
    assert line.startswith("(cannot be used: algorithm.name: 'theirs' is registered as")


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        ("NO_OBJECTIVE", "is of type dict, not Objective"),
        ("nothing_of_this_name", "cannot be imported: AttributeError: .*nothing_of_this_name"),
    ],
)
def test_what_is_no_objective_is_one_line_with_the_package_that_brought_it(installed, at, reason):
    installed(theirs=at)
    with pytest.raises(ValueError, match=rf"^algorithm\.name: 'theirs' is .* '{__name__}:{at}', which {reason}"):
        find_objective("theirs")


def test_wrong_fields_and_settings_are_refused_where_the_objective_is_made():
    with pytest.raises(ValueError, match=r"^objective 'theirs': fields: engines return .*, got \['velocities'\]$"):
        replace(THEIRS, fields=("final", "velocities"))
    with pytest.raises(TypeError, match=r"objective 'theirs': settings must be a subclass of .*Section"):
        replace(THEIRS, settings=msgspec.Struct)


class Words(SamplingSpec, frozen=True, kw_only=True):
    """Samples of a family that draws tokens."""

    @property
    def most_tokens(self) -> int:
        return 8


def drawing_tokens(config: Config) -> Config:
    return msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, sampling=Words()))


def loaded(overrides: tuple[str, ...]) -> Config:
    """Loads a recipe, of a family that draws tokens if its objective trains tokens."""
    config = load_text(MINIMAL, *overrides)
    tokens = find_kind(find_objective(config.algorithm.name).kind).draws == "tokens"
    return drawing_tokens(config) if tokens else config


@pytest.mark.parametrize(("overrides", "said"), WRONG)
def test_a_combination_that_cannot_work_is_one_line_that_names_the_key(overrides, said):
    [problem] = problems(loaded(overrides))
    assert all(part in problem for part in said.split(" ... "))
    assert "\n" not in problem
    key, _, reason = problem.partition(": ")
    assert reason and key.split(".")[0] in ("algorithm", "data", "reward", "rollout", "trainer", "validation")


def test_what_can_work_is_not_objected_to():
    right = [loaded(overrides) for overrides in RIGHT]
    assert [problem for config in right for problem in problems(config)] == []
    assert {config.algorithm.name for config in right} == {*objective_names()}


def test_an_objective_trains_what_its_family_draws():
    for config, why in (
        (
            load_text(MINIMAL, *TOKEN),
            "token_grpo trains the tokens of answers, and qwen_image draws latents ... flow_grpo",
        ),
        (drawing_tokens(load_text(MINIMAL)), "flow_grpo trains denoising steps ... draws tokens ... token_grpo"),
        (drawing_tokens(load_text(MINIMAL, "algorithm.name=awm", "rollout.sde=null")), "awm ... such as token_grpo"),
    ):
        [problem] = problems(config)
        assert problem.startswith("algorithm.name: ") and all(part in problem for part in why.split(" ... "))


def test_everything_that_is_wrong_is_found():
    config = load_text(
        MINIMAL, *DPO, "rollout.group_size=1", "algorithm.kl_coef=0.1", "algorithm.clip_range=1e-4", "trainer.shard=2"
    )
    assert [problem.split(": ")[0] for problem in problems(config)] == [
        "algorithm.clip_range",
        "trainer.shard",
        "rollout.group_size",
        "algorithm.kl_coef",
    ]


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        (("rollout.group_size=8", "trainer.workers=2"), 4),
        (("rollout.group_size=8", "trainer.workers=9"), 1),
        (("rollout.group_size=8", "trainer.workers=6", "trainer.sequence_parallel=2"), 1.5),
        # Draws of a pair are dealt, not its samples.
        ((*DPO, "rollout.group_size=8", "algorithm.forward.draws=6", "trainer.workers=4"), 8 * 2 / 6),
        ((*OFFLINE, "algorithm.forward.draws=6", "trainer.workers=6", "trainer.sequence_parallel=2"), 2 / 6),
    ],
)
def test_a_group_takes_as_long_as_its_busiest_rank(overrides, share):
    config = load_text(MINIMAL, *overrides)
    assert samples_per_rank(config) == pytest.approx(share, rel=1e-12)


def test_a_group_of_another_size_and_degrees_that_do_not_divide():
    config = load_text(MINIMAL, "trainer.workers=3")
    assert samples_per_rank(config, 10) == 4
    with pytest.raises(ValueError, match=r"trainer\.shard: 2 ranks share"):
        samples_per_rank(load_text(MINIMAL, "trainer.workers=3", "trainer.shard=2"))


BYPASS, MASKED = "{mode: bypass}", "{mode: decoupled, kappa_nats: 2.0}"


def fields(name: str, *overrides: str) -> list[str]:
    config = load_text(MINIMAL, f"algorithm.name={name}", *overrides)
    return sorted(trajectory_fields(find_objective(name), config))


@pytest.mark.parametrize(
    ("name", "correction", "means"),
    [
        ("flow_grpo", BYPASS, False),
        ("flow_grpo", "{mode: decoupled, weights: tempered, k3: 1.0}", False),
        ("flow_grpo", MASKED, True),
        ("grpo_guard", "{}", True),
        ("flow_dppo", BYPASS, True),
        ("flow_dppo", "{mode: decoupled}", False),
        ("flow_dppo", MASKED, True),
    ],
)
def test_means_are_returned_only_where_a_gradient_reads_them(name, correction, means):
    expected = ["conditioning", "latents", "log_probs", *(["means"] if means else [])]
    assert fields(name, f"algorithm.correction={correction}") == expected


def test_a_clip_centred_on_the_drift_reads_the_means_of_the_ratios_denominator():
    drift = "algorithm.clip_centre=drift"
    found = [
        "means" in fields("gspo", f"algorithm.correction={correction}", drift)
        for correction in (BYPASS, "{}", "{mode: none}", "{mode: decoupled}", MASKED)
    ]
    assert found == [True, True, False, False, True]


def test_fields_follow_the_automatic_correction_and_the_kind():
    assert "means" not in fields("flow_grpo", "staleness.max_updates=8"), "no decision of a run reads them"
    assert fields("awm", "rollout.sde=null") == ["conditioning", "final"]
    assert fields("token_cispo", "rollout.sde=null") == ["log_probs", "prompt", "tokens"]

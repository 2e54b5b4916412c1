"""Tests that seeds, windows and prompt order come from the run seed and ids, and from nothing else."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.config import Config, with_spec
from omni_async.config.rollout import Sde, WindowConfig
from omni_async.control.requests import RequestFactory, require_trained_steps, trained_steps
from omni_async.control.seeds import (
    PromptStream,
    derive,
    draw_bucket,
    draw_window,
    initial_noise_seed,
    sample_seeds,
    window_of,
)
from omni_async.plugins.families import SamplingSpec
from omni_async.types import Prompt, SampleResult, SdeWindow, VersionSpans
from tests.control.control_world import make_config, make_prompts, play
from tests.support.configs import build


def test_the_seeds_of_a_run_are_all_different_and_those_of_its_samples() -> None:
    groups = [*product(range(3), range(8), range(8))]
    seeds = [initial_noise_seed(*group) for group in groups]
    for group in groups:
        seeds += (found := sample_seeds(*group, 8))
        assert found == [derive("sample", *group, sample) for sample in range(8)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_never_change() -> None:
    """Compares with fixed numbers: a resumed run and another machine must draw the same noise."""
    assert sample_seeds(0, 1, 2, 4)[3] == 3988333952871425518
    assert initial_noise_seed(0, 1, 2) == 868097029686719843
    assert [draw_window(0, group, 2, (0, 5)).start for group in range(8)] == [3, 0, 0, 0, 2, 0, 3, 3]


def test_windows_are_uniform_over_every_place_they_fit() -> None:
    starts = Counter(draw_window(7, group, 2, (1, 6)).start for group in range(8000))
    assert sorted(starts) == [1, 2, 3, 4]
    # Four positions, 2000 draws each; five standard deviations are 194.
    assert all(abs(count - 2000) < 194 for count in starts.values())


def test_every_epoch_is_a_new_permutation_that_does_not_depend_on_what_was_asked_before() -> None:
    stream, anyhow, other = (PromptStream(make_prompts(12), seed, shuffle=True) for seed in (3, 3, 4))
    numbers = list(range(60))
    expected = [stream[n].index for n in numbers]
    epochs = {tuple(expected[start : start + 12]) for start in range(0, 60, 12)}
    assert len(epochs) == 5 and all(sorted(epoch) == list(range(12)) for epoch in epochs)
    random.Random(0).shuffle(numbers)
    assert [anyhow[n].index for n in numbers] == [expected[n] for n in numbers]
    assert [other[n].index for n in range(60)] != expected
    unshuffled = PromptStream(make_prompts(3), seed=1, shuffle=False)
    assert [unshuffled[n].index for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream([], seed=0, shuffle=True)


def test_requests_differ_by_seed_within_a_group_and_share_its_window() -> None:
    prompt = make_prompts(5)[4]
    again, requests = [], []
    for made in (again, requests):
        factory = RequestFactory(make_config(group_size=3))
        factory.fields = ("latents",)
        made += factory.training(9, prompt, factory.window(9))
    assert again == requests
    assert [r.sample_id for r in requests] == ["g9.s0", "g9.s1", "g9.s2"]
    assert len({r.seed for r in requests}) == 3
    assert {(r.window, r.group, r.prompt.index, r.fields, r.initial_seed) for r in requests} == {
        (factory.window(9), 9, 4, ("latents",), None)
    }
    assert factory.validation(0, tuple(make_prompts(3))) == [], "without a validation section"


def test_a_sample_of_several_calls_owes_a_version_for_every_calls_trained_steps() -> None:
    config = make_config(validation={})
    several = replace(config, rollout=replace(config.rollout, calls=3))
    factory, prompt = RequestFactory(several), make_prompts(1)[0]
    first = factory.training(0, prompt, factory.window(0))[0]
    (plain, *_) = RequestFactory(config).training(0, prompt, factory.window(0))
    assert first == replace(plain, calls=3) and plain.calls == 1, "its first call has the noise of a sample of one"
    assert (trained_steps(first), trained_steps(plain)) == ((6,), (2,))
    assert trained_steps(replace(first, window=None)) == (3 * first.num_inference_steps, 0)
    assert [one.calls for one in factory.validation(0, (prompt,))] == [3]

    def result(*versions: int) -> SampleResult:
        return SampleResult(first.sample_id, "rollout-0", None, None, 0, VersionSpans.of(versions), 0.0, 1.0)

    require_trained_steps(first, result(0, 0, 1, 1, 1, 2))
    with pytest.raises(ValueError, match="2 step versions for 6 trained steps"):
        require_trained_steps(first, result(0, 0))


class Answers(SamplingSpec, frozen=True, kw_only=True):
    max_tokens: int = 5

    @property
    def most_tokens(self) -> int:
        return self.max_tokens


def test_an_answer_owes_a_version_for_each_of_its_tokens() -> None:
    config = make_config(validation={})
    config = replace(config, rollout=replace(config.rollout, sampling=Answers(), sde=None))
    factory, prompt = RequestFactory(config), make_prompts(1)[0]
    request = factory.training(0, prompt, factory.window(0))[0]
    assert request.window is None and trained_steps(request) == range(1, 6)
    (measured, *_) = factory.validation(0, (prompt,))
    assert trained_steps(measured) == (0,) and measured.spec == request.spec, "at the same temperature"
    for drawn in ((0,), (0, 0, 1), (3,) * 5):
        result = SampleResult(request.sample_id, "rollout-0", None, None, 0, VersionSpans.of(drawn), 0.0, 1.0)
        require_trained_steps(request, result)
    for drawn in ((), (0,) * 6):
        result = SampleResult(request.sample_id, "rollout-0", None, None, 0, VersionSpans.of(drawn), 0.0, 1.0)
        with pytest.raises(ValueError, match=f"{len(drawn)} step versions for 1 to 5 tokens"):
            require_trained_steps(request, result)


def test_a_guided_teacher_needs_negative_prompts_of_samples_without_guidance() -> None:
    teacher = {"algorithm.teacher": {"path": "t", "sampling": {"true_cfg_scale": 4.0}}}
    tree = {"model": {"pipeline": "qwen_image", "path": "m"}, "validation": {"prompts": "v.txt"}}
    prompt, guided = make_prompts(1)[0], {"rollout.sampling": {"true_cfg_scale": 2.0}}
    for changes, encoded in ((teacher, 4.0), (teacher | guided, None), (guided, None), ({}, None)):
        config = with_spec(build(tree, changes))
        factory = RequestFactory(config)
        for request in (factory.training(0, prompt, factory.window(0))[0], factory.validation(0, (prompt,))[0]):
            assert request.spec == config.rollout.sampling
            found = request.encoded_for
            assert found == (None if encoded is None else replace(request.spec, true_cfg_scale=encoded))


def config_with(sde: Sde | None, P: int = 1, seed: int = 0) -> Config:
    config = make_config(P=P, seed=seed, validation={})
    return replace(config, rollout=replace(config.rollout, sde=sde))


def starts(count: int, P: int = 1, seed: int = 0, **window: Any) -> list[int]:
    config = config_with(Sde(window=WindowConfig(**window)), P, seed)
    found = [window_of(group, config) or SdeWindow(-1, -1) for group in range(count)]
    assert {each.size for each in found} == {window["size"]}
    return [each.start for each in found]


def test_windows_are_drawn_for_every_group_or_for_every_update_and_shared_by_its_groups() -> None:
    expected = [draw_window(7, group, 3, (1, 9)).start for group in range(50)]
    assert starts(50, P=3, seed=7, schedule="uniform", size=3, range=(1, 9)) == expected
    shared, other = (starts(30, P=3, seed=seed, schedule="random", size=2, range=(1, 6)) for seed in (0, 1))
    assert shared[::3] == shared[1::3] == shared[2::3] and len(set(shared)) > 1 and shared != other


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({"schedule": "progressive", "size": 2, "updates_per_position": 2}, [2, 2, 2, 2]),
        # A stride beyond the last place ends there.
        ({"schedule": "progressive", "size": 2, "updates_per_position": 3, "stride": 2}, [3, 0, 3, 3]),
        # From 25 to 25 // 4 = 6, which only a window that began at 5 would have: 25, 21.2, 17.4 and 13.6.
        ({"schedule": "decay", "size": 2, "updates_per_position": 25}, [25, 21, 17, 13]),
        # At least one update, however short: from 3 to max(1, 3 // 4), and where exp(-2000) is 0.
        ({"schedule": "decay", "size": 1, "updates_per_position": 3}, [3, 2, 2, 1, 1]),
        ({"schedule": "exp_decay", "size": 1, "updates_per_position": 2, "decay_rate": 2000.0}, [2, 1, 1, 1, 1]),
        # As MixGRPO's fastvideo/utils/grpo_states.py, get_dynamic_iters_per_group: max (1 - t / T) + min t / T
        # iterations, rounded down, at the start t, with min = max // 4 and T = max_timesteps.
        (
            {"schedule": "decay", "size": 1, "updates_per_position": 8},
            [max(2, int(8 * (1 - t / 5) + 2 * (t / 5))) for t in range(5)],
        ),
        (
            {"schedule": "exp_decay", "size": 1, "updates_per_position": 10, "decay_rate": 0.5, "decay_from": 1},
            [10, 10, math.ceil(10 * math.exp(-0.5)), math.ceil(10 * math.exp(-1.0)), math.ceil(10 * math.exp(-1.5))],
        ),
    ],
)
def test_a_sliding_window_stays_then_moves(options: dict[str, Any], stays: list[int]) -> None:
    positions = [start for start, stay in enumerate(stays) for _ in range(stay)]
    for at_end, then in (("roll_back", [0, 0]), ("stay", positions[-1:] * 2)):
        found = starts(len(positions) + 2, range=(0, 5), at_end=at_end, **options)
        assert found == positions + then


@pytest.mark.parametrize(("at_end", "start"), [("roll_back", 3), ("stay", 4)])
def test_the_millionth_update_is_found_like_the_first(at_end: str, start: int) -> None:
    """A cycle of four positions is 24 + 20 + 16 + 13 = 73 updates; 10^6 = 13698 x 73 + 46; the third has 44 to 59."""
    window = WindowConfig(schedule="decay", size=2, range=(1, 6), updates_per_position=24, at_end=at_end)  # type: ignore[arg-type]
    assert window_of(8 * 10**6 + 7, config_with(Sde(window=window), P=8)) == SdeWindow(start=start, size=2)


@pytest.mark.parametrize("sde", [Sde(kind="cps", noise_level=0.8, window=WindowConfig(size=3, range=(2, 5))), None])
def test_requests_carry_the_kernel_and_the_window_and_without_an_sde_section_are_noise_free(sde: Sde | None) -> None:
    factory = RequestFactory(config_with(sde))
    factory.fields = ("latents",)
    window = factory.window(5)
    assert window == (SdeWindow(start=2, size=3) if sde else None)
    training, held_out = factory.training(5, *make_prompts(1), window), factory.validation(0, tuple(make_prompts(1)))
    kind = sde.kind if sde else "flow"
    assert {(r.window, r.noise_level, r.sde_kind) for r in training} == {(window, 0.8 if sde else 0.0, kind)}
    assert {(r.window, r.noise_level, r.sde_kind, r.fields) for r in held_out} == {(None, 0.0, kind, ())}


WEIGHTS = (1.0, 2.0, 5.0)


def test_buckets_are_drawn_by_weight_and_depend_on_seed_and_number_alone() -> None:
    drawn = [draw_bucket(7, number, WEIGHTS) for number in range(4000)]
    counts = Counter(drawn)
    for bucket, weight in enumerate(WEIGHTS):
        assert counts[bucket] / 4000 == pytest.approx(weight / sum(WEIGHTS), abs=0.03)
    assert drawn[::-1] == [draw_bucket(7, number, WEIGHTS) for number in reversed(range(4000))]
    assert drawn != [draw_bucket(8, number, WEIGHTS) for number in range(4000)]


def test_all_samples_of_a_group_have_its_spec_and_validation_the_shared_one() -> None:
    config = make_config(group_size=3, buckets=WEIGHTS, validation={"every": 1})
    factory = RequestFactory(config)
    for number in range(20):
        requests = factory.training(number, Prompt(0, "x"), None, factory.bucket(number))
        assert [request.spec for request in requests] == [{"size": factory.bucket(number)}] * 3
    assert [request.spec for request in factory.validation(0, (Prompt(0, "x"),))] == [config.rollout.sampling]
    assert RequestFactory(make_config()).bucket(5) == 0


def test_rewards_are_reported_by_bucket() -> None:
    run = play(make_config(updates=8, P=4, buckets=WEIGHTS))
    groups = [[group for version, group in run.taken if version == number] for number in range(8)]
    for event, trained in zip((e for e in run.events if e.kind == "update"), groups, strict=True):
        assert event.data["buckets"].keys() == {group.bucket for group in trained}
        for bucket, mean in event.data["buckets"].items():
            rewards = [reward for group in trained if group.bucket == bucket for reward in group.rewards]
            assert mean == pytest.approx(sum(rewards) / len(rewards))

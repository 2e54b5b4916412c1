"""Tests that seeds, windows and prompt order come from the run seed and ids, and from nothing else."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from control_world import SAMPLE_BYTES, Bench, hold, make_config, make_coordinator, make_prompts, now, play
from hypothesis import given
from hypothesis import strategies as st

from omni_async.config import Config
from omni_async.config.schema import Sde, WindowConfig
from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import (
    PromptStream,
    derive,
    draw_bucket,
    draw_window,
    initial_noise_seed,
    sample_seed,
    sample_seeds,
    window_of,
)
from omni_async.types import Prompt, SdeWindow


@given(st.lists(st.integers() | st.text("abc/"), max_size=4))
def test_a_seed_is_a_63_bit_function_of_its_parts(parts: list[int | str]) -> None:
    assert derive(*parts) == derive(*parts)
    assert 0 <= derive(*parts) < 2**63


def test_the_seeds_of_a_run_are_all_different() -> None:
    seeds = [
        sample_seed(run, prompt, group, sample)
        for run in range(3)
        for prompt in range(8)
        for group in range(8)
        for sample in range(8)
    ]
    seeds += [initial_noise_seed(run, prompt, group) for run in range(3) for prompt in range(8) for group in range(8)]
    assert len(set(seeds)) == len(seeds)


@given(run=st.integers(0, 2**31), prompt=st.integers(0, 10**6), group=st.integers(0, 10**6), count=st.integers(0, 20))
def test_a_groups_seeds_are_those_of_its_samples(run: int, prompt: int, group: int, count: int) -> None:
    assert sample_seeds(run, prompt, group, count) == [
        sample_seed(run, prompt, group, sample) for sample in range(count)
    ]


def test_seeds_never_change() -> None:
    """Compares with fixed numbers: a resumed run and another machine must draw the same noise."""
    assert sample_seed(0, 1, 2, 3) == derive("sample", 0, 1, 2, 3) == 3988333952871425518
    assert initial_noise_seed(0, 1, 2) == 868097029686719843
    assert [draw_window(0, group, 2, (0, 5)).start for group in range(8)] == [3, 0, 0, 0, 2, 0, 3, 3]


def test_windows_are_uniform_over_every_place_they_fit() -> None:
    starts = Counter(draw_window(7, group, 2, (1, 6)).start for group in range(8000))
    assert sorted(starts) == [1, 2, 3, 4]
    # Four positions, 2000 draws each; five standard deviations are 194.
    assert all(abs(count - 2000) < 194 for count in starts.values())


@given(
    seed=st.integers(0, 100),
    group=st.integers(0, 1000),
    lo=st.integers(0, 5),
    room=st.integers(0, 5),
    size=st.integers(1, 4),
)
def test_a_window_lies_within_its_range(seed: int, group: int, lo: int, room: int, size: int) -> None:
    window = draw_window(seed, group, size, (lo, lo + size + room))
    assert window == draw_window(seed, group, size, (lo, lo + size + room))
    assert lo <= window.steps[0] and window.steps[-1] < lo + size + room and len(window.steps) == size


def test_every_epoch_is_a_permutation_and_a_new_one() -> None:
    stream = PromptStream(make_prompts(12), seed=3, shuffle=True)
    epochs = [[stream[12 * epoch + i].index for i in range(12)] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_the_nth_prompt_does_not_depend_on_what_was_asked_before() -> None:
    forward, anyhow = (PromptStream(make_prompts(7), seed=1, shuffle=True) for _ in range(2))
    numbers = list(range(50))
    expected = {n: forward[n].index for n in numbers}
    random.Random(0).shuffle(numbers)
    assert {n: anyhow[n].index for n in numbers} == expected
    other = PromptStream(make_prompts(7), seed=2, shuffle=True)
    assert {n: other[n].index for n in numbers} != expected


def test_prompts_keep_their_order_unless_shuffled() -> None:
    stream = PromptStream(make_prompts(3), seed=1, shuffle=False)
    assert [stream[n].index for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_stream_of_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        PromptStream([], seed=0, shuffle=True)


def test_requests_differ_by_seed_within_a_group_and_share_its_window() -> None:
    factory = RequestFactory(make_config(group_size=3))
    factory.fields = ("latents",)
    prompt = make_prompts(5)[4]
    requests = factory.training(9, prompt, factory.window(9))
    assert [r.sample_id for r in requests] == ["g9.s0", "g9.s1", "g9.s2"]
    assert len({r.seed for r in requests}) == 3
    assert {(r.window, r.group, r.prompt.index, r.fields, r.initial_seed) for r in requests} == {
        (factory.window(9), 9, 4, ("latents",), None)
    }
    again = RequestFactory(make_config(group_size=3))
    again.fields = ("latents",)
    assert again.training(9, prompt, again.window(9)) == requests


def test_without_a_validation_section_there_are_no_validation_requests() -> None:
    assert RequestFactory(make_config()).validation(0, tuple(make_prompts(3))) == []


def config_with(sde: Sde | None, P: int = 1, seed: int = 0) -> Config:
    config = make_config(P=P, seed=seed, validation={})
    return msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, sde=sde))


def config_of(P: int = 1, seed: int = 0, **window: Any) -> Config:
    return config_with(Sde(window=WindowConfig(**window)), P, seed)


def starts(count: int, P: int = 1, seed: int = 0, **window: Any) -> list[int]:
    config = config_of(P, seed, **window)
    found = []
    for group in range(count):
        found_window = window_of(group, config)
        assert found_window is not None and found_window.size == config_of(**window).rollout.sde.window.size
        found.append(found_window.start)
    return found


def test_uniform_is_drawn_for_every_group() -> None:
    assert starts(8, P=4, schedule="uniform", size=2, range=(0, 5)) == [3, 0, 0, 0, 2, 0, 3, 3]
    config = config_of(P=3, seed=7, size=3, range=(1, 9))
    assert [window_of(group, config) for group in range(50)] == [
        draw_window(7, group, 3, (1, 9)) for group in range(50)
    ]


def test_random_is_drawn_for_every_update_and_shared_by_its_groups() -> None:
    shared = starts(30, P=3, schedule="random", size=2, range=(1, 6))
    assert shared[::3] == shared[1::3] == shared[2::3] and len(set(shared)) > 1
    assert shared != starts(30, P=3, seed=1, schedule="random", size=2, range=(1, 6))
    assert shared == starts(30, P=3, schedule="random", size=2, range=(1, 6))


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        pytest.param("0011223300", {"updates_per_position": 2}, id="rolls back"),
        pytest.param("22223333", {"size": 1, "range": (2, 4), "P": 4}, id="is shared by an update's groups"),
        pytest.param("001122333333", {"updates_per_position": 2, "at_end": "stay"}, id="stays at the end"),
        pytest.param("134134", {"range": (1, 6), "stride": 2}, id="ends at the last place that fits"),
        pytest.param("14444", {"range": (1, 6), "stride": 9, "at_end": "stay"}, id="and stays there"),
        # From 3 to max(1, 3 // 4): 3, 2.5, 2, 1.5.
        pytest.param(
            "000112230",
            {"schedule": "decay", "size": 1, "range": (0, 4), "updates_per_position": 3},
            id="decay stays one update at least",
        ),
        pytest.param(
            "00120",
            {"schedule": "exp_decay", "size": 1, "range": (0, 3), "updates_per_position": 2, "decay_rate": 2000.0},
            id="a steep exp_decay still visits every position",
        ),
    ],
)
def test_a_sliding_window_stays_then_moves(expected: str, options: dict[str, Any]) -> None:
    defaults = {"schedule": "progressive", "size": 2, "range": (0, 5), "updates_per_position": 1}
    assert starts(len(expected), **{**defaults, **options}) == [int(digit) for digit in expected]


def test_decay_interpolates_as_mixgrpos_public_code() -> None:
    """Compares with fastvideo/utils/grpo_states.py, get_dynamic_iters_per_group: max (1 - t / T) + min t / T
    iterations, rounded down, at the start t, with min = max // 4 and T = max_timesteps. For max 8 and T 5 these are 8,
    6.8, 5.6, 4.4 and 3.2."""
    stays = [8, 6, 5, 4, 3]
    assert stays == [max(2, int(8 * (1 - t / 5) + 2 * (t / 5))) for t in range(5)]
    positions = [start for start, stay in enumerate(stays) for _ in range(stay)]
    assert starts(28, schedule="decay", size=1, range=(0, 5), updates_per_position=8) == [*positions, 0, 0]


def test_decay_stays_ever_shorter() -> None:
    # 25 to 25 // 4 = 6, which only a window that began at 5 would have: 25, 21.2, 17.4 and 13.6 updates at 0 to 3,
    # rounded down.
    positions = [0] * 25 + [1] * 21 + [2] * 17 + [3] * 13
    decay: dict[str, Any] = {"schedule": "decay", "size": 2, "range": (0, 5), "updates_per_position": 25}
    assert starts(78, **decay) == [*positions, 0, 0]
    assert starts(78, **decay, at_end="stay") == [*positions, 3, 3]
    # A stride that overshoots counts by where the window is, 0, 2 and 3, not by how often it moved.
    assert starts(57, **decay, stride=2) == [0] * 25 + [2] * 17 + [3] * 13 + [0] * 2


def test_exp_decay_starts_to_shorten_beyond_decay_from() -> None:
    stays = [10, 10, math.ceil(10 * math.exp(-0.5)), math.ceil(10 * math.exp(-1.0)), math.ceil(10 * math.exp(-1.5))]
    assert stays == [10, 10, 7, 4, 3]
    positions = [start for start, stay in enumerate(stays) for _ in range(stay)]
    options: dict[str, Any] = {
        "size": 1,
        "range": (0, 5),
        "updates_per_position": 10,
        "decay_rate": 0.5,
        "decay_from": 1,
    }
    assert starts(36, schedule="exp_decay", **options) == [*positions, 0, 0]
    assert starts(36, schedule="exp_decay", **options, at_end="stay") == [*positions, 4, 4]


sliding = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["progressive", "decay", "exp_decay"]),
        "updates_per_position": st.integers(1, 40),
        "stride": st.integers(1, 4),
        "at_end": st.sampled_from(["roll_back", "stay"]),
        "decay_rate": st.sampled_from([0.05, 0.4, 3.0]),
        "decay_from": st.integers(0, 3),
    }
)


@given(
    options=sliding,
    lo=st.integers(0, 3),
    room=st.integers(0, 6),
    size=st.integers(1, 3),
    P=st.integers(1, 3),
    group=st.integers(0, 900),
)
def test_a_sliding_window_is_where_walking_there_update_by_update_leads(
    options: dict[str, Any], lo: int, room: int, size: int, P: int, group: int
) -> None:
    """Walks in the manner of MixGRPO's state: a counter of updates at the current position, and a position."""
    hi, full = lo + room + size, options["updates_per_position"]
    positions = [lo]
    while positions[-1] < hi - size:
        positions.append(min(positions[-1] + options["stride"], hi - size))
    position = spent = 0
    for _ in range(group // P):
        if options["schedule"] == "progressive":
            stay = full
        elif options["schedule"] == "decay":
            done = (positions[position] - lo) / (hi - lo)
            stay = math.floor(full * (1 - done) + max(1, full // 4) * done + 1e-9)
        else:
            stay = max(1, math.ceil(full * math.exp(-options["decay_rate"] * max(0, position - options["decay_from"]))))
        spent += 1
        if spent >= stay:
            position, spent = position + 1, 0
            if position == len(positions):
                position = 0 if options["at_end"] == "roll_back" else len(positions) - 1
    config = config_of(P, size=size, range=(lo, hi), **options)
    assert window_of(group, config) == SdeWindow(start=positions[position], size=size)


@pytest.mark.parametrize(("at_end", "start"), [("roll_back", 3), ("stay", 4)])
def test_the_millionth_update_is_found_like_the_first(at_end: str, start: int) -> None:
    # A cycle of four positions is 24 + 20 + 16 + 13 = 73 updates; 10^6 = 13698 x 73 + 46, and the third position has 44
    # to 59.
    config = config_of(P=8, schedule="decay", size=2, range=(1, 6), updates_per_position=24, at_end=at_end)
    assert 10**6 % 73 == 46
    window = window_of(8 * 10**6 + 7, config)
    assert window == SdeWindow(start=start, size=2)


def test_requests_carry_the_kernel_and_the_window() -> None:
    factory = RequestFactory(config_with(Sde(kind="cps", noise_level=0.8, window=WindowConfig(size=3, range=(2, 5)))))
    [request, *_] = factory.training(0, make_prompts(1)[0], factory.window(0))
    assert (request.window, request.noise_level, request.sde_kind) == (SdeWindow(start=2, size=3), 0.8, "cps")
    [held_out, *_] = factory.validation(0, tuple(make_prompts(1)))
    assert (held_out.window, held_out.noise_level, held_out.sde_kind) == (None, 0.0, "cps")


def test_without_an_sde_section_samples_are_noise_free() -> None:
    config = config_with(None)
    factory = RequestFactory(config)
    assert window_of(5, config) is None and factory.window(5) is None
    requests = factory.training(5, make_prompts(1)[0], None) + factory.validation(0, tuple(make_prompts(1)))
    assert {r.kind for r in requests} == {"train", "validation"}
    assert {(r.window, r.noise_level, r.sde_kind) for r in requests} == {(None, 0.0, "flow")}


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


async def test_a_resumed_run_draws_the_same_buckets() -> None:
    config = make_config(S=3, P=1, updates=6, buckets=WEIGHTS)
    before = Bench(S=3, P=1, updates=6, buckets=WEIGHTS)
    for group in (0, 1):
        await before.generate(group, 0)
    taken = before.take()
    assert taken is not None and taken.bucket == draw_bucket(0, 0, WEIGHTS)
    await before.train(taken)
    kept = await before.c.continuation()
    after, _ = make_coordinator(config, start=kept)
    await hold(after, 1)
    (ready,) = await after.next_groups(1, 1)
    assert ready == kept.ready[0], "ready as it was, in the bucket that it was drawn from"
    for request in now(after.next_samples("rollout-0", 8, 8)):
        assert request.spec == {"size": draw_bucket(0, request.group, WEIGHTS)}


def test_rewards_are_reported_by_bucket() -> None:
    run = play(make_config(updates=8, P=4, buckets=WEIGHTS))
    groups = [[group for version, group in run.taken if version == number] for number in range(8)]
    for event, trained in zip((e for e in run.events if e.kind == "update"), groups, strict=True):
        assert event.data["buckets"].keys() == {group.bucket for group in trained}
        for bucket, mean in event.data["buckets"].items():
            rewards = [reward for group in trained if group.bucket == bucket for reward in group.rewards]
            assert mean == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize("seed", range(6))
def test_samples_of_several_sizes_stay_within_the_bound(seed: int) -> None:
    """The largest bucket decides what an update needs; smaller ones let more groups in."""
    bound = 2 * 2 * SAMPLE_BYTES
    config = make_config(S=4, P=2, updates=10, engines=2, buckets=WEIGHTS, max_bytes=bound, seed=seed)
    run = play(config, seed=seed)
    assert len(run.taken) == 20
    counted = [event.data["buffers"]["bytes"] for event in run.events if event.kind == "update"]
    assert max(bytes_["most"] for bytes_ in counted) <= bound
    assert max(bytes_["reserved"] for bytes_ in counted) <= bound

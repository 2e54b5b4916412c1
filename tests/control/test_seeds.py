"""Tests that seeds, windows and prompt order come from the run seed and ids, and from nothing else."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from control_world import make_config, make_prompts
from hypothesis import given
from hypothesis import strategies as st

from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import PromptStream, derive, draw_window, initial_noise_seed, sample_seed, sample_seeds


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

"""Tests where windows start under each schedule, and that requests carry them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest
from control_world import make_config, make_prompts
from hypothesis import given
from hypothesis import strategies as st

from omni_async.config import Config
from omni_async.config.schema import Sde, WindowConfig
from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import draw_window, window_of
from omni_async.types import SdeWindow


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


def test_random_starts_are_uniform_over_every_place_they_fit() -> None:
    counts = Counter(starts(8000, schedule="random", size=2, range=(1, 6)))
    assert sorted(counts) == [1, 2, 3, 4]
    # Four positions, 2000 draws each; five standard deviations are 194.
    assert all(abs(count - 2000) < 194 for count in counts.values())


def test_progressive_stays_then_moves_then_rolls_back() -> None:
    assert starts(10, schedule="progressive", size=2, range=(0, 5), updates_per_position=2) == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        0,
        0,
    ]
    assert starts(8, P=4, schedule="progressive", size=1, range=(2, 4), updates_per_position=1) == [
        2,
        2,
        2,
        2,
        3,
        3,
        3,
        3,
    ]


def test_progressive_may_stay_at_the_end() -> None:
    got = starts(12, schedule="progressive", size=2, range=(0, 5), updates_per_position=2, at_end="stay")
    assert got == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3]


def test_a_stride_that_overshoots_ends_at_the_last_place_that_fits() -> None:
    assert starts(6, schedule="progressive", size=2, range=(1, 6), updates_per_position=1, stride=2) == [
        1,
        3,
        4,
        1,
        3,
        4,
    ]
    assert starts(5, schedule="progressive", size=2, range=(1, 6), updates_per_position=1, stride=9, at_end="stay") == [
        1,
        4,
        4,
        4,
        4,
    ]


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
    assert starts(78, schedule="decay", size=2, range=(0, 5), updates_per_position=25) == [*positions, 0, 0]
    assert starts(78, schedule="decay", size=2, range=(0, 5), updates_per_position=25, at_end="stay") == [
        *positions,
        3,
        3,
    ]
    # A stride that overshoots counts by where the window is, 0, 2 and 3, not by how often it moved.
    assert (
        starts(57, schedule="decay", size=2, range=(0, 5), updates_per_position=25, stride=2)
        == [0] * 25 + [2] * 17 + [3] * 13 + [0] * 2
    )


def test_decay_stays_one_update_at_least() -> None:
    # From 3 to max(1, 3 // 4): 3, 2.5, 2, 1.5.
    assert starts(9, schedule="decay", size=1, range=(0, 4), updates_per_position=3) == [0, 0, 0, 1, 1, 2, 2, 3, 0]


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


def test_a_steep_exp_decay_still_visits_every_position() -> None:
    assert starts(5, schedule="exp_decay", size=1, range=(0, 3), updates_per_position=2, decay_rate=2000.0) == [
        0,
        0,
        1,
        2,
        0,
    ]


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


def test_it_needs_no_torch() -> None:
    code = "import sys, omni_async.control.seeds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

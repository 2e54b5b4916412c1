"""Tests the scorer of the quickstart's video task against closed forms, and that its control gives away every value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_async.media import Media
from omni_async.types import Prompt
from recipes.quickstart.video.brightness import BrightnessScorer

BRIGHTER, DARKER = Prompt(0, "a lamp brightens", "brighter"), Prompt(1, "a lamp darkens", "darker")
HELD_OUT = Prompt(0, "the lamp brightens", "brighter", {"held_out": True})


def video(*levels: int) -> Media:
    """Makes a video whose frames are grey of these levels."""
    frames = np.broadcast_to(np.array(levels, np.uint8).reshape(-1, 1, 1, 1), (len(levels), 3, 4, 6))
    return Media(video=np.ascontiguousarray(frames), fps=16.0)


def value(media: Media, prompt: Prompt = BRIGHTER, **params: Any) -> float:
    return BrightnessScorer(**params).score([media], [prompt])[0].value


def test_the_value_is_the_share_of_change_that_goes_the_way_that_was_asked_for() -> None:
    up, down, both = video(0, 50, 60), video(60, 50, 0), video(100, 130, 120)
    assert [value(one) for one in (up, down, both)] == pytest.approx([1.0, 0.0, 30 / 40])
    assert [value(one, DARKER) for one in (up, down, both)] == pytest.approx([0.0, 1.0, 10 / 40])


def test_a_still_video_scores_nothing_and_little_change_in_proportion() -> None:
    assert [value(video(level, level, level), asked) for level in (0, 90) for asked in (BRIGHTER, DARKER)] == [0.0] * 4
    assert value(video(90), BRIGHTER) == 0.0
    assert value(video(90, 92, 95), min_change=20) == pytest.approx(5 / 20)


def test_it_is_the_mean_over_the_frame_that_counts_and_noise_of_no_direction_scores_a_half() -> None:
    rng = np.random.default_rng(0)
    noise = [Media(video=rng.integers(0, 255, (9, 3, 4, 4), dtype=np.uint8), fps=16.0) for _ in range(400)]
    for asked in (BRIGHTER, DARKER):
        scores = BrightnessScorer().score(noise, [asked] * len(noise))
        assert np.mean([score.value for score in scores]) == pytest.approx(0.5, abs=0.02)
    moved = np.zeros((2, 3, 4, 4), np.uint8)
    moved[0, :, 0], moved[1, :, 3] = 200, 200
    assert value(Media(video=moved, fps=16.0)) == 0.0


def test_the_control_gives_every_value_once_to_the_next_group_of_the_prompt_but_held_out_prompts_their_own() -> None:
    control, rising = BrightnessScorer(permuted=2), [video(0, 100 - level, 100) for level in (0, 10)]
    falling = [video(100, 0), video(100, 100, 99)]
    first = control.score(rising, [BRIGHTER] * 2)
    assert all(0 <= score.value <= 1 for score in first)
    mixed = control.score([falling[0], falling[0], falling[1]], [BRIGHTER, DARKER, BRIGHTER])
    assert [mixed[0].value, mixed[2].value] == [1.0, 1.0]
    assert [score.value for score in control.score(rising, [BRIGHTER] * 2)] == [0.0, 0.0]
    assert control.score(falling[:1], [HELD_OUT])[0].value == 0.0


def test_a_prompt_that_asks_for_nothing_is_refused_before_the_run() -> None:
    assert BrightnessScorer.check_prompt(BRIGHTER, {}) is None
    assert "not brighter or darker" in str(BrightnessScorer.check_prompt(Prompt(0, "a lamp"), {}))

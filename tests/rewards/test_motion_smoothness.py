"""Tests the reward of smooth motion on clips whose smoothness follows by hand."""

import numpy as np
import pytest

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.motion_smoothness import MotionSmoothnessScorer, smoothness_and_motion
from omni_async.types import Prompt, Score

ROWS = np.random.default_rng(0)


def score(frames: np.ndarray, **options: float) -> Score:
    media = Media(video=frames.astype(np.uint8), fps=8)
    return MotionSmoothnessScorer(**options).score([media], [Prompt(0, "a cat")])[0]


def levels(*values: float) -> np.ndarray:
    return np.broadcast_to(np.array(values)[:, None, None, None], (len(values), 3, 8, 8))


def test_a_constant_rate_of_change_is_perfectly_smooth_whatever_the_rate():
    for rate in (2, 10, 30):
        found = score(levels(*(rate * i for i in range(8))))
        assert found.value == 1.0 and found.parts == pytest.approx({"smoothness": 1.0, "motion": rate})


def test_flicker_is_not_smooth_at_all_and_noise_a_quarter():
    assert score(levels(0, 50, 0, 50, 0)).value == pytest.approx(0)
    noise = ROWS.integers(0, 256, (20, 3, 64, 64))
    assert score(noise).value == pytest.approx(1 / 4, abs=0.01)


def test_it_is_the_formula_in_float64():
    frames = ROWS.integers(0, 256, (7, 3, 5, 4)) // 2 + levels(*range(0, 70, 10))[:, :, :5, :4]
    d = np.diff(frames.astype(np.uint8).astype(np.float64), axis=0).reshape(6, -1)
    size = np.linalg.norm(d, axis=1)
    expected = 1 - (np.diff(d, axis=0) ** 2).sum() / ((size[1:] + size[:-1]) ** 2).sum()
    assert smoothness_and_motion(frames.astype(np.uint8)) == pytest.approx((expected, np.sqrt((d**2).mean())))


def test_a_static_video_earns_nothing_and_says_so():
    still = score(levels(9, 9, 9, 9))
    assert still.value == 0 and still.parts == {"smoothness": 1.0, "motion": 0.0}
    slow = score(levels(0, 1, 2, 3), min_motion=4.0)
    assert slow.value == pytest.approx(1 / 4) and slow.parts["smoothness"] == 1.0


def test_two_frames_have_no_smoothness():
    with pytest.raises(ScoreError, match="a video of 2 frames has no smoothness, expected 3 or more"):
        score(levels(0, 1))

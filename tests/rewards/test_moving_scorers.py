"""Tests the rewards of smooth motion and of the quickstart's videos, on clips whose values follow by hand."""

import numpy as np
import pytest

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.motion_smoothness import MotionSmoothnessScorer, smoothness_and_motion
from omni_async.types import Prompt
from recipes.quickstart.video.brightness import BrightnessScorer

RNG = np.random.default_rng(0)
BRIGHTER, DARKER = Prompt(0, "a lamp brightens", "brighter"), Prompt(1, "a lamp darkens", "darker")
HELD_OUT = Prompt(0, "the lamp brightens", "brighter", {"held_out": True})


def video(*levels):
    """Makes a video whose frames are grey of these levels."""
    frames = np.broadcast_to(np.array(levels, np.uint8).reshape(-1, 1, 1, 1), (len(levels), 3, 8, 8))
    return Media(video=np.ascontiguousarray(frames), fps=16.0)


def smooth(media, **options):
    return MotionSmoothnessScorer(**options).score([media], [Prompt(0, "a cat")])[0]


def test_a_constant_rate_of_change_is_perfectly_smooth_flicker_is_not_and_noise_a_quarter():
    for rate in (2, 10, 30):
        found = smooth(video(*(rate * i for i in range(8))))
        assert found.value == 1.0 and found.parts == pytest.approx({"smoothness": 1.0, "motion": rate})
    assert smooth(video(0, 50, 0, 50, 0)).value == pytest.approx(0)
    noise = Media(video=RNG.integers(0, 256, (20, 3, 64, 64), np.uint8), fps=8)
    assert smooth(noise).value == pytest.approx(1 / 4, abs=0.01)


def test_smoothness_is_the_formula_in_float64():
    frames = RNG.integers(0, 128, (7, 3, 8, 8), np.uint8) + video(*range(0, 70, 10)).video
    d = np.diff(frames.astype(np.float64), axis=0).reshape(6, -1)
    size = np.linalg.norm(d, axis=1)
    expected = 1 - (np.diff(d, axis=0) ** 2).sum() / ((size[1:] + size[:-1]) ** 2).sum()
    assert smoothness_and_motion(frames) == pytest.approx((expected, np.sqrt((d**2).mean())))


def test_a_static_video_earns_nothing_and_two_frames_have_no_smoothness():
    still = smooth(video(9, 9, 9, 9))
    assert still.value == 0 and still.parts == {"smoothness": 1.0, "motion": 0.0}
    slow = smooth(video(0, 1, 2, 3), min_motion=4.0)
    assert slow.value == pytest.approx(1 / 4) and slow.parts["smoothness"] == 1.0
    with pytest.raises(ScoreError, match="a video of 2 frames has no smoothness, expected 3 or more"):
        smooth(video(0, 1))


def bright(media, prompt=BRIGHTER, **params):
    return BrightnessScorer(**params).score([media], [prompt])[0].value


def test_brightness_is_the_share_of_change_that_goes_the_way_that_was_asked_for():
    videos = [video(0, 50, 60), video(60, 50, 0), video(100, 130, 120), video(0, 0), video(90, 90)]
    assert [bright(one) for one in videos] == pytest.approx([1.0, 0.0, 30 / 40, 0.0, 0.0])
    assert [bright(one, DARKER) for one in videos] == pytest.approx([0.0, 1.0, 10 / 40, 0.0, 0.0])
    assert bright(video(90)) == 0.0 and bright(video(90, 92, 95), min_change=20) == pytest.approx(5 / 20)


def test_brightness_is_the_mean_over_the_frame_and_noise_of_no_direction_scores_a_half():
    noise = [Media(video=RNG.integers(0, 255, (9, 3, 4, 4), dtype=np.uint8), fps=16.0) for _ in range(400)]
    for asked in (BRIGHTER, DARKER):
        scores = BrightnessScorer().score(noise, [asked] * len(noise))
        assert np.mean([score.value for score in scores]) == pytest.approx(0.5, abs=0.02)
    moved = np.zeros((2, 3, 4, 4), np.uint8)
    moved[0, :, 0], moved[1, :, 3] = 200, 200
    assert bright(Media(video=moved, fps=16.0)) == 0.0


def test_the_control_gives_every_value_once_to_the_next_group_of_the_prompt_but_held_out_prompts_their_own():
    control, rising = BrightnessScorer(permuted=2), [video(0, 100 - level, 100) for level in (0, 10)]
    falling = [video(100, 0), video(100, 100, 99)]
    first = control.score(rising, [BRIGHTER] * 2)
    assert all(0 <= score.value <= 1 for score in first)
    mixed = control.score([falling[0], falling[0], falling[1]], [BRIGHTER, DARKER, BRIGHTER])
    assert [mixed[0].value, mixed[2].value] == [1.0, 1.0]
    assert [score.value for score in control.score(rising, [BRIGHTER] * 2)] == [0.0, 0.0]
    assert control.score(falling[:1], [HELD_OUT])[0].value == 0.0


def test_a_prompt_that_asks_for_nothing_is_refused_before_the_run():
    assert BrightnessScorer.check_prompt(BRIGHTER, {}) is None
    assert "not brighter or darker" in str(BrightnessScorer.check_prompt(Prompt(0, "a lamp"), {}))

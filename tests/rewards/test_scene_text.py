"""Tests the reward of text anywhere in an image or a video."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.scene_text import SceneTextScorer
from omni_async.types import Prompt, Score
from tests.support.images import as_media


@functools.cache
def scorer(frames: int = 4) -> SceneTextScorer:
    return SceneTextScorer(frames=frames)


def image(*lines: str) -> np.ndarray:
    image = Image.new("RGB", (512, 512), (90, 120, 160))
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(48)
    for row, line in enumerate(lines):
        draw.text((110, 180 + 70 * row), line, fill="white", font=font)
    return np.asarray(image)


def test_words_are_found_anywhere_in_an_image() -> None:
    images = [image("GRAND", "OPENING"), image("GRAND", "OPENING"), image("GRAND"), image()]
    wanted = ["Grand opening", "open", "grandeur", "ab"]
    prompts = [Prompt(i, "", text, {}) for i, text in enumerate(wanted)]
    scores = scorer().score([as_media(one) for one in images], prompts)
    assert [score.value for score in scores] == pytest.approx([1.0, 1.0, 1 - 3 / 8, 0.0])
    assert [score.parts["exact"] for score in scores] == [1.0, 1.0, 0.0, 0.0]
    assert [score.parts["lines"] for score in scores] == [2.0, 2.0, 1.0, 0.0]
    quoted = scorer().score([as_media(image("GRAND"))], [Prompt(0, 'a sign that says "grand"', None, {})])
    assert quoted[0].value == 1.0


def test_a_video_scores_the_mean_over_evenly_spaced_frames_and_shows_the_best_ones_text() -> None:
    shown = [image(), image("NOISE"), image("GRAND"), image("NOISE"), image("GRAND", "HALL")]
    video = Media(video=np.ascontiguousarray(np.stack(shown).transpose(0, 3, 1, 2)), fps=8)
    [score] = scorer(frames=3).score([video], [Prompt(0, "", "grandeur", {})])
    # Nothing; "grand" lacks three letters; "hall" is four edits from "eur".
    assert score == Score(pytest.approx((0 + 5 / 8 + 4 / 8) / 3), {"exact": 0.0, "lines": pytest.approx(1.0)}, "GRAND")


def test_a_prompt_without_a_text_is_refused_before_and_when_scoring() -> None:
    prompt = Prompt(3, "a cat")
    assert "no `target`" in str(SceneTextScorer.check_prompt(prompt, {}))
    with pytest.raises(ScoreError, match=r"prompt 3.*no `target`"):
        scorer().score([as_media(image())], [prompt])

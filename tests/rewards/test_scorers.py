from __future__ import annotations

import io
import math
from functools import partial

import numpy as np
import pytest
from PIL import Image

from omni_async.config import schema
from omni_async.families import MediaShape
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import ScoreError
from omni_async.rewards.composition import WeightedScorer
from omni_async.types import Prompt, Score
from tests.images import as_media

IMAGES = [np.random.default_rng(i).integers(0, 1 + 80 * i, (32, 48, 3), dtype=np.uint8) for i in range(3)]
IMAGE = MediaShape("image", (3, 32, 48))
VIDEO = MediaShape("video", (5, 3, 32, 48), 8)
AUDIO = MediaShape("audio", (2, 800), 8000)
MEDIA = [as_media(image) for image in IMAGES]
PROMPTS = [Prompt(index=10 + i, text=f"prompt {i}") for i in range(3)]


class Constant:
    name = "constant"

    def __init__(self, *, value: float = 2.0, text: str | None = None) -> None:
        self._score = Score(value=value, parts={"part": value}, text=text)

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [self._score] * len(images)


class Bright:
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        assert all(image.shape == (32, 48, 3) for image in images)
        return [Score(float(image[:, :, 0].mean())) for image in images]


class NanAtOne:
    name = "nan"

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(value=math.nan if i == 1 else 0.0) for i in range(len(images))]


class TooFew:
    name = "few"

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(value=0.0)]


class Nameless:
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(value=1.0)] * len(images)


def config(name: str, weight: float = 1.0, **params: object) -> schema.Scorer:
    return schema.Scorer(name=name, weight=weight, params=params)


def kilobytes(image: np.ndarray, quality: int) -> float:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return len(buffer.getvalue()) / 1000


def test_jpeg_size_is_what_pillow_writes() -> None:
    small = registry.build(config("jpeg_size")).score(MEDIA, PROMPTS)
    assert [s.value for s in small] == [-kilobytes(i, 95) for i in IMAGES]
    large = registry.build(config("jpeg_size", quality=50, sign="max", scale=0.5)).score(MEDIA, PROMPTS)
    assert [s.value for s in large] == [0.5 * kilobytes(i, 50) for i in IMAGES]
    assert len({s.value for s in large}) == 3


def test_one_scorer_keeps_its_parts() -> None:
    scores = WeightedScorer([config(f"{__name__}:Constant", weight=3.0, text="hi")]).score(MEDIA, PROMPTS)
    assert scores == [Score(value=6.0, parts={"part": 2.0}, text="hi", values=(2.0,))] * 3


def test_a_scorer_goes_by_the_name_that_the_recipe_gives_it_whether_or_not_it_has_one() -> None:
    nameless = f"{__name__}:Nameless"
    [score, *_] = WeightedScorer([config(nameless), config("jpeg_size")]).score(MEDIA, PROMPTS)
    assert score.parts[f"{nameless}/value"] == 1.0


def test_several_scorers_are_weighed_and_prefixed() -> None:
    constant = f"{__name__}:Constant"
    members = [config("jpeg_size", 0.1), config(constant, 1.0, text="a"), config(constant, -1.0, value=5.0, text="b")]
    [score, *_] = WeightedScorer(members).score(MEDIA, PROMPTS)
    size = kilobytes(IMAGES[0], 95)
    assert score.value == pytest.approx(-0.1 * size + 2.0 - 5.0)
    assert score.parts["jpeg_size/jpeg_kb"] == size and score.parts["jpeg_size/value"] == -size
    assert score.parts[f"{constant}/part"] == 2.0 and score.parts[f"{constant}_2/part"] == 5.0
    assert score.text == "a | b"
    assert score.values == (-size, 2.0, 5.0)


class Loud:
    """A scorer of sound, with or without pictures."""

    name = "loud"
    accepts = ("audio",)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return [Score(float(np.abs(one.waveform).max())) for one in media]


class Wrong(Loud):
    accepts = "image"


@pytest.mark.parametrize(
    ("name", "made", "error"),
    [
        (
            "jpeg_size",
            (VIDEO,),
            "^scorer 'jpeg_size' accepts image, but the samples are video$",
        ),
        ("motion_smoothness", (IMAGE,), r"^scorer 'motion_smoothness' accepts video, but the samples are image$"),
        ("ocr", (AUDIO,), "accepts image or video, but the samples are audio"),
        (f"{__name__}:Loud", (VIDEO,), "accepts audio, but the samples are video"),
        (f"{__name__}:Wrong", (IMAGE,), "accepts must be a tuple of image, video, audio, got 'image'"),
        (f"{__name__}:Constant", (VIDEO,), r"accepts image \(it has no `accepts`\), but the samples are video"),
        ("ocr", (IMAGE,), None),
        ("ocr", (VIDEO, AUDIO), None),
        (f"{__name__}:Loud", (VIDEO, AUDIO), None),
    ],
)
def test_a_scorer_is_refused_that_accepts_nothing_of_the_samples(
    name: str, made: tuple[MediaShape, ...], error: str | None
) -> None:
    if error is None:
        registry.check(config(name), made)
        return
    with pytest.raises(registry.ScorerConfigError, match=error):
        registry.check(config(name), made)


def test_a_scorer_that_declares_what_it_accepts_gets_media_and_one_that_does_not_gets_images() -> None:
    both = Media(image=MEDIA[2].image, audio=np.full((1, 8), -0.5, np.float32), sample_rate=8000)
    [score] = WeightedScorer([config(f"{__name__}:Loud"), config(f"{__name__}:Bright")]).score([both], PROMPTS[:1])
    assert score.values == (0.5, IMAGES[2][:, :, 0].mean())
    with pytest.raises(ScoreError, match=r"scorer 'test_scorers:Loud' accepts audio, the sample is image"):
        WeightedScorer([config(f"{__name__}:Loud")]).score(MEDIA, PROMPTS)


def test_an_empty_batch_is_fine() -> None:
    assert WeightedScorer([config("jpeg_size")]).score([], []) == []


def test_a_failed_score_never_becomes_a_number() -> None:
    with pytest.raises(ScoreError, match=r"NanAtOne.*sample 1 \(prompt 11: 'prompt 1'\): value is nan"):
        WeightedScorer([config("jpeg_size"), config(f"{__name__}:NanAtOne")]).score(MEDIA, PROMPTS)
    with pytest.raises(ScoreError, match="TooFew' returned 1 scores for 3 samples"):
        WeightedScorer([config(f"{__name__}:TooFew")]).score(MEDIA, PROMPTS)
    with pytest.raises(ScoreError, match=r"Constant', sample 0.*a reward of inf, beyond"):
        WeightedScorer([config(f"{__name__}:Constant", weight=1e300, value=1e99)]).score(MEDIA, PROMPTS)
    with pytest.raises(ScoreError, match="3 samples but 2 prompts"):
        WeightedScorer([config("jpeg_size")]).score(MEDIA, PROMPTS[:2])


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (config("ocrr"), "unknown scorer 'ocrr': registered are jpeg_size, motion_smoothness, ocr"),
        (config("jpeg_size", qualty=3), "takes no parameter 'qualty'; it takes quality, sign, scale"),
        (config("jpeg_size", quality=300), "parameter 'quality': Expected `int` <= 95, got 300"),
        (config("jpeg_size", sign="up"), "parameter 'sign': Invalid enum value 'up'"),
        (config("no_such_module:X"), "cannot import 'no_such_module'"),
        (config(f"{__name__}:Nothing"), "has no 'Nothing'; it defines Constant, Bright, NanAtOne, TooFew, Nameless"),
        (config(f"{__name__}:kilobytes"), "is not a class with a method `score"),
    ],
)
def test_configuration_errors_say_what_is_allowed(scorer: schema.Scorer, message: str) -> None:
    for action in (partial(registry.check, made=(IMAGE,)), registry.build):
        with pytest.raises(registry.ScorerConfigError, match=message.replace("(", r"\(")):
            action(scorer)

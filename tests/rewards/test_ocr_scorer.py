"""Tests the reward of readable text: what is read, and the probability of the wanted text against every path."""

import functools
from contextlib import nullcontext
from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.ocr import OcrScorer, text_probability, wanted_text
from omni_async.types import Prompt
from tests.support.images import as_media


@functools.cache
def scorer(**params: bool) -> OcrScorer:
    return OcrScorer(**params)


def draw(text: str, size: tuple[int, int] = (64, 64), font_size: int = 48, noise: float = 0.0) -> Media:
    image, font = Image.new("RGB", size, (10, 10, 10)), ImageFont.load_default(font_size)
    ImageDraw.Draw(image).text((size[0] / 2, size[1] / 2), text, fill=(230, 230, 230), font=font, anchor="mm")
    pixels = np.asarray(image).astype(np.float64)
    pixels += np.random.default_rng(0).normal(0, noise, pixels.shape) if noise else 0
    return as_media(pixels.clip(0, 255).astype(np.uint8))


def prompt(target: str | None, text: str = "a digit") -> Prompt:
    return Prompt(index=7, text=text, target=target)


def test_clean_digits_are_read():
    digits = list("0123456789")
    scores = scorer().score([draw(d) for d in digits], [prompt(d) for d in digits])
    assert [s.text for s in scores] == digits
    assert [s.value for s in scores] == [1.0] * 10
    assert all(s.parts["ocr"] == s.parts["ocr_exact"] == 1.0 and s.parts["ocr_confidence"] > 0.9 for s in scores)


@pytest.mark.parametrize("dense", [False, True])
def test_wrong_text_scores_lower(dense):
    right, wrong = scorer(dense=dense).score([draw("5"), draw("5")], [prompt("5"), prompt("8")])
    assert right.value > 0.9 and wrong.value < 0.1
    assert wrong.parts["ocr_exact"] == 0.0


def test_partly_right_text_and_folding():
    image = draw("HELLO", (160, 48), 34)
    values = [scorer().score([image], [prompt(t)])[0].value for t in ("HELLO", "h e l l o", "HELLA", "WORDS")]
    assert values[:3] == [1.0, 1.0, pytest.approx(0.8)] and values[3] < 0.5
    assert scorer(case_sensitive=True).score([image], [prompt("hello")])[0].value == 0.0


def test_batching_changes_no_bit():
    images = [draw("3", noise=150.0), draw("HELLO", (200, 48), 34), draw("8"), draw("6", noise=200.0)]
    images.append(draw("7", (32, 32), 26))
    prompts = [prompt(t) for t in ("3", "HELLO", "2", "6", "7")]
    together = scorer(dense=True).score(images, prompts)
    alone = [scorer(dense=True).score([i], [p])[0] for i, p in zip(images, prompts, strict=True)]
    assert together == alone


def test_dense_rises_with_legibility_and_stays_on_its_side_of_one_half():
    noises = (0.0, 100.0, 150.0, 200.0)
    right = [scorer(dense=True).score([draw("8", noise=n)], [prompt("8")])[0] for n in noises]
    wrong = [scorer(dense=True).score([draw("8", noise=n)], [prompt("3")])[0] for n in noises]
    assert right[0].value > right[-1].value
    assert all(s.value >= 0.5 for s in right if s.parts["ocr"] == 1.0)
    assert len({s.value for s in right}) == len(noises), "right readings do not tie"
    assert wrong[0].value < 0.01 and all(0.0 <= s.value <= 0.5 for s in wrong if s.parts["ocr"] == 0.0)


def test_the_target_is_the_prompts_or_the_quoted_text():
    assert wanted_text(prompt("4 2")) == "42"
    assert wanted_text(prompt(None, 'a sign that says "New York", at "night"')) == "NewYork"
    assert wanted_text(prompt("x", 'a sign "y"')) == "x"
    assert wanted_text(prompt(None, "no quotes")) is None
    assert wanted_text(prompt("  ")) is None


@pytest.mark.parametrize(
    ("asked", "missing"),
    [
        (prompt("4 2"), None),
        (prompt(None, 'a sign "y"'), None),
        (prompt("日本"), None),
        (prompt("".join(map(chr, range(33, 127)))), None),  # `check_prompt` takes every ASCII character for readable
        (prompt(None, "a cat"), 'no `target` and no text in "double quotes"'),
        (prompt("  "), 'no `target` and no text in "double quotes"'),
        (prompt("a 🦆"), "alphabet lacks '🦆'"),
    ],
)
def test_what_cannot_be_read_of_a_prompt_is_refused_and_known_before_there_is_an_image(asked, missing):
    said = OcrScorer.check_prompt(asked, {"case_sensitive": False})
    assert said is None if missing is None else said is not None and missing in said
    with pytest.raises(ScoreError, match=rf"prompt 7.*{missing}") if missing else nullcontext():
        scorer().score([draw("1")], [asked])


def film(*texts: str) -> Media:
    return Media(video=np.stack([draw(text).image for text in texts]), fps=8)


def test_a_video_earns_the_mean_over_evenly_spaced_frames():
    kept, lost, flickering = (film(*texts) for texts in ("55555555", "55558888", "58585858"))
    values = [score.value for score in scorer(frames=4).score([kept, lost, flickering], [prompt("5")] * 3)]
    assert values == [1.0, 0.5, 0.5]  # frames 0, 2, 5 and 7
    (middle,) = scorer(frames=1).score([film("8", "5", "8")], [prompt("5")])
    assert (middle.value, middle.text) == (1.0, "5")
    (short,) = scorer(frames=8).score([film("8", "5")], [prompt("5")])
    assert (short.value, short.parts["ocr_exact"], short.text) == (0.5, 0.5, "5")


def test_nothing_is_printed(capfd):
    OcrScorer().score([draw("1")], [prompt("1")])
    assert capfd.readouterr() == ("", "")


def by_enumeration(frames: np.ndarray, text: tuple[int, ...]) -> float:
    """Sums over every path whose collapse (repeats merged, blank 0 removed) is the text."""
    total = 0.0
    for path in product(range(frames.shape[1]), repeat=len(frames)):
        if tuple(k for k, _ in groupby(path) if k != 0) == text:
            total += float(np.prod([frames[t, k] for t, k in enumerate(path)]))
    return total


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.lists(st.integers(1, 2), min_size=1, max_size=4))
def test_equals_the_sum_over_all_paths(seed, num_frames, text):
    frames = np.random.default_rng(seed).dirichlet(np.ones(3), size=num_frames)
    got = text_probability(frames, [[c] for c in text], [0])
    assert got ** len(text) == pytest.approx(by_enumeration(frames, tuple(text)), abs=1e-12)


def test_entries_of_one_character_add_up_and_a_repeat_needs_a_blank_between():
    assert text_probability(np.array([[0.2, 0.5, 0.3]]), [[1, 2]], [0]) == pytest.approx(0.8)
    assert text_probability(np.full((2, 3), 1 / 3), [[1], [1]], [0]) == 0.0

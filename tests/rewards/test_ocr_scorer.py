"""Tests the rewards of readable text: what is read, and the probability of the wanted text against every path."""

import functools
from contextlib import nullcontext
from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.ocr import OcrScorer, text_probability, wanted_text
from omni_async.rewards.scorers.scene_text import SceneTextScorer
from omni_async.types import Prompt, Score
from tests.rewards.scorer_world import film
from tests.support.images import as_media

DIGITS = list("0123456789")


@functools.cache
def scorer(kind=OcrScorer, **params):
    return kind(**params)


def draw(text, size=(64, 64), font_size=48, noise=0.0):
    image, font = Image.new("RGB", size, (10, 10, 10)), ImageFont.load_default(font_size)
    ImageDraw.Draw(image).text((size[0] / 2, size[1] / 2), text, fill=(230, 230, 230), font=font, anchor="mm")
    pixels = np.asarray(image).astype(np.float64)
    pixels += np.random.default_rng(0).normal(0, noise, pixels.shape) if noise else 0
    return as_media(pixels.clip(0, 255).astype(np.uint8))


def prompt(target, text="a digit"):
    return Prompt(index=7, text=text, target=target)


def read(media, *targets, **params):
    return scorer(**params).score(media, [prompt(target) for target in targets])


def test_clean_digits_are_read():
    scores = read([draw(d) for d in DIGITS], *DIGITS)
    assert [s.text for s in scores] == DIGITS
    assert [s.value for s in scores] == [1.0] * 10
    assert all(s.parts["ocr"] == s.parts["ocr_exact"] == 1.0 and s.parts["ocr_confidence"] > 0.9 for s in scores)


def test_wrong_and_partly_right_text_scores_lower_and_case_is_folded():
    for dense in (False, True):
        right, wrong = read([draw("5"), draw("5")], "5", "8", dense=dense)
        assert right.value > 0.9 and wrong.value < 0.1 and wrong.parts["ocr_exact"] == 0.0
    image = draw("HELLO", (160, 48), 34)
    values = [score.value for score in read([image] * 4, "HELLO", "h e l l o", "HELLA", "WORDS")]
    assert values[:3] == [1.0, 1.0, pytest.approx(0.8)] and values[3] < 0.5
    assert read([image], "hello", case_sensitive=True)[0].value == 0.0


def test_batching_changes_no_bit():
    images = [draw("3", noise=150.0), draw("HELLO", (200, 48), 34), draw("8"), draw("6", noise=200.0)]
    images.append(draw("7", (32, 32), 26))
    targets = ("3", "HELLO", "2", "6", "7")
    together = read(images, *targets, dense=True)
    assert together == [read([i], t, dense=True)[0] for i, t in zip(images, targets, strict=True)]


def test_dense_rises_with_legibility_and_stays_on_its_side_of_one_half():
    images = [draw("8", noise=noise) for noise in (0.0, 100.0, 150.0, 200.0)]
    right, wrong = read(images, *"8888", dense=True), read(images, *"3333", dense=True)
    assert right[0].value > right[-1].value
    assert all(s.value >= 0.5 for s in right if s.parts["ocr"] == 1.0)
    assert len({s.value for s in right}) == len(images), "right readings do not tie"
    assert wrong[0].value < 0.01 and all(0.0 <= s.value <= 0.5 for s in wrong if s.parts["ocr"] == 0.0)


@pytest.mark.parametrize(
    ("asked", "wanted", "missing"),
    [
        (prompt("4 2"), "42", None),
        (prompt(None, 'a sign that says "New York", at "night"'), "NewYork", None),
        (prompt("x", 'a sign "y"'), "x", None),
        (prompt("日本"), "日本", None),
        (
            prompt("".join(map(chr, range(33, 127)))),
            "".join(map(chr, range(33, 127))),
            None,
        ),  # all of ASCII is readable
        (prompt(None, "a cat"), None, 'no `target` and no text in "double quotes"'),
        (prompt("  "), None, 'no `target` and no text in "double quotes"'),
        (prompt("a 🦆"), "a🦆", "alphabet lacks '🦆'"),
    ],
)
def test_what_cannot_be_read_of_a_prompt_is_refused_and_known_before_there_is_an_image(asked, wanted, missing):
    assert wanted_text(asked) == wanted
    said = OcrScorer.check_prompt(asked, {"case_sensitive": False})
    assert said is None if missing is None else said is not None and missing in said
    with pytest.raises(ScoreError, match=rf"prompt 7.*{missing}") if missing else nullcontext():
        scorer().score([draw("1")], [asked])


def test_a_video_shows_the_text_of_its_best_frame():
    videos = [film(np.stack([draw(text).pixels for text in texts])) for texts in ("858", "85")]
    (middle,) = read(videos[:1], "5", frames=1)
    assert (middle.value, middle.text) == (1.0, "5")
    (short,) = read(videos[1:], "5", frames=8)
    assert (short.value, short.parts["ocr_exact"], short.text) == (0.5, 0.5, "5")


def test_nothing_is_printed(capfd):
    OcrScorer().score([draw("1")], [prompt("1")])
    assert capfd.readouterr() == ("", "")


def by_enumeration(frames, text):
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


# ---- text anywhere in an image ---------------------------------------------------------------------------------------


def scene(*lines):
    image = Image.new("RGB", (512, 512), (90, 120, 160))
    for row, line in enumerate(lines):
        ImageDraw.Draw(image).text((110, 180 + 70 * row), line, fill="white", font=ImageFont.load_default(48))
    return np.asarray(image)


def test_words_are_found_anywhere_in_an_image():
    images = [scene("GRAND", "OPENING"), scene("GRAND", "OPENING"), scene("GRAND"), scene(), scene("GRAND")]
    prompts = [Prompt(i, "", text) for i, text in enumerate(("Grand opening", "open", "grandeur", "ab"))]
    prompts.append(Prompt(4, 'a sign that says "grand"'))
    scores = scorer(SceneTextScorer).score([as_media(one) for one in images], prompts)
    assert [score.value for score in scores] == pytest.approx([1.0, 1.0, 1 - 3 / 8, 0.0, 1.0])
    assert [score.parts["exact"] for score in scores] == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert [score.parts["lines"] for score in scores] == [2.0, 2.0, 1.0, 0.0, 1.0]
    shown = [scene(), scene("NOISE"), scene("GRAND"), scene("NOISE"), scene("GRAND", "HALL")]
    [score] = scorer(SceneTextScorer, frames=3).score([film(np.stack(shown))], [Prompt(0, "", "grandeur")])
    # Nothing; "grand" lacks three letters; "hall" is four edits from "eur".
    assert score == Score(pytest.approx((0 + 5 / 8 + 4 / 8) / 3), {"exact": 0.0, "lines": pytest.approx(1.0)}, "GRAND")


def test_a_prompt_without_a_text_is_refused_before_and_when_scoring():
    prompt = Prompt(3, "a cat")
    assert "no `target`" in str(SceneTextScorer.check_prompt(prompt, {}))
    with pytest.raises(ScoreError, match=r"prompt 3.*no `target`"):
        scorer(SceneTextScorer).score([as_media(scene())], [prompt])

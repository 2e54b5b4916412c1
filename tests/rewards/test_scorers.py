"""Tests how scorers are found, checked, built and weighed; any mistake in a foreign scorer's module becomes one line
with its location, before anything is started."""

import io
import math
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

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
from tests.images import as_media, score_all

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
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(value=math.nan if i == 1 else 0.0) for i in range(len(images))]


class TooFew:
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


def test_jpeg_size_is_what_pillow_writes():
    small = registry.build(config("jpeg_size")).score(MEDIA, PROMPTS)
    assert [s.value for s in small] == [-kilobytes(i, 95) for i in IMAGES]
    large = registry.build(config("jpeg_size", quality=50, sign="max", scale=0.5)).score(MEDIA, PROMPTS)
    assert [s.value for s in large] == [0.5 * kilobytes(i, 50) for i in IMAGES]
    assert len({s.value for s in large}) == 3


def test_one_scorer_keeps_its_parts():
    scores = score_all(WeightedScorer([config(f"{__name__}:Constant", weight=3.0, text="hi")]), MEDIA, PROMPTS)
    assert scores == [Score(value=6.0, parts={"part": 2.0}, text="hi", values=(2.0,))] * 3


def test_a_scorer_goes_by_the_name_that_the_recipe_gives_it_whether_or_not_it_has_one():
    nameless = f"{__name__}:Nameless"
    [score, *_] = score_all(WeightedScorer([config(nameless), config("jpeg_size")]), MEDIA, PROMPTS)
    assert score.parts[f"{nameless}/value"] == 1.0


def test_several_scorers_are_weighed_and_prefixed():
    constant = f"{__name__}:Constant"
    members = [config("jpeg_size", 0.1), config(constant, 1.0, text="a"), config(constant, -1.0, value=5.0, text="b")]
    [score, *_] = score_all(WeightedScorer(members), MEDIA, PROMPTS)
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
        ("jpeg_size", (VIDEO,), "^scorer 'jpeg_size' accepts image, but the samples are video$"),
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
def test_a_scorer_is_refused_that_accepts_nothing_of_the_samples(name, made, error):
    if error is None:
        registry.check(config(name), made)
        return
    with pytest.raises(registry.ScorerConfigError, match=error):
        registry.check(config(name), made)


def test_a_scorer_that_declares_what_it_accepts_gets_media_and_one_that_does_not_gets_images():
    both = Media(image=MEDIA[2].image, audio=np.full((1, 8), -0.5, np.float32), sample_rate=8000)
    [score] = score_all(WeightedScorer([config(f"{__name__}:Loud"), config(f"{__name__}:Bright")]), [both], PROMPTS[:1])
    assert score.values == (0.5, IMAGES[2][:, :, 0].mean())
    with pytest.raises(ScoreError, match=r"scorer 'test_scorers:Loud' accepts audio, the sample is image"):
        score_all(WeightedScorer([config(f"{__name__}:Loud")]), MEDIA, PROMPTS)


def test_a_failed_score_never_becomes_a_number():
    assert score_all(WeightedScorer([config("jpeg_size")]), [], []) == []
    with pytest.raises(ScoreError, match=r"NanAtOne.*sample 1 \(prompt 11: 'prompt 1'\): value is nan"):
        score_all(WeightedScorer([config("jpeg_size"), config(f"{__name__}:NanAtOne")]), MEDIA, PROMPTS)
    with pytest.raises(ScoreError, match="TooFew' returned 1 scores for 3 samples"):
        score_all(WeightedScorer([config(f"{__name__}:TooFew")]), MEDIA, PROMPTS)
    with pytest.raises(ScoreError, match=r"Constant', sample 0.*a reward of inf, beyond"):
        score_all(WeightedScorer([config(f"{__name__}:Constant", weight=1e300, value=1e99)]), MEDIA, PROMPTS)
    with pytest.raises(ScoreError, match="3 samples but 2 prompts"):
        score_all(WeightedScorer([config("jpeg_size")]), MEDIA, PROMPTS[:2])


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (config("ocrr"), f"unknown scorer 'ocrr': registered are {', '.join(registry.names())}"),
        (config("jpeg_size", qualty=3), "takes no parameter 'qualty'; it takes quality, sign, scale"),
        (config("jpeg_size", quality=300), "parameter 'quality': Expected `int` <= 95, got 300"),
        (config("jpeg_size", sign="up"), "parameter 'sign': Invalid enum value 'up'"),
        (config("no_such_module:X"), "cannot import 'no_such_module'"),
        (config(f"{__name__}:Nothing"), "has no 'Nothing'; it defines Constant, Bright, NanAtOne, TooFew, Nameless"),
        (config(f"{__name__}:kilobytes"), "is not a class with a method `score"),
    ],
)
def test_configuration_errors_say_what_is_allowed(scorer, message):
    for action in (partial(registry.check, made=(IMAGE,)), registry.build):
        with pytest.raises(registry.ScorerConfigError, match=message.replace("(", r"\(")):
            action(scorer)


# ---- foreign modules -------------------------------------------------------------------------------------------------


_CLASS = "class Own:\n    name = 'own'\n    def score(self, images, prompts): return []\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Puts a folder first on the Python path, as the working directory is for the command line."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def refusal(name: str, **params: object) -> str:
    with pytest.raises(registry.ScorerConfigError) as refused:
        registry.check(config(name, **params), (IMAGE,))
        registry.prompt_check(config(name, **params))
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("class Own\n", ("SyntaxError", "own_module.py, line 1")),
        ("x = 1\n" + "import own_helper\n", ("ModuleNotFoundError", "No module named 'own_helper'", "own_module.py:2")),
        ("from os import nothing\n", ("ImportError", "nothing", "own_module.py:1")),
        ("\n1 / 0\n", ("ZeroDivisionError", "own_module.py:2")),
        ("import json\njson.loads('{')\n", ("JSONDecodeError", "decoder.py:")),
        ("None.score\n", ("AttributeError", "own_module.py:1")),
        ("import sys\nsys.exit('no key')\n", ("SystemExit: no key", "own_module.py:2")),
        ("raise SystemExit\n", ("SystemExit: no reason given", "own_module.py:1")),
        ("class Own:\n    x: int = nowhere\n", ("NameError", "'nowhere'", "own_module.py:2")),
        ("\0", ("cannot import 'own_module'",)),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_the_line(folder, content, expected):
    (folder / "own_module.py").write_text(content)
    message = refusal("own_module:Own")
    assert message.startswith("scorer 'own_module:Own': cannot import 'own_module': ")
    assert all(text in message for text in expected), message


@pytest.mark.parametrize("name", ["own_nowhere:Own", "own_package.nowhere:Own"])
def test_a_module_that_is_not_there_is_refused_with_where_it_was_looked_for(folder, name):
    (folder / "own_package").mkdir()
    message = refusal(name)
    assert f"there is no {name.partition(':')[0]!r} in {folder}" in message
    assert "lib-dynload" not in message


WRONG_NAMES = ("..x:Y", ".x:Y", "x.:Y", "scorers/own.py:Own", "own.py :Own", ":Own", "own:", "own:Own:x", "own:Own[a]")


@pytest.mark.parametrize("name", [*WRONG_NAMES, "1:2", "own\n:Own"])
def test_a_name_that_no_module_can_have_is_refused(name):
    assert "expected 'module:Class', names joined by dots" in refusal(name)


def test_a_class_that_is_not_there_is_refused_with_those_that_are(folder):
    (folder / "own_module.py").write_text(_CLASS)
    assert "has no 'Other'; it defines Own" in refusal("own_module:Other")
    assert "has no 'Own.Inner'" in refusal("own_module:Own.Inner")
    (folder / "own_empty.py").write_text("x = 1\n")
    assert "has no 'Own'; it defines no class" in refusal("own_empty:Own")
    assert "is not a class with a method" in refusal("own_empty:x")


@pytest.mark.parametrize(
    ("parameter", "given", "why"),
    [
        (
            "x: nowhere = 1",
            1,
            "its constructor cannot be evaluated: NameError: name 'nowhere' is not defined",
        ),
        ("x: set[str] | list[str] = ()", ["a"], "parameter 'x': a recipe cannot give a"),
    ],
)
def test_a_parameter_of_a_type_that_no_recipe_can_write_is_refused(folder, parameter, given, why):
    init = f"    def __init__(self, *, {parameter}): pass\n"
    (folder / "own_module.py").write_text("from __future__ import annotations\n" + _CLASS + init)
    assert why in refusal("own_module:Own", x=given)


@pytest.mark.parametrize("name", ["jpeg_size", "own"])
def test_a_name_that_two_packages_register_is_refused_with_both(monkeypatch, name):
    targets = ("package_b:Own", "package_b:Own", "package_a:Own")
    points = [EntryPoint(name, target, registry.ENTRY_POINT_GROUP) for target in targets[name == "jpeg_size" :]]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    said = refusal(name)
    assert said.startswith(f"reward.scorers: {name!r} is registered more than once, as [") and "package_b:Own" in said
    assert "omni_async.rewards" in said or "package_a:Own" in said
    assert registry.names().count(name) == 1 and refusal("package_a:Own").startswith("scorer 'package_a:Own': cannot")


def test_ctrl_c_during_an_import_stays_ctrl_c(folder):
    (folder / "own_module.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        registry.check(config("own_module:Own"), (IMAGE,))


# ---- what a scorer needs of a prompt ---------------------------------------------------------------------------------


class Demanding(Nameless):
    def __init__(self, *, key: str = "language", secret: str = "") -> None: ...

    @classmethod
    def check_prompt(cls, prompt, params):
        match prompt.text:
            case "raise":
                raise KeyError(params["secret"])
            case "exit":
                sys.exit("bye")
            case "wrong":
                return False
        return None if params["key"] in prompt.metadata else f"no {params['key']!r}"


class Instance(Nameless):
    def check_prompt(self, prompt, params):
        return None


def asked(prompt: Prompt, **params: object) -> str | None:
    check = registry.prompt_check(config(f"{__name__}:Demanding", **params))
    assert check is not None
    return check(prompt)


def test_a_scorer_says_what_it_misses_in_a_prompt_by_its_parameters_and_their_defaults():
    prompt = Prompt(0, "x", metadata={"language": "en"})
    assert asked(prompt) is None
    assert asked(prompt, key="style") == f"scorer '{__name__}:Demanding': no 'style'"


def test_a_check_that_fails_itself_is_a_line_without_its_secrets():
    said = asked(Prompt(0, "raise"), secret="hunter2hunter2")
    assert said is not None and "check_prompt failed: KeyError" in said and "test_scorers.py:" in said
    assert "hunter2" not in said
    assert "check_prompt failed: SystemExit: bye" in (asked(Prompt(0, "exit")) or "")
    assert "check_prompt returned a bool, expected what is missing as text, or None" in (
        asked(Prompt(0, "wrong")) or ""
    )


def test_a_scorer_without_a_check_asks_nothing_and_one_that_needs_an_instance_is_refused():
    assert registry.prompt_check(config("jpeg_size")) is None
    assert "check_prompt must be a classmethod or staticmethod" in refusal(f"{__name__}:Instance")

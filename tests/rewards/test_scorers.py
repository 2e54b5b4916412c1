"""Tests how scorers are found, checked, built and weighed, and that a module's mistake is a line with its place."""

import io
import math
import sys
from contextlib import nullcontext
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from PIL import Image

from omni_async.config import reward as sections
from omni_async.control.reward_formula import NoReward
from omni_async.media import Media
from omni_async.plugins import entry_points as lookup
from omni_async.plugins.families import MediaShape
from omni_async.rewards import registry
from omni_async.rewards.base import ScoreError, Scorer
from omni_async.rewards.cache import identity_of
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt, PromptAudio, Score
from tests.support.images import as_media, score_all

IMAGES = [np.random.default_rng(i).integers(0, 1 + 80 * i, (32, 48, 3), dtype=np.uint8) for i in range(3)]
IMAGE = MediaShape("image", (3, 32, 48))
VIDEO = MediaShape("video", (5, 3, 32, 48), 8)
AUDIO = MediaShape("audio", (2, 800), 8000)
MEDIA = [as_media(image) for image in IMAGES]
PROMPTS = [Prompt(index=10 + i, text=f"prompt {i}") for i in range(3)]


class Nameless:
    def score(self, images, prompts):
        return [Score(value=1.0)] * len(images)


class Heir(Nameless, Scorer):
    name = "heir"


class Constant:
    def __init__(self, *, value: float = 2.0, text: str | None = None):
        self._score = Score(value=value, parts={"part": value}, text=text)

    def score(self, images, prompts):
        return [self._score] * len(images)


class Bright:
    def score(self, images, prompts):
        assert all(image.shape == (32, 48, 3) for image in images)
        return [Score(float(image[:, :, 0].mean())) for image in images]


class Loud:
    """A scorer of sound, with or without pictures."""

    name = "loud"
    accepts = ("audio",)

    def score(self, media, prompts):
        return [Score(float(np.abs(one.waveform).max())) for one in media]


class Wrong(Loud):
    accepts = "image"


class Dear(Loud):
    cost = "dear"


def config(name: str, weight: float = 1.0, **params):
    return sections.Scorer(name=name, weight=weight, params=params)


def own(name: str, weight: float = 1.0, **params):
    return config(f"{__name__}:{name}", weight, **params)


def scored(*scorers, media=MEDIA, prompts=PROMPTS):
    return score_all(LoadedReward.load(sections.Reward(scorers=scorers)), media, prompts)


def kilobytes(image, quality):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return len(buffer.getvalue()) / 1000


def test_jpeg_size_is_what_pillow_writes():
    small = registry.build(config("jpeg_size")).score(MEDIA, PROMPTS)
    assert [s.value for s in small] == [-kilobytes(i, 95) for i in IMAGES]
    large = registry.build(config("jpeg_size", quality=50, sign="max", scale=0.5)).score(MEDIA, PROMPTS)
    assert [s.value for s in large] == [0.5 * kilobytes(i, 50) for i in IMAGES]
    assert len({s.value for s in large}) == 3


def test_one_scorer_keeps_its_parts_and_several_are_weighed_and_prefixed_with_the_names_that_the_recipe_gives_them():
    assert scored(own("Constant", 3.0, text="hi")) == [Score(6.0, {"part": 2.0}, "hi", (2.0,))] * 3
    constant, size = f"{__name__}:Constant", kilobytes(IMAGES[0], 95)
    several = [own("Constant", 1.0, text="a"), own("Constant", -1.0, value=5.0, text="b"), own("Nameless")]
    [score, *_] = scored(config("jpeg_size", 0.1), *several)
    assert score.value == pytest.approx(-0.1 * size + 2.0 - 5.0 + 1.0)
    assert score.parts["jpeg_size/jpeg_kb"] == size and score.parts["jpeg_size/value"] == -size
    assert score.parts[f"{constant}/part"] == 2.0 and score.parts[f"{constant}_2/part"] == 5.0
    assert score.parts[f"{__name__}:Nameless/value"] == 1.0
    assert score.text == "a | b" and score.values == (-size, 2.0, 5.0, 1.0)


@pytest.mark.parametrize(
    ("name", "made", "error"),
    [
        ("ocr", (AUDIO,), "accepts image or video, but the samples are audio$"),
        ("ocr", (MediaShape("text", ()),), "accepts image or video, but the samples are text$"),
        (f"{__name__}:Loud", (VIDEO,), "accepts audio, but the samples are video"),
        (f"{__name__}:Wrong", (IMAGE,), "accepts must be a tuple of image, video, audio, text, got 'image'"),
        (f"{__name__}:Dear", (AUDIO,), "cost must be one of cpu, model, elsewhere, got 'dear'"),
        (
            f"{__name__}:Constant",
            (VIDEO,),
            r"accepts image \(it has no `accepts`\), but the samples are video; declare accepts = \('video',\) in",
        ),
        (f"{__name__}:Heir", (VIDEO,), r"accepts image \(it has no `accepts`\), but the samples are video"),
        ("ocr", (VIDEO, AUDIO), None),
        (f"{__name__}:Loud", (VIDEO, AUDIO), None),
    ],
)
def test_a_scorer_is_refused_that_accepts_nothing_of_the_samples(name, made, error):
    with pytest.raises(registry.ScorerConfigError, match=f"^.*{error}") if error else nullcontext():
        registry.check(config(name), made)


@pytest.mark.parametrize("name", ["Nameless", "Heir"])
def test_a_class_has_the_defaults_of_the_base_whether_it_inherits_from_it_or_not(name):
    given = own(name)
    registry.check(given, (IMAGE, VIDEO))
    registry.check_files(given)
    found = registry.media_of(given.name), registry.concurrency_of(given), registry.cost_of(given)
    assert found == ({"image"}, 1, "cpu") and registry.prompt_check(given) is None
    assert identity_of(given, registry.build(given)) is None
    assert [score.value for score in scored(given)] == [1.0] * 3


def test_a_scorer_that_declares_what_it_accepts_gets_media_and_one_that_does_not_gets_images():
    both = Media(image=MEDIA[2].image, audio=np.full((1, 8), -0.5, np.float32), sample_rate=8000)
    [score] = scored(own("Loud"), own("Bright"), media=[both], prompts=PROMPTS[:1])
    assert score.values == (0.5, IMAGES[2][:, :, 0].mean())


@pytest.mark.parametrize(
    ("scorer", "num_prompts", "error"),
    [
        (own("Constant", value=math.nan), 3, r"Constant.*sample 0 \(prompt 10: 'prompt 0'\): value is nan"),
        (own("Constant", 1e300, value=1e99), 3, r"Constant': a reward of inf, beyond"),
        (own("Constant"), 2, "3 samples but 2 prompts"),
        (own("Loud"), 3, "scorer 'test_scorers:Loud' accepts audio, the sample is image"),
    ],
)
def test_a_failed_score_never_becomes_a_number(scorer, num_prompts, error):
    with pytest.raises((ScoreError, NoReward), match=error):
        scored(config("jpeg_size"), scorer, prompts=PROMPTS[:num_prompts])
    assert scored(config("jpeg_size"), media=[], prompts=[]) == []


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (config("ocrr"), "'ocrr': expected one of .*or your own 'module:name' or .*, got 'ocrr'; did you mean 'ocr'"),
        (config("mine.py"), "as in 'mine.py:name', got 'mine.py'"),
        (config("mine.Mine"), "expected one of .*or your own 'module:name' or .*, as in 'mine:Mine', got 'mine.Mine'"),
        (config("jpeg_size", qualty=3), "takes no parameter 'qualty'; it takes quality, sign, scale"),
        (config("jpeg_size", quality=300), "parameter 'quality': Expected `int` <= 95, got 300"),
        (config("jpeg_size", sign="up"), "parameter 'sign': Invalid enum value 'up'"),
        (config("no_such_module:X"), "cannot import 'no_such_module'"),
        (own("Nothing"), "has no 'Nothing'; it defines Nameless, Heir, Constant, Bright"),
        (own("IMAGES"), "is not a class with a method `score("),
    ],
)
def test_configuration_errors_say_what_is_allowed(scorer, message):
    for action in (partial(registry.check, made=(IMAGE,)), registry.build):
        with pytest.raises(registry.ScorerConfigError, match=message.replace("(", r"\(")):
            action(scorer)


# ---- foreign modules -------------------------------------------------------------------------------------------------


HEAD = "from __future__ import annotations\n"
_CLASS = "class Own:\n    name = 'own'\n    def score(self, images, prompts): return []\n"
_BASE = "from omni_async.rewards.base import Scorer\n"
INIT = "    def __init__(self, *, {}): pass\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Puts a folder first on the Python path, as the working directory is for the command line."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def refusal(name, **params):
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
        ("import sys\nsys.exit('no key')\n", ("SystemExit: no key", "own_module.py:2")),
        ("raise SystemExit\n", ("SystemExit: no reason given", "own_module.py:1")),
        ("class Own:\n    x: int = nowhere\n", ("NameError", "'nowhere'", "own_module.py:2")),
        ("\0", ()),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_the_line(folder, content, expected):
    (folder / "own_module.py").write_text(content)
    message = refusal("own_module:Own")
    assert message.startswith("scorer 'own_module:Own': cannot import 'own_module': ")
    assert all(text in message for text in expected), message


@pytest.mark.parametrize(
    ("content", "name", "params", "expected"),
    [
        (_CLASS, "own_module:Other", {}, "has no 'Other'; it defines Own"),
        (_CLASS, "own_module:Own.Inner", {}, "has no 'Own.Inner'"),
        ("x = 1\n", "own_module:Own", {}, "has no 'Own'; it defines no class"),
        ("x = 1\n", "own_module:x", {}, "is not a class with a method"),
        (_BASE + "class Own(Scorer):\n    name = 'own'\n", "own_module:Own", {}, "is not a class with a method"),
        (_CLASS, "own_nowhere:Own", {}, "there is no 'own_nowhere' in {folder}"),
        (_CLASS, "own_package.nowhere:Own", {}, "there is no 'own_package.nowhere' in {folder}"),
        (_CLASS + INIT.format("x: set[str] | list[str] = ()"), "own_module:Own", {"x": []}, "a recipe cannot give a"),
        (HEAD + _CLASS + INIT.format("x: no = 1"), "own_module:Own", {"x": 1}, "NameError: name 'no' is not defined"),
    ],
)
def test_a_class_that_cannot_be_built_is_refused_with_the_reason(folder, content, name, params, expected):
    (folder / "own_module.py").write_text(content)
    (folder / "own_package").mkdir()
    message = refusal(name, **params)
    assert expected.format(folder=folder) in message and "lib-dynload" not in message


def test_ctrl_c_during_an_import_stays_ctrl_c(folder):
    (folder / "own_module.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        registry.check(config("own_module:Own"), (IMAGE,))


def test_a_name_that_no_module_can_have_is_refused():
    wrong = ("..x:Y", ".x:Y", "x.:Y", "scorers/own:Own", "own.py :Own", ":Own", "own:", "own:Own:x", "own:Own[a]")
    for name in (*wrong, "1:2", "own\n:Own"):
        assert "expected 'module:name', names joined by dots" in refusal(name)


@pytest.mark.parametrize("name", ["jpeg_size", "own"])
def test_a_name_that_two_packages_register_is_refused_with_both(monkeypatch, name):
    targets = ("package_b:Own", "package_b:Own", "package_a:Own")
    points = [EntryPoint(name, target, registry.ENTRY_POINT_GROUP) for target in targets]
    monkeypatch.setattr(lookup, "entry_points", lambda: EntryPoints(points))
    said = "built in, and registered as" if name == "jpeg_size" else "registered more than once, as"
    assert refusal(name).startswith(f"scorer {name!r}: {name!r} is {said} ['package_a:Own', 'package_b:Own']; ")
    assert registry.names().count(name) == 1 and refusal("package_a:Own").startswith("scorer 'package_a:Own': cannot")


# ---- what a scorer needs of a prompt ---------------------------------------------------------------------------------


class Demanding(Nameless):
    def __init__(self, *, key: str = "language", secret: str = ""): ...

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


class Hearing(Nameless):
    needs = ("audio",)


def test_a_scorer_that_needs_audio_scores_the_prompts_that_have_it():
    check = registry.prompt_check(own("Hearing"))
    assert check(Prompt(0, "x", audio=(PromptAudio("a.wav", "digest"),))) is None
    assert check(Prompt(0, "x")).endswith("needs 'audio', which the prompt does not have")


def test_a_scorer_says_what_it_misses_in_a_prompt_by_its_parameters_and_their_defaults():
    def asked(text, **params):
        check = registry.prompt_check(own("Demanding", **params))
        return check(Prompt(0, text, metadata={"language": "en"}))

    assert asked("x") is None
    assert asked("x", key="style") == f"scorer '{__name__}:Demanding': no 'style'"
    said = asked("raise", secret="hunter2hunter2")
    assert "check_prompt failed: KeyError" in said and "test_scorers.py:" in said and "hunter2" not in said
    assert "check_prompt failed: SystemExit: bye" in asked("exit")
    assert "check_prompt returned a bool, expected what is missing as text, or None" in asked("wrong")
    assert "check_prompt must be a classmethod or staticmethod" in refusal(f"{__name__}:Instance")

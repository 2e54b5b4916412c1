"""Tests rewards that are functions: the same numbers whatever their form, and one line for a wrong one."""

from __future__ import annotations

import asyncio
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import ValidationError

from omni_async.aio.clock import WallClock
from omni_async.config import reward as sections
from omni_async.plugins.families import MediaShape
from omni_async.rewards import functions, registry
from omni_async.rewards.cache import identity_of
from omni_async.rewards.functions import named, passed, receive
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.types import Answer, Prompt, Score
from tests.rewards.server.serving_world import served, write_scorers
from tests.support.images import as_media

IMAGES = [np.random.default_rng(i).integers(0, 256, (8, 12, 3), dtype=np.uint8) for i in range(3)]
MEDIA = [as_media(image) for image in IMAGES]
PROMPTS = [Prompt(i, f"prompt {i}") for i in range(3)]
NUMBERS = [float(image[..., 0].mean() / 255) for image in IMAGES]
SOURCE = """
from own_scale import SCALE

def red(images, prompts, *, scale: float = SCALE):
    return [scale * float(image[..., 0].mean()) for image in images]
"""


def red(images: Any, prompts: Any, scale: float = 1 / 255) -> list[float]:
    return [scale * float(image[..., 0].mean()) for image in images]


async def red_later(images: Any, prompts: Any, *, scale: float = 1 / 255) -> list[float]:
    await asyncio.sleep(0)
    return red(images, prompts, scale)


class Red:
    def __init__(self, *, scale: float = 1 / 255) -> None:
        self._scale = scale

    def score(self, images: Any, prompts: Any) -> Any:
        return [Score(value) for value in red(images, prompts, self._scale)]


class Called:
    """An object that is called."""

    async def __call__(self, images: Any, prompts: Any) -> list[float]:
        return await red_later(images, prompts)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_passed", {})


async def _answers(scorer: sections.Scorer, **reward: Any) -> list[Answer]:
    settings = sections.Reward(scorers=(scorer,), batch=3, outage_s=0.0, **reward)

    async def report(text: str) -> None: ...

    async with Panel("reward-0", LoadedReward.load(settings), settings, WallClock(), report) as panel:
        return await asyncio.gather(*map(panel.score, MEDIA, PROMPTS))


def answers(name: str, **params: Any) -> list[Answer]:
    registry.check(sections.Scorer(name=name, params=params), (MediaShape("image", (3, 8, 12)),))
    return asyncio.run(_answers(sections.Scorer(name=name, params=params)))


def values(name: str, **params: Any) -> list[float]:
    return [one.score.value for one in answers(name, **params) if one.score is not None]


def in_file(folder: Path) -> str:
    (folder / "own_reward.py").write_text(SOURCE)
    (folder / "own_scale.py").write_text("SCALE = 1 / 255\n")
    return f"{folder / 'own_reward.py'}:red"


@pytest.mark.parametrize(
    "form",
    [
        lambda folder: f"{__name__}:red",
        lambda folder: f"{__name__}:red_later",
        lambda folder: f"{__name__}:Red",
        in_file,
        lambda folder: named(lambda images, prompts: red(images, prompts)),
        lambda folder: named(type("Own", (Red,), {})),
        lambda folder: named(Called()),
        lambda folder: named(red),
    ],
    ids=["function", "async", "class", "file", "lambda", "own class", "object", "passed function"],
)
def test_every_form_gives_the_same_numbers(form: Callable[[Path], str], tmp_path: Path) -> None:
    assert values(form(tmp_path)) == NUMBERS


@pytest.mark.parametrize("form", [lambda folder: f"{__name__}:red_later", in_file], ids=["async", "file"])
def test_a_server_gives_the_same_numbers(form: Callable[[Path], str], tmp_path: Path) -> None:
    with served(write_scorers(tmp_path, {"name": form(tmp_path)})) as url:
        assert values("http", urls=[url]) == NUMBERS


@pytest.mark.parametrize(
    "result",
    [
        [1.0, 0.0, 2.0],
        (1, False, np.float32(2)),
        [Score(1.0), 0.0, Score(2.0)],
        np.array([1.0, 0.0, 2.0], np.float32),
        torch.tensor([1.0, 0.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(1.0), torch.tensor(0.0), torch.tensor(2)],
    ],
    ids=["floats", "numbers", "scores", "array", "tensor", "0-d tensors"],
)
def test_every_kind_of_result(result: Any) -> None:
    assert values(named(lambda images, prompts: result)) == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (
            lambda n: None,
            r"returned None \(is its `return` missing\?\), expected a list of Score or numbers, one per sample",
        ),
        (lambda n: 0.5, "returned a float, expected a list of Score or numbers"),
        (lambda n: {"avg": [1.0] * n}, "returned a dict, expected"),
        (lambda n: [1.0] * (n + 1), "returned [42] scores for [31] samples"),
        (lambda n: torch.ones(n, 1), r"returned a Tensor of shape \([31], 1\), expected"),
        (lambda n: [torch.ones(2)] * n, r"the score is a Tensor of shape \(2,\), expected a number"),
        (lambda n: [float("nan")] * n, "the score is nan, expected a finite number"),
        (lambda n: ["1"] * n, "the score is a str, expected a number"),
    ],
)
def test_a_wrong_result_is_a_reason(result: Callable[[int], Any], error: str) -> None:
    for one in answers(named(lambda images, prompts: result(len(images)))):
        assert one.error is not None and re.search(error, one.error) and "scorer 'python:lambda'" in one.error


@pytest.mark.parametrize(
    ("reward", "params", "error"),
    [
        (lambda images: images, {}, r"takes \(images\), expected \(images, prompts\)"),
        (lambda images, prompts, metadata: [], {}, "needs the parameter 'metadata'"),
        (red, {"scale": "much"}, "parameter 'scale': Expected `float`, got `str`"),
        (red, {"size": 1}, "takes no parameter 'size'; it takes scale"),
    ],
)
def test_a_wrong_signature_is_refused(reward: Any, params: dict[str, Any], error: str) -> None:
    with pytest.raises(registry.ScorerConfigError, match=error) as refused:
        answers(named(reward), **params)
    assert "\n" not in str(refused.value) and not isinstance(refused.value, ValidationError)


def test_what_is_no_reward_is_refused() -> None:
    for thing, kind in ((Red(), "Red object"), (3, "int object"), (int, "int")):
        with pytest.raises(ValueError, match=f"expected a function .* or a class with a method `score`, got {kind}$"):
            named(thing)


def test_a_file_of_other_content_is_run_again(tmp_path: Path) -> None:
    name = in_file(tmp_path)
    assert values(name) == NUMBERS
    (tmp_path / "own_reward.py").write_text("def red(images, prompts):\n    return [3.0] * len(images)\n")
    assert values(name) == [3.0] * 3
    for content, error in (("1 / 0", "ZeroDivisionError.*own_reward.py:1"), ("x = 1", "has no 'red'; it defines no")):
        (tmp_path / "own_reward.py").write_text(content)
        with pytest.raises(registry.ScorerConfigError, match=error):
            answers(name)
    (tmp_path / "own_reward.py").unlink()
    with pytest.raises(registry.ScorerConfigError, match=r"there is no file .*own_reward.py$"):
        answers(name)


def test_attributes_of_a_function_declare_the_rest() -> None:
    def loud(media: Any, prompts: Any) -> list[float]:
        return [float(one.video.mean()) for one in media]

    loud.accepts = ("video",)  # type: ignore[attr-defined]
    loud.deterministic = True  # type: ignore[attr-defined]
    config = sections.Scorer(name=named(loud))
    registry.check(config, (MediaShape("video", (2, 3, 8, 12), 8),))
    assert registry.media_of(config.name) == {"video"}
    assert identity_of(config, registry.build(config)) is None, "nothing identifies the code of a passed function"


def test_a_worker_receives_what_the_driver_passed() -> None:
    receive({"python:red": pickle.dumps(red), "python:gone": b"cnowhere\nred\n."})
    assert passed("python:red") is red and values("python:red") == NUMBERS
    with pytest.raises(registry.ScorerConfigError, match=r"ModuleNotFoundError: No module named 'nowhere'"):
        answers("python:gone")
    with pytest.raises(registry.ScorerConfigError, match=r"has no import path; pass it as reward= from Python again$"):
        answers("python:other")
    assert named(red) == f"{red.__module__}:red" and red.__module__ in sys.modules

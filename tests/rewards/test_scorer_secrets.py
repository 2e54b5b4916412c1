"""Tests credentials of scorers: taken from the environment, and in no message about a scorer's failure."""

from __future__ import annotations

import numpy as np
import pytest

from omni_async.config import schema
from omni_async.families import MediaShape
from omni_async.rewards import registry
from omni_async.rewards.base import Outage
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.registry import ScorerConfigError
from omni_async.types import Prompt, Score
from tests.config.test_secret_forms import ENCODERS
from tests.images import as_media

IMAGE = (MediaShape("image", (3, 4, 4)),)
MEDIA, PROMPTS = [as_media(np.zeros((4, 4, 3), np.uint8))], [Prompt(0, "x")]


class Judge:
    """A scorer that shows its secret in errors."""

    name = "judge"

    def __init__(
        self,
        api_key: str = "",
        url: str = "",
        level: int = 0,
        headers: dict[str, str] | None = None,
        broken: bool = False,
    ) -> None:
        self._said = f"{url} refused {api_key} {(headers or {}).get('X-Api-Key', '')}"
        if broken:
            raise OSError(self._said)

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        raise ConnectionError(self._said)


class Page(Judge):
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        raise ConnectionError("<html>" * 100_000)


def config(scorer: str = "Judge", **params: object) -> schema.Scorer:
    return schema.Scorer(name=f"{__name__}:{scorer}", params=params)


def failure(scorer: schema.Scorer) -> str:
    with pytest.raises(Exception) as raised:
        WeightedScorer([scorer]).score(MEDIA, PROMPTS)
    assert raised.value.__cause__ is None
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_parameter_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-42424242")
    scorer = registry.build(config(api_key="env:JUDGE_KEY", headers={"X-Api-Key": "env:JUDGE_KEY"}))
    with pytest.raises(ConnectionError, match="refused sk-42424242 sk-42424242"):
        scorer.score(MEDIA, PROMPTS)


def test_a_variable_that_is_not_set_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(
        ScorerConfigError, match="parameter 'api_key': 'env:JUDGE_KEY' names an environment variable that is not set"
    ):
        registry.check(config(api_key="env:JUDGE_KEY"), IMAGE)


@pytest.mark.parametrize("broken", [False, True], ids=["scoring", "starting"])
@pytest.mark.parametrize(
    "params",
    [
        {"api_key": "sk-42424242"},
        {"url": "https://me:sk-42424242@judge/"},
        {"headers": {"X-Api-Key": "sk-42424242"}},
        {"url": "env:JUDGE_KEY"},
    ],
    ids=["key", "url", "header", "environment"],
)
def test_what_a_scorer_raises_shows_none_of_its_credentials(
    params: dict[str, object], broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-42424242")
    said = failure(config(**params, broken=broken))
    assert "sk-42424242" not in said and "***" in said
    assert ("OSError" if broken else "ConnectionError") in said, "the cause is still reported"


def test_what_has_no_secret_is_raised_as_it_is() -> None:
    assert failure(config(url="https://judge/")) == "ConnectionError: https://judge/ refused  "


class Encodes(Judge):
    """A scorer that shows its key in an encoding of the test's choice."""

    def __init__(self, api_key: str, how: str) -> None:
        self._said = ENCODERS[how](f"key:{api_key}")

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        raise ValueError(f"header {self._said} was refused")


@pytest.mark.parametrize("how", sorted(ENCODERS))
def test_nor_in_any_form_that_libraries_give_them(how: str) -> None:
    key = 'sk-42"42/42+q&é'
    said = failure(config("Encodes", api_key=key, how=how))
    assert ENCODERS[how](f"key:{key}") not in said and key not in said and "***" in said


@pytest.mark.parametrize("length", [8, 300, 5000])
@pytest.mark.parametrize("copies", [1, 7, 500])
def test_no_piece_of_a_long_credential_is_left_where_a_text_is_cut(length: int, copies: int) -> None:
    key = "".join(f"{number:04x}" for number in range(length // 4))
    said = failure(config("Repeats", api_key=key, copies=copies))
    assert not any(key[at : at + 8] in said for at in range(0, length - 7, 4))


class Repeats(Judge):
    def __init__(self, api_key: str, copies: int) -> None:
        self._said = f"{api_key} " * copies

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        raise ValueError(self._said)


def test_a_web_page_for_an_error_is_cut() -> None:
    said = failure(config("Page"))
    assert len(said) < 2100 and said.endswith("... (600000 characters)") and Outage.__name__ in said


def test_a_wrong_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(ScorerConfigError) as refused:
        registry.check(config(api_key=424242), IMAGE)
    assert "424242" not in str(refused.value) and "parameter 'api_key': Expected `str`, got `int`" in str(refused.value)

"""Defines the interface of scorers: from a batch of media and prompts to finite scores.

It also checks a scorer's input and output. The errors name the scorer and the sample."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from numbers import Real
from typing import Any, cast

from omni_async.media import Media
from omni_async.types import Prompt, Score

# A scorer's output goes into checkpoints, metrics and captions.
_LONGEST_TEXT = 2000
LONGEST_NAME = 100
MOST_PARTS = 256
# Metrics contain means and spreads of scores, so sums of squares must stay finite.
LARGEST = 1e100
# Halves of surrogate pairs cannot be written to a file; control characters cannot be shown in an image.
_UNFIT = re.compile(r"[\ud800-\udfff\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

Addresses = Callable[[str], Awaitable[dict[str, str]]]
# A list of `Score` or numbers, or a 1-D array or tensor; `require_scores` checks it.
Scores = Any


class ScoreError(RuntimeError):
    """A sample could not be scored.

    Scoring is retried, then the sample's group is rejected; the error never becomes a number."""


class Outage(ScoreError):
    """The scorer is unreachable, or out of time or memory; a later attempt may succeed.

    A scorer may also raise it, for example while it starts up."""


class WrongScorer(RuntimeError):
    """A scorer that fails for every sample in the same way, so that waiting would not help."""


class Unbounded(ScoreError):
    """A finite score so large that training on it would break the policy.

    The sample's group is rejected, because scoring it again would not make it smaller."""


COSTS = ("cpu", "model", "elsewhere")
_BY_METHOD: Any = object()


class Scorer:
    """The base of scorers: a function from media and prompts to scores, whose attributes declare the rest.

    A scorer need not inherit from it: `declared` gives any class with a method `score` the same defaults.

    accepts        a tuple of "image", "video", "audio" and "text": the parts of a sample's media that it can score. It
                   must be able to score a sample that has one of them, and receives `Media`. By default it scores
                   images, and receives arrays.
    requires       a tuple of parts that every sample must have together. Default: any one of the accepted parts.
    concurrency    the number of calls that may run at once, None for any number. Default: one call of a plain method,
                   any number of an asynchronous one. If several are allowed, a slow call is hedged after `hedge_s`.
    needs          a tuple of what every prompt must have: "target", "images", "audio" or keys of its metadata. Checked
                   before anything is started.
    cost           the resource that a sample uses: "cpu", this machine's CPUs; "model", a model that wants an
                   accelerator; "elsewhere", a server's time and none of the worker's.
    deterministic  True if an answer follows from the media and from the prompt's text, target, metadata and files
                   alone. `reward.cache` then stores it. Other parameters, another version of its package or another
                   source file of its class make another scorer.
    version        a text with anything else that its answers depend on, such as a model's version.

    If a class's constructor requires a keyword `device`, the run passes it: the accelerator that torch sees if the
    worker has one, otherwise "cpu"."""

    name: str
    accepts: tuple[str, ...] | None = None
    requires: tuple[str, ...] = ()
    concurrency: int | None = _BY_METHOD
    needs: tuple[str, ...] = ()
    cost: str = COSTS[0]
    deterministic: bool = False
    version: str = ""

    def score(self, media: list[Any], prompts: list[Prompt], /) -> Scores | Awaitable[Scores]:
        """Score a batch.

        A plain method may block and is called in a worker thread. An `async def` is awaited on the worker's event loop
        and must not block it.

        A call that takes longer than `timeout_s` is given up. An asynchronous call is cancelled; a thread cannot be
        stopped, and the next call may begin while it still runs. So give blocking socket calls their own timeout. A
        worker with too many hanging calls is replaced.

        `media` are `omni_async.media.Media` of NumPy arrays or, without `accepts`, images uint8 (height, width, 3). Do
        not write to them. Return as many scores as prompts, all finite: a list of `Score` or numbers, or a 1-D array or
        tensor. Raise any exception otherwise. The same sample may be passed again: alone if its batch failed, and as a
        known-good check if other samples fail."""
        raise NotImplementedError

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Return a text for the user about what a prompt lacks, or None; a classmethod or staticmethod.

        It is called with every prompt of the recipe before anything is started. `params` are the constructor's keyword
        arguments, defaults included. It should not import torch, because recipes are checked without it."""
        return None

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> str | None:
        """Return an error about a missing file that `params` name, or None. Called for built-in scorers only."""
        return None

    def connect(self, addresses: Addresses) -> None:
        """Prepare for servers of the run; called once before the first score.

        `await addresses(role)` waits until a worker of that role (for example a judge server) is ready. It returns the
        addresses of the ready workers by name. Call it again if one does not answer: a replaced worker has another
        address."""

    async def close(self) -> None:
        """Free resources; called once after the last score. It may also be a plain method, which may block."""


_DEFAULTS = Scorer()


class _Declared:
    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._scorer, name)
        except AttributeError:
            return getattr(_DEFAULTS, name)


def declared(scorer: object) -> Scorer:
    """Return a scorer, or a class of scorers, with the defaults of `Scorer` for missing attributes and methods.

    The class need not inherit from `Scorer`; no other code handles classes that do not."""
    return scorer if isinstance(scorer, Scorer) else cast(Scorer, _Declared(scorer))


def is_scorer(thing: Any) -> bool:
    """Return whether `thing` is a class with a method `score`."""
    score = getattr(thing, "score", None)
    return isinstance(thing, type) and callable(score) and score is not Scorer.score


def is_async(scorer: object) -> bool:
    """Return whether `score` of a scorer, or of a class of scorers, is a coroutine function."""
    return inspect.iscoroutinefunction(declared(scorer).score)


def concurrency_of(scorer: object) -> int | None:
    """Return how many calls of a scorer, or of a class of scorers, may run at once; None for any number.

    ValueError if it declares neither a positive integer nor None."""
    found: Any = declared(scorer).concurrency
    if found is _BY_METHOD:
        return None if is_async(scorer) else 1
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
        raise ValueError(f"concurrency must be a positive integer, or None for any number, got {found!r}")
    return found


def accepted_parts(scorer: object) -> tuple[str, ...]:
    """Return the parts of media that a scorer, or a class of scorers, can score."""
    accepts = declared(scorer).accepts
    return ("image",) if accepts is None else accepts


def shown_to(label: str, scorer: object, media: Sequence[Media]) -> list[Any]:
    """Return the media as the scorer's `score` takes them: pixels, or `Media` if it declares `accepts`.

    Args:
        label: the scorer's name in errors.
        scorer: foreign code; only `accepts` is read.
        media: of the samples to score.

    Raises:
        ScoreError: the scorer accepts no part of one of the media."""
    accepted = accepted_parts(scorer)
    for one in media:
        if not set(accepted) & set(one.parts):
            takes, found = " or ".join(accepted), " and ".join(one.parts)
            raise ScoreError(f"scorer {label!r} accepts {takes}, the sample is {found}")
    return [one.pixels for one in media] if declared(scorer).accepts is None else list(media)


def describe(position: int, prompt: Prompt) -> str:
    text = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
    return f"sample {position} (prompt {prompt.index}: {text!r})"


def require_media(media: Sequence[Any], prompts: Sequence[Prompt]) -> None:
    """Require as many prompts as media, each of them `Media`; ScoreError otherwise."""
    if len(media) != len(prompts):
        raise ScoreError(f"{len(media)} samples but {len(prompts)} prompts")
    for position, (one, prompt) in enumerate(zip(media, prompts, strict=True)):
        if not isinstance(one, Media):
            raise ScoreError(f"{describe(position, prompt)}: expected media, got a {_kind(one)}")


def require_scores(scorer: str, scores: Any, prompts: Sequence[Prompt]) -> list[Score]:
    """Return the scores, one per prompt, with plain floats for numbers and with texts that can be written.

    Args:
        scorer: its name in errors.
        scores: any value, as the scorer returned it.
        prompts: the prompts that the scorer was called with.

    Raises:
        ScoreError: `scores` is neither a list of one `Score` or number per prompt nor a 1-D array or tensor, or a value
            or part is not a finite number."""
    if isinstance(scores, Coroutine):
        scores.close()  # it will never be awaited
        raise ScoreError(f"scorer {scorer!r} returned a coroutine: make the scorer itself `async def`")
    if getattr(scores, "ndim", None) == 1 and hasattr(scores, "tolist"):
        scores = scores.tolist()
    if not isinstance(scores, list | tuple):
        found = "None (is its `return` missing?)" if scores is None else f"a {_kind(scores)}"
        raise ScoreError(f"scorer {scorer!r} returned {found}, expected a list of Score or numbers, one per sample")
    if len(scores) != len(prompts):
        raise ScoreError(f"scorer {scorer!r} returned {len(scores)} scores for {len(prompts)} samples")
    return [
        require_score(f"scorer {scorer!r}, {describe(position, prompt)}", score)
        for position, (score, prompt) in enumerate(zip(scores, prompts, strict=True))
    ]


def require_score(where: str, score: Any) -> Score:
    """Return one score, or a number as a score, as `require_scores` does. `where` begins errors. Raises ScoreError."""
    if not isinstance(score, Score):
        return Score(_finite(where, "the score", score))
    if not isinstance(score.text, str | None):
        raise ScoreError(f"{where}: text is a {_kind(score.text)}, expected a str or None")
    if not isinstance(score.values, tuple):
        raise ScoreError(f"{where}: values is a {_kind(score.values)}, expected a tuple of numbers")
    value = _finite(where, "value", score.value)
    parts = _require_parts(where, score.parts)
    values = tuple(_finite(where, f"values[{i}]", number) for i, number in enumerate(score.values))
    return Score(value, parts, None if score.text is None else _fit(score.text), values)


def _require_parts(where: str, parts: Any) -> dict[str, float]:
    if not isinstance(parts, dict):
        raise ScoreError(f"{where}: parts is a {_kind(parts)}, expected a dict of named numbers")
    if len(parts) > MOST_PARTS:
        raise ScoreError(f"{where}: {len(parts)} parts, expected {MOST_PARTS} at most")
    for name in parts:
        if not isinstance(name, str):
            raise ScoreError(f"{where}: a part's name is a {_kind(name)}, expected a str")
        if not 0 < len(name) <= LONGEST_NAME or _UNFIT.search(name):
            expected = f"expected 1 to {LONGEST_NAME} characters without control characters"
            raise ScoreError(f"{where}: a part is called {name[:LONGEST_NAME]!r}, {expected}")
    numbers = {str.__str__(name): _finite(where, name, number) for name, number in parts.items()}
    for name, number in numbers.items():
        if abs(number) > LARGEST:
            raise ScoreError(f"{where}: {name} is {number:g}, expected at most {LARGEST:g}")
    return numbers


def _fit(text: str) -> str:
    """Convert any text to plain text for files and captions."""
    plain = _UNFIT.sub("\ufffd", str.__str__(text[:_LONGEST_TEXT]))
    return plain if len(text) <= _LONGEST_TEXT else f"{plain}..."


def _finite(where: str, part: str, number: Any) -> float:
    if not isinstance(number, Real) and getattr(number, "ndim", None) == 0:  # of an array, a tensor, NumPy's bool
        number = number.item()
    if not isinstance(number, Real):  # a bool counts as a score of 0 or 1
        raise ScoreError(f"{where}: {part} is a {_kind(number)}, expected a number")
    try:
        plain = float(number)
    except OverflowError:  # an int of any size is Real
        plain = math.inf
    except (TypeError, ValueError):  # NumPy's times are Real, too
        raise ScoreError(f"{where}: {part} is a {_kind(number)}, expected a number") from None
    if not math.isfinite(plain):
        raise ScoreError(f"{where}: {part} is {plain}, expected a finite number")
    return plain


def _kind(thing: Any) -> str:
    return f"{type(thing).__name__} of shape {tuple(thing.shape)}" if hasattr(thing, "shape") else type(thing).__name__

"""Defines the interface of scorers: functions from a batch of media and prompts to finite scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media


class ScoreError(RuntimeError):
    """A sample could not be scored.

    Scoring is retried, then the sample's group is rejected; the error never becomes a number."""


class Outage(ScoreError):
    """The scorer is unreachable, or has no time or room: asking later may help.

    A scorer may raise it, too, while it starts up, for example."""


class WrongScorer(RuntimeError):
    """A scorer fails for every sample, in the same way every time: waiting would not repair it."""


class Unbounded(ScoreError):
    """A finite score so large that training on it would break the policy.

    Its group is rejected; asking again would not make it smaller."""


class Scorer(Protocol):
    """A function from media and prompts to scores.

    A class attribute `accepts`, a tuple of "image", "video" and "audio", declares which parts of a sample's media it
    can score; it must be able to score a sample that has one of them, and gets `Media`. A class without it scores
    images, and gets them as arrays.

    A class attribute `concurrent = True` (by default it is false)
    declares that `score` may be called while another call of it is running, as that of a client of an HTTP server
    usually may: then a slow call is hedged after `reward.hedge_s`.

    A class may also have a `check_prompt(prompt, params)`, a classmethod or staticmethod, which is called with every
    prompt of the recipe before anything is started. It returns what the prompt lacks, as a text for the user, or None;
    `params` are the constructor's keyword arguments, defaults included. It should import no torch: recipes are checked
    without."""

    name: str

    def score(self, media: list[Any], prompts: list[Prompt], /) -> list[Score]:
        """Score a batch.

        Blocking, called in a worker thread, one call at a time unless the scorer is `concurrent`; but a call that takes
        longer than `reward.timeout_s` is given up, and the next may begin while it still runs. Calls over a socket
        should have a timeout of their own: a thread cannot be stopped, and a worker that collects too many is replaced.

        `media` are `omni_async.media.Media` of NumPy arrays or, without `accepts`, images uint8 (height, width, 3); not
        to be written to. Return as many scores as prompts, all finite; raise any exception otherwise. The same sample
        may come again: alone, if the batch it was in failed, and as a question whose answer is known, if other samples
        fail."""


def is_concurrent(scorer: object) -> bool:
    return getattr(scorer, "concurrent", False) is True


def accepted_parts(scorer: object) -> tuple[str, ...]:
    """Return the parts of media that a scorer, or a class of scorers, can score."""
    declared: tuple[str, ...] | None = getattr(scorer, "accepts", None)
    return ("image",) if declared is None else tuple(declared)


def shown_to(label: str, scorer: object, media: Sequence[Media]) -> list[Any]:
    """Return what the scorer's `score` is called with. ScoreError if it cannot score one of the media."""
    accepted = accepted_parts(scorer)
    for one in media:
        if not set(accepted) & set(one.parts):
            takes, found = " or ".join(accepted), " and ".join(one.parts)
            raise ScoreError(f"scorer {label!r} accepts {takes}, the sample is {found}")
    return [one.pixels for one in media] if getattr(scorer, "accepts", None) is None else list(media)

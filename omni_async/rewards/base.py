"""Defines the interface of scorers: functions from a batch of images and prompts to finite scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np


class ScoreError(RuntimeError):
    """A sample could not be scored. Scoring is retried, then the sample's group is rejected; the error never becomes a
    number."""


class Outage(ScoreError):
    """The scorer is unreachable, or has no time or room: asking later may help. A scorer may raise it, too, while it
    starts up, for example."""


class WrongScorer(RuntimeError):
    """A scorer fails for every sample, in the same way every time: waiting would not repair it."""


class Unbounded(ScoreError):
    """A finite score so large that training on it would break the policy. Its group is rejected; asking again would not
    make it smaller."""


class Scorer(Protocol):
    """A function from images and prompts to scores. A class attribute `concurrent = True` (by default it is false)
    declares that `score` may be called while another call of it is running, as that of a client of an HTTP server
    usually may: then a slow call is hedged after `reward.hedge_s`.

    A class may also have a `check_prompt(prompt, params)`, a classmethod or staticmethod, which is called with every
    prompt of the recipe before anything is started. It returns what the prompt lacks, as a text for the user, or None;
    `params` are the constructor's keyword arguments, defaults included. It should import no torch: recipes are checked
    without.
    """

    name: str

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        """Scores a batch. Blocking, called in a worker thread, one call at a time unless the scorer is `concurrent`;
        but a call that takes longer than `reward.timeout_s` is given up, and the next may begin while it still runs.
        Calls over a socket should have a timeout of their own: a thread cannot be stopped, and a worker that collects
        too many is replaced.

        Images are uint8 (height, width, 3) and not to be written to. Return as many scores as images, all finite; raise
        any exception otherwise. The same image may come again: alone, if the batch it was in failed, and as a question
        whose answer is known, if other images fail.
        """


def is_concurrent(scorer: object) -> bool:
    return getattr(scorer, "concurrent", False) is True

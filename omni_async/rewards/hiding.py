"""What foreign scorer code raises, fit for ledgers and logs: without the scorer's credentials, and not a whole web page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omni_async.config.redact import redact_text
from omni_async.rewards.base import ScoreError, Scorer, is_concurrent
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np

_LONGEST = 2000


@contextmanager
def hiding(secrets: Iterable[str]) -> Iterator[None]:
    """An exception whose text would show one of `secrets`, a URL's password or more than 2000 characters becomes a `ScoreError` that does not."""
    try:
        yield
    except BaseException as error:  # sys.exit with a key in its text, too
        text = str(error)
        shown = redact_text(text[: 100 * _LONGEST], secrets)
        if len(shown) > _LONGEST:
            shown = f"{shown[:_LONGEST]}... ({len(text)} characters)"
        if shown == text:
            raise error from None  # what led to it may say more
        raise ScoreError(f"{type(error).__name__}: {shown}") from None


class Discreet:
    """The scorer, with what it raises made fit to be shown."""

    def __init__(self, scorer: Scorer, secrets: frozenset[str]) -> None:
        self.name = scorer.name
        self.concurrent = is_concurrent(scorer)
        self._scorer = scorer
        self._secrets = secrets

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        with hiding(self._secrets):
            return self._scorer.score(images, prompts)

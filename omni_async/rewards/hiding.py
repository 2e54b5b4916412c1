"""Makes exceptions of foreign scorer code fit for ledgers and logs: short, and without its credentials."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from omni_async.config.redact import redact_text
from omni_async.rewards.base import Outage, ScoreError, Scorer, is_concurrent
from omni_async.rewards.outages import is_outage
from omni_async.types import Prompt, Score

_LONGEST = 2000
# Characters of an encoded secret for one of its own, at most: `\\\\u0073`, `%2525E4%2525BD...`.
_WIDEST = 24


@contextmanager
def hiding(secrets: Iterable[str]) -> Iterator[None]:
    """Replace an exception whose text would show a secret, or is too long, by one of ours that does not.

    That is one of `secrets`, a URL's password or more than 2000 characters; it becomes an `Outage`, if it is one, or
    else a `ScoreError`."""
    try:
        yield
    except BaseException as error:  # sys.exit with a key in its text, too
        try:
            text = str(error)
        except Exception:  # noqa: BLE001 (`told` reports it)
            raise error from None
        shown = _cut(text, frozenset(secrets))
        if shown == text:
            raise error from None  # its causes may show more
        raise (Outage if is_outage(error) else ScoreError)(f"{type(error).__name__}: {shown}") from None


def _cut(text: str, secrets: frozenset[str]) -> str:
    """Return `text` without `secrets`, and without its end if it is too long."""
    margin = _WIDEST * max(map(len, secrets), default=0)
    looked_at = text[: 10 * _LONGEST + margin]
    shown = redact_text(looked_at, secrets)
    if len(looked_at) < len(text):
        shown = shown[: max(0, len(shown) - margin)]  # where a secret may have been cut through
    elif len(shown) <= _LONGEST:
        return shown
    return f"{shown[:_LONGEST]}... ({len(text)} characters)"


def told(error: BaseException) -> str:
    """Return the kind and the text of an exception; an exception is foreign code, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (nothing more can be shown)
        return f"{type(error).__name__}: an exception that cannot be shown"


class Discreet:
    """A scorer whose exceptions are made fit to be shown."""

    def __init__(self, scorer: Scorer, secrets: frozenset[str]) -> None:
        self.name = getattr(scorer, "name", type(scorer).__name__)  # not for messages: they show the recipe's name
        self.concurrent = is_concurrent(scorer)
        self.accepts = getattr(scorer, "accepts", None)
        self._scorer = scorer
        self._secrets = secrets

    def score(self, media: list[Any], prompts: list[Prompt], /) -> list[Score]:
        with hiding(self._secrets):
            return self._scorer.score(media, prompts)

"""Calls a scorer, which is foreign code: with a timeout, a second call if the first is slow, and safe exceptions.

A blocking scorer is called in threads; an asynchronous scorer is awaited. Waits for the scorer, at most `timeout_s` a
call; only its answer and timers unblock the wait. A call that is given up may run forever, so their number is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

from omni_async.aio.waiting import is_cancelled
from omni_async.config import reward as sections
from omni_async.media import Media
from omni_async.rewards.base import (
    Addresses,
    Outage,
    ScoreError,
    Scorer,
    concurrency_of,
    declared,
    is_async,
    require_scores,
    shown_to,
)
from omni_async.rewards.failures import call_discreetly, score_error
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score

MediaList = list[Media]
Prompts = list[Prompt]
Reply = list[Score] | ScoreError

# Calls given up but not ended, for each call that may run at once, up to `_AT_ONCE`. Their threads cannot be stopped.
_MOST_HANGING, _AT_ONCE = 8, 32
# The longest time for closing a scorer.
_CLOSING_S = 5.0


class ScorerHangs(RuntimeError):
    """Too many calls of a scorer have not returned, and only the end of the process stops their threads.

    The worker has to be replaced."""


class ScorerCalls:
    """The calls of one scorer. `is_down`: whether the scorer is known to be down."""

    def __init__(
        self,
        label: str,
        scorer: Scorer,
        secrets: Set[str],
        limits: sections.Scorer,
        config: sections.Reward,
        threads: Threads,
        is_down: Callable[[], bool],
    ) -> None:
        self.timeout_s = config.timeout_s if limits.timeout_s is None else limits.timeout_s
        hedge_s = config.hedge_s if limits.hedge_s is None else limits.hedge_s
        concurrency = concurrency_of(scorer)
        self._waits_s = [self.timeout_s] if hedge_s is None or concurrency == 1 else [hedge_s, self.timeout_s]
        self._most_hanging = _MOST_HANGING * min(_AT_ONCE, concurrency or _AT_ONCE)
        self._label, self._scorer, self._secrets = label, scorer, secrets
        self._is_async = is_async(scorer)  # once: attributes are foreign code, which may raise or block
        self._threads = threads
        self._is_down = is_down
        self._given_up: set[asyncio.Future[Reply]] = set()  # calls that nobody waits for and that have not ended

    @property
    def hanging(self) -> str:
        """Why no further call may begin, because too many have not returned; empty if one may."""
        if len(self._given_up) < self._most_hanging:
            return ""
        calls = f"{len(self._given_up)} calls have not returned"
        return f"scorer {self._label!r}: {calls}; let the scorer bound each call by a timeout"

    async def score(self, media: MediaList, prompts: Prompts) -> Reply:
        """Return the first answer of a call, or of a concurrent second call if the first is slow and may be hedged.

        Raises ScorerHangs if the scorer answers some calls, but has no threads for more."""
        if self.hanging:
            done, _ = await asyncio.wait(self._given_up, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if not self._is_down():
                    raise ScorerHangs(self.hanging)
                return Outage(self.hanging)
        loop = asyncio.get_running_loop()
        began, running = loop.time(), set[asyncio.Future[Reply]]()
        try:
            for wait_s in self._waits_s:
                running.add(self._begin(media, prompts))
                while True:
                    left_s = max(0.0, began + wait_s - loop.time())
                    done, running = await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                    if not done:
                        break
                    replies = [call.result() for call in done]
                    best = next((one for one in replies if not isinstance(one, ScoreError)), replies[0])
                    if not running or not isinstance(best, ScoreError):
                        return best
            return Outage(f"scorer {self._label!r}: no score within {self.timeout_s:g} s")
        finally:
            self._give_up(running)

    def _begin(self, media: MediaList, prompts: Prompts) -> asyncio.Future[Reply]:
        """Begin a call with copies of the lists, because a scorer may change them."""
        arguments = (self._label, self._scorer, self._secrets, [*media], [*prompts])
        if self._is_async:
            return asyncio.ensure_future(_awaited(*arguments))
        return self._threads.run(partial(_called, *arguments))

    def _give_up(self, calls: Iterable[asyncio.Future[Reply]]) -> None:
        """Cancel calls that nobody waits for. Calls in threads continue, and a foreign coroutine may continue, too."""
        for call in calls:
            if not call.done():
                self._given_up.add(call)
                call.add_done_callback(self._given_up.discard)
                if self._is_async:
                    call.cancel()

    def connect(self, addresses: Addresses) -> None:
        """Pass the scorer a function that returns the addresses of a role."""
        if (connect := declared(self._scorer).connect) is not None:
            call_discreetly(lambda: connect(addresses), self._secrets)

    async def close(self) -> None:
        """End idle threads, and let the scorer free its resources, for at most `_CLOSING_S`; ignore its exceptions."""
        close: Any = declared(self._scorer).close
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSING_S):
                if inspect.iscoroutinefunction(close):
                    await close()
                elif callable(close):
                    await asyncio.shield(self._threads.run(close))
        self._threads.close()


async def _awaited(label: str, scorer: Scorer, secrets: Set[str], media: MediaList, prompts: Prompts) -> Reply:
    """Await an asynchronous scorer. Raises nothing but its own cancellation."""
    try:
        found = await scorer.score(shown_to(label, scorer, media), prompts)
        return require_scores(label, found, prompts)
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        return score_error(label, RuntimeError("it was cancelled from within"), secrets)
    except BaseException as error:  # noqa: BLE001 (a scorer is foreign code)
        return score_error(label, error, secrets)


def _called(label: str, scorer: Scorer, secrets: Set[str], media: MediaList, prompts: Prompts) -> Reply:
    """Call a blocking scorer, in a thread.

    Raises nothing: a future does not accept every exception, and some (SystemExit) end an event loop."""
    try:
        return require_scores(label, scorer.score(shown_to(label, scorer, media), prompts), prompts)
    except BaseException as error:  # noqa: BLE001 (a scorer is foreign code)
        return score_error(label, error, secrets)

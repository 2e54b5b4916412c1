"""Counts a scorer's costs: its calls and their seconds, how long samples waited for its answers, and tokens.

A report takes the counts away, so each report covers the time since the last one. Counts of many workers are merged by
addition; quantiles are computed from all their times.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from omni_async.aio.clock import Clock
from omni_async.types import Answer, ScorerReport

# The most times in one report, thinned out if there are more, and the most that are kept for it (the newest).
_MOST_TIMES, _MOST_KEPT = 512, 4096
# Parts of a judge's scores that count the tokens it read and wrote.
TOKENS = ("prompt_tokens", "completion_tokens")


class ScorerStatistics:
    """The counts of one scorer in one worker, since they were taken last.

    `observe` is called after every call of the scorer with the label, the prompt of each sample, its start and its end,
    in the clock's seconds."""

    def __init__(self, label: str, clock: Clock, observe: Callable[[str, Sequence[int], float, float], None]) -> None:
        self._label = label
        self._clock = clock
        self._observe = observe
        self._in_flight = 0
        self._begin()

    def _begin(self) -> None:
        self._counts = Counter[str]()
        self._tokens = 0.0
        # Bounded, because a server's times are never taken.
        self._call_s: deque[float] = deque(maxlen=_MOST_KEPT)
        self._answer_s: deque[float] = deque(maxlen=_MOST_KEPT)

    @contextmanager
    def call(self, prompts: Sequence[int]) -> Iterator[None]:
        """Count a call of the scorer for samples of these prompts."""
        began = self._clock.now()
        try:
            yield
        finally:
            ended = self._clock.now()
            self._counts.update(calls=1, samples=len(prompts))
            self._call_s.append(ended - began)
            self._observe(self._label, prompts, began, ended)

    def timed(self, answer: asyncio.Future[Answer]) -> asyncio.Future[Answer]:
        """Record the seconds until a sample's answer, from now. Returns the same future."""
        began = self._clock.now()
        self._in_flight += 1

        def ended(_: asyncio.Future[Answer]) -> None:
            self._in_flight -= 1
            self._answer_s.append(self._clock.now() - began)

        answer.add_done_callback(ended)
        return answer

    def answered(self, answers: Iterable[Answer]) -> None:
        """Count the scorer's answers."""
        for answer in answers:
            self._counts.update(cached=answer.cached, failed=int(answer.score is None))
            if answer.score is not None and not answer.cached:
                self._tokens += sum(answer.score.parts.get(name, 0.0) for name in TOKENS)

    def take(self, queued: int) -> ScorerReport:
        """Return the counts and reset them. `queued`: samples that wait for a call."""
        report = ScorerReport(
            self._label,
            self._in_flight,
            queued,
            tokens=self._tokens,
            call_s=_thinned(self._call_s),
            answer_s=_thinned(self._answer_s),
            **self._counts,
        )
        self._begin()
        return report


def _thinned(times: Collection[float]) -> tuple[float, ...]:
    """Return the times, or evenly many of their quantiles."""
    if len(times) <= _MOST_TIMES:
        return tuple(times)
    ordered = sorted(times)
    return tuple(ordered[int((i + 0.5) / _MOST_TIMES * len(ordered))] for i in range(_MOST_TIMES))

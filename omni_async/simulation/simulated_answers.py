"""Simulates an engine that draws answers token by token, on the fast path of virtual time.

Answers join whenever there is room, at the next boundary between two tokens, and each ends after its own number of
tokens. Every answer in the engine takes a token at a time, so the engine counts tokens: an answer is an interval of
that count, and a version, too. Events are only the ends of answers, arrivals and swaps. Otherwise as `SimulatedEngine`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import pairwise

from omni_async.performance.profile import TokenTimes
from omni_async.simulation.simulated_engine import INSTANT_S, SimulatedEngine
from omni_async.simulation.world import World
from omni_async.types import SampleRequest, SampleResult, VersionSpans

# Last token, first token, the number of the answer, when it joined, its request.
_Running = tuple[int, int, int, float, SampleRequest]


class SimulatedAnswers(SimulatedEngine):
    """A rollout engine whose answers only take time. Arguments as `SimulatedEngine`."""

    def __init__(self, name: str, world: World, swapped: Callable[[], None], tokens: TokenTimes) -> None:
        super().__init__(name, world, swapped)
        self._tokens = tokens
        self._running: list[_Running] = []  # a heap
        self._joined = 0  # answers, ever
        self._drawn = 0  # tokens, ever
        self._boundary = 0.0  # when token number `_drawn` begins, or began
        self._token_s = 0.0
        self._versions: list[tuple[int, int]] = []  # (the first token, its version), oldest first
        self._plan = 0  # the newest event of an end; older ones are void
        self._busy_since = 0.0

    def _begin(self) -> None:
        """Let the first answers join an empty engine."""
        self._working = False
        self._boundary = self._busy_since = self._loop.now
        self._versions = [(self._drawn, self._version)]
        self._join()

    def _act(self) -> None:
        if not self._running:
            super()._act()
            return
        self._woken = False
        self._advance()
        if self._boundary <= self._loop.now + INSTANT_S:
            self._join()
        elif self._leased and self._room:
            self._loop.call_when(self._boundary, self._wake)

    @property
    def _room(self) -> int:
        most = self._rollout.max_batch if self._pending is None else min(self._rollout.max_batch, self._owed)
        return most - len(self._running)

    def _advance(self) -> None:
        """Count the tokens that are drawn by now, and go to the boundary that follows, or is now."""
        passed = (self._loop.now - self._boundary - INSTANT_S) / self._token_s if self._token_s > 0 else 0.0
        tokens = min(max(0, math.ceil(passed)), self._running[0][0] - self._drawn)
        self._drawn += tokens
        self._boundary += tokens * self._token_s

    def _join(self) -> None:
        """Let waiting answers join at the boundary, which is now, and plan the next end."""
        now = self._loop.now
        joining = [self._leased.popleft() for _ in range(max(0, min(len(self._leased), self._room)))]
        for request in joining:
            self._joined += 1
            last = self._drawn + self._tokens.length_of(request.seed)
            heapq.heappush(self._running, (last, self._drawn, self._joined, now, request))
        if joining:
            self._boundary += self._draws.seconds("prefill", len(joining) * self._world.bundle)
        self._plan_end()

    def _plan_end(self) -> None:
        self._plan += 1
        self._token_s = self._draws.seconds("token", len(self._running) * self._world.bundle)
        when = self._boundary + (self._running[0][0] - self._drawn) * self._token_s
        self._loop.call_when(max(self._loop.now, when), self._end, self._plan)

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        now = self._loop.now
        ended: list[SampleResult] = []
        self._boundary += (self._running[0][0] - self._drawn) * self._token_s
        self._drawn = self._running[0][0]
        while self._running and self._running[0][0] <= self._drawn:
            last, first, _, joined, request = heapq.heappop(self._running)
            spans = self._spans(first, last)
            trained = spans if request.kind == "train" else VersionSpans()
            done = (spans.first, trained, joined, now, self._nbytes, 0, 0, self._media_bytes)
            ended.append(SampleResult(request.sample_id, self.name, None, None, *done))
        self._boundary = max(self._boundary, self._paused_until)
        self._busy.add(self._busy_since, now)
        self._busy_since = now
        if not self._running and self._world.shared is not None:
            self._world.shared.leave()
        if self._running and self._boundary > now + INSTANT_S:  # `_act` plans only for answers that join
            self._plan_end()
        self._report(ended)

    def _spans(self, first: int, last: int) -> VersionSpans:
        """Return the versions that drew the tokens first, ..., last - 1."""
        ends = [*(begin for begin, _ in self._versions), last]
        counts = [min(stop, last) - max(start, first) for start, stop in pairwise(ends)]
        return VersionSpans(
            tuple((version, count) for (_, version), count in zip(self._versions, counts, strict=True) if count > 0)
        )

    def _swap_between(self, pause: float) -> float:
        now = self._loop.now
        if not self._running:
            self._paused_until = now + pause
            return self._paused_until
        self._advance()
        self._paused_until = self._boundary + pause
        if self._versions[-1][0] == self._drawn:
            self._versions.pop()
        oldest = min(first for _, first, *_ in self._running)
        begins = [*(first for first, _ in self._versions[1:]), self._drawn]
        kept = [one for one, following in zip(self._versions, begins, strict=True) if following > oldest]
        self._versions = [*kept, (self._drawn, self._version)]
        if self._drawn < self._running[0][0]:  # otherwise an answer ends before the pause
            self._boundary = self._paused_until
            self._plan_end()
        return self._paused_until

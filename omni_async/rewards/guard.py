"""Calls a scorer so that its failures affect nothing else: with a timeout, a hedge and a circuit breaker.

A blocking scorer is called in threads; an asynchronous scorer is awaited. `score` waits for the scorer, at most
`timeout_s` a call, and may be called again meanwhile. `recover` waits while the scorer is down: for the pauses between
attempts, and for the attempts. Only the scorer's answers and timers unblock it; to end it earlier, cancel it.

A failure is attributed to the sample or to the scorer. A failed batch is scored again one sample at a time, so that one
bad sample does not fail its neighbours. When a sample fails alone, the scorer is called with a sample that it has
scored before. If it answers, the fault is the sample's; otherwise the scorer is down, which counts against no sample. A
scorer that has never answered counts as down, until it answers for any sample.

Waiting does not help if the scorer itself is wrong. So it is tried with a synthetic sample before any is generated.
Until it has scored a generated sample, every failed sample is scored again at once. The same error text twice counts
against the scorer, unless the error is an outage.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from omni_async.aio.backoff import Backoff, Breaker, State
from omni_async.aio.clock import Clock
from omni_async.aio.waiting import is_cancelled
from omni_async.config.redact import one_line
from omni_async.config.schema import Reward, Scorer
from omni_async.media import Media
from omni_async.rewards.base import (
    Addresses,
    Outage,
    ScoreError,
    Unbounded,
    require_scores,
    shown_to,
)
from omni_async.rewards.failures import Discreet, is_outage, place_of, repeats, told
from omni_async.rewards.probe import Probe
from omni_async.rewards.threads import Threads
from omni_async.types import Fault, Prompt, Score

if TYPE_CHECKING:
    MediaList = list[Media]
    Prompts = list[Prompt]
    Answer = list[Score] | ScoreError

# The pause if samples are retried at once: a scorer that is down must not be called continuously.
_FIRST_PAUSE_S = 1.0
# Calls given up but not ended, for each call that may run at once, up to `_AT_ONCE`. Their threads cannot be stopped.
_MOST_HANGING, _AT_ONCE = 8, 32
# The longest time for closing a scorer.
_CLOSING_S = 5.0
# A reason goes into a line of the ledger and of the console, too short for a server's error page.
_LONGEST_REASON = 300


class ScorerHangs(RuntimeError):
    """Too many calls of a scorer have not returned, and only the end of the process stops their threads.

    The worker has to be replaced."""


class Failure(Struct, frozen=True):
    """The reason why there is no score, and its consequence: "outage" if the scorer is down.

    `wrong`: the scorer has scored no generated sample yet, and failed twice with the same text."""

    reason: str
    fault: Fault = "retry"
    wrong: bool = False


class GuardedScorer:
    """A scorer with timeout, hedge and circuit breaker.

    `report` gets a sentence when the scorer is down for longer than a first pause, when it is given up, and when it
    answers again. `probe`: a synthetic sample to try the scorer with. Without a probe, no error counts as a mistake of
    the scorer itself."""

    def __init__(
        self,
        label: str,
        scorer: Discreet,
        config: Reward,
        limits: Scorer,
        clock: Clock,
        threads: Threads,
        report: Callable[[str], Awaitable[None]],
        probe: Probe | None = None,
    ) -> None:
        self._label = label
        self._scorer = scorer
        self._config = config
        self._timeout_s = config.timeout_s if limits.timeout_s is None else limits.timeout_s
        hedge_s = config.hedge_s if limits.hedge_s is None else limits.hedge_s
        self._most_hanging = _MOST_HANGING * min(_AT_ONCE, scorer.concurrency or _AT_ONCE)
        self._hedge_s = None if scorer.concurrency == 1 else hedge_s
        self._threads = threads
        self._report = report
        self._breaker = Breaker(
            clock,
            pauses=Backoff(config.backoff_s or _FIRST_PAUSE_S, config.backoff_max_s),
            give_up_s=config.outage_s,
        )
        self._probe = probe
        self._doubted = probe is not None  # until the scorer has scored a generated sample
        self._known: tuple[MediaList, Prompts] | None = None  # a sample that the scorer could score
        self._asking_known = asyncio.Lock()  # so that samples that fail together share one call with the known sample
        self._given_up: set[asyncio.Future[Answer]] = set()  # calls that nobody waits for and that have not ended
        self.probed: list[Score] = []  # its scores of the probe
        self.probe_s = 0.0  # seconds per sample of the probe
        self._clock = clock
        self._reported_down = False
        self._reported_given_up = False

    @property
    def down(self) -> bool:
        return self._breaker.state is not State.CLOSED

    @property
    def is_closed_off(self) -> bool:
        """Whether it is down, and a sample would not reach it."""
        return self._breaker.state is State.OPEN

    @property
    def outage(self) -> str:
        """The scorer's last error when it went down."""
        return self._breaker.reason

    async def try_out(self) -> str | None:
        """Score the probe.

        Returns why the scorer is wrong, or None. An unreachable scorer counts as down from then on."""
        if self._probe is None:
            return None
        media, prompts = self._probe.media, self._probe.prompts
        began = self._clock.now()
        answer, wrong = await self._ask_twice(media, prompts)
        if isinstance(answer, ScoreError):
            self._breaker.trip(str(answer))
            return self._probe.failed(str(answer)) if wrong else None
        self.probed = answer
        self.probe_s = (self._clock.now() - began) / len(media)
        self._known = media[:1], prompts[:1]
        return None

    def answered(self, media: Media, prompt: Prompt) -> None:
        """Remember a sample with a cached score: the scorer can score it, so it may serve as the known sample."""
        if self._known is None:
            self._known = [media.copy()], [prompt]  # a copy, because the original is the object store's

    async def _ask_twice(self, media: MediaList, prompts: Prompts) -> tuple[Answer, bool]:
        """Return the answer, and whether two calls failed in the same way; a failed first call is repeated once."""
        first = await self._call(media, prompts)
        if not isinstance(first, ScoreError) or isinstance(first, Outage):
            return first, False
        answer = await self._call(media, prompts)
        return answer, isinstance(answer, ScoreError) and repeats(answer, first)

    async def score(self, media: MediaList, prompts: Prompts) -> list[Score | Failure]:
        """Return one outcome per sample.

        While the scorer is down, this call is an attempt if `recover` allowed one. Raises ScorerHangs."""
        outcomes = await self._score(media, prompts)
        reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Failure)]
        if reasons and self._breaker.state is State.HALF_OPEN:
            await self._missed(reasons[0])
        return [self._judged(outcome) if isinstance(outcome, Failure) else outcome for outcome in outcomes]

    def _judged(self, failure: Failure) -> Failure:
        """Return the failure as the sample's own if the scorer has answered since or is given up."""
        if failure.fault == "reject":
            return failure
        if not self.down:
            return replace(failure, fault="retry")
        if not self._breaker.given_up:
            return failure
        reason = self._unnamed(self._breaker.reason)
        return Failure(f"scorer {self._label!r} has been failing for {self._breaker.open_s:.0f} s: {reason}")

    def _unnamed(self, reason: str) -> str:
        """Return a reason without the scorer's name, for a sentence that already has it."""
        return reason.removeprefix(f"scorer {self._label!r}").lstrip(":, ")

    async def _score(self, media: MediaList, prompts: Prompts) -> list[Score | Failure]:
        if self._breaker.state is State.OPEN:
            return [self._failure(self._breaker.reason)] * len(media)
        if self._doubted and len(media) == 1:
            answer, wrong = await self._ask_twice(media, prompts)
        else:
            answer, wrong = await self._call(media, prompts), False
        if not isinstance(answer, ScoreError):
            if self._known is None or self._doubted:
                self._known = [media[0].copy()], prompts[:1]  # a copy, because the original is the object store's
            self._doubted = False
            await self._is_back()
            return [*answer]
        if len(media) > 1:
            return await self._one_by_one(media, prompts, answer)
        if isinstance(answer, Unbounded):  # the scorer answered, and would return the same again
            await self._is_back()
            return [Failure(str(answer), "reject")]
        async with self._asking_known:
            if not self.down and (self._known is None or isinstance(await self._call(*self._known), ScoreError)):
                self._breaker.trip(str(answer))
        return [self._failure(str(answer), wrong)]

    def _failure(self, reason: str, wrong: bool = False) -> Failure:
        """Return a sample's failure; while the scorer is down, the failure is the scorer's."""
        return Failure(reason, "outage" if self.down else "retry", wrong)

    async def _one_by_one(self, media: MediaList, prompts: Prompts, error: ScoreError) -> list[Score | Failure]:
        """Score samples one by one.

        While the scorer is down, stop after the time of one time-out, because it may hang with each sample."""
        outcomes: list[Score | Failure] = []
        loop = asyncio.get_running_loop()
        began = loop.time()
        for one, prompt in zip(media, prompts, strict=True):
            if self.down and loop.time() - began >= self._timeout_s:
                outcomes.append(self._failure(str(error)))
            else:
                outcomes += await self._score([one], [prompt])
        return outcomes

    async def _missed(self, reason: str) -> None:
        self._breaker.missed(reason)
        if not self._reported_down:
            self._reported_down = True
            await self._report(f"warning: scorer {self._label!r} fails ({self._unnamed(reason)}); its samples wait")

    async def _is_back(self) -> None:
        seconds, reported = self._breaker.open_s, self._reported_down
        self._breaker.succeeded()
        self._reported_down = self._reported_given_up = False
        if reported:
            await self._report(f"scorer {self._label!r} answers again after {seconds:.0f} s")

    async def recover(self) -> None:
        """Return when samples may be sent.

        At that point the scorer answers, or the samples serve as an attempt, or the scorer is given up and they should
        fail.

        Raises ScorerHangs."""
        breaker = self._breaker
        while breaker.state is State.OPEN:
            if breaker.given_up:
                await self._give_up()
                if not breaker.due:
                    if self._known is not None:
                        await asyncio.sleep(_FIRST_PAUSE_S)  # another worker's scorer may answer: leave it the samples
                    return
            else:
                await asyncio.sleep(breaker.pause_s)
            breaker.try_again()
            if self._known is None:
                return
            answer = await self._call(*self._known)
            if isinstance(answer, ScoreError):
                await self._missed(str(answer))
            else:
                await self._is_back()

    async def _give_up(self) -> None:
        if len(self._given_up) >= self._most_hanging:
            raise ScorerHangs(f"{self._hanging()}, and reward.outage_s = {self._config.outage_s:g} is over")
        if not self._reported_given_up:
            self._reported_down = self._reported_given_up = True
            seconds = f"{self._breaker.open_s:.0f} s"
            await self._report(f"warning: scorer {self._label!r} has been failing for {seconds}; its samples fail now")

    def _hanging(self) -> str:
        calls = f"{len(self._given_up)} calls have not returned"
        return f"scorer {self._label!r}: {calls}; give its calls a timeout of their own"

    async def _call(self, media: MediaList, prompts: Prompts) -> Answer:
        """Return the first answer of a call, or of a concurrent second call if the first is slow and may be hedged."""
        if len(self._given_up) >= self._most_hanging and not await self._one_returns():
            if not self.down:
                raise ScorerHangs(self._hanging())  # the scorer answers some calls, but has no threads for more
            return Outage(self._hanging())
        loop = asyncio.get_running_loop()
        began = loop.time()
        waits = [began + self._timeout_s]
        if self._hedge_s is not None:
            waits.insert(0, began + self._hedge_s)
        running = {self._begin(media, prompts)}
        try:
            while True:
                done, running = await asyncio.wait(
                    running, timeout=max(0.0, waits[0] - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                answers = [call.result() for call in done]
                for answer in answers:
                    if not isinstance(answer, ScoreError):
                        return answer
                if answers and not running:
                    return answers[0]
                if not answers:
                    waits.pop(0)
                    if not waits:
                        return Outage(f"scorer {self._label!r}: no score within {self._timeout_s:g} s")
                    running.add(self._begin(media, prompts))
        finally:
            self._give_up_calls(running)

    def _begin(self, media: MediaList, prompts: Prompts) -> asyncio.Future[Answer]:
        """Begin a call with copies of the lists, because a scorer may change them."""
        if self._scorer.is_async:
            return asyncio.ensure_future(_awaited(self._label, self._scorer, [*media], [*prompts]))
        return self._threads.run(partial(_answer, self._label, self._scorer, [*media], [*prompts]))

    def _give_up_calls(self, calls: Iterable[asyncio.Future[Answer]]) -> None:
        """Cancel calls that nobody waits for. Calls in threads continue, and a foreign coroutine may continue, too."""
        for call in calls:
            if not call.done():
                self._given_up.add(call)
                call.add_done_callback(self._given_up.discard)
                if self._scorer.is_async:
                    call.cancel()

    async def _one_returns(self) -> bool:
        """Return whether one of the calls that were given up ends within the time of one time-out."""
        done, _ = await asyncio.wait([*self._given_up], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def connect(self, addresses: Addresses) -> None:
        """Pass the scorer a function that returns the addresses of a role."""
        self._scorer.connect(addresses)

    async def close(self) -> None:
        """End idle threads, and let the scorer free its resources, for at most `_CLOSING_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_S):
                await self._scorer.close(lambda close: asyncio.shield(self._threads.run(close)))
        self._threads.close()


async def _awaited(label: str, scorer: Discreet, media: MediaList, prompts: Prompts) -> Answer:
    """Await an asynchronous scorer. Raises nothing but its own cancellation."""
    try:
        return require_scores(label, await scorer.ask(shown_to(label, scorer, media), prompts), prompts)
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        return _failed(label, RuntimeError("it was cancelled from within"))
    except BaseException as error:  # noqa: BLE001 (a scorer is foreign code)
        return _failed(label, error)


def _answer(label: str, scorer: Discreet, media: MediaList, prompts: Prompts) -> Answer:
    """Call the scorer, in a thread.

    Raises nothing: a future does not accept every exception, and some (SystemExit) end an event loop."""
    try:
        return require_scores(label, scorer.score(shown_to(label, scorer, media), prompts), prompts)
    except BaseException as error:  # noqa: BLE001 (a scorer is foreign code)
        return _failed(label, error)


def _failed(label: str, error: BaseException) -> ScoreError:
    text = " ".join((str(error) if isinstance(error, ScoreError) else told(error)).split())
    if not text.startswith(f"scorer {label!r}"):
        text = f"scorer {label!r}: {text}"
    text, place = one_line(text), place_of(error)
    if len(place) > _LONGEST_REASON // 2:
        place = ""  # the error matters more than its place
    longest = _LONGEST_REASON - len(place)
    shown = text if len(text) <= longest else f"{text[: longest - 3]}..."
    kind = Outage if is_outage(error) else Unbounded if isinstance(error, Unbounded) else ScoreError
    return kind(shown + place)

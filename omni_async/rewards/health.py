"""In a reward worker: attributes a failure to the sample or to the scorer, which may be down or wrong.

`ScorerHealth.attribute` receives the reply to every batch; it calls the scorer again if that shows whose
fault a failure is. `recover` waits while the scorer is down: for the pauses between attempts, and for the attempts.
Only the scorer's answers and timers unblock them; to end them earlier, cancel them.

A failed batch is scored again one sample at a time, so that one bad sample does not fail its neighbours. When a sample
fails alone, the scorer is called with a sample that it has scored before. If it answers, the fault is the sample's;
otherwise the scorer is down, which counts against no sample. A scorer that has never answered counts as down, until it
answers for any sample.

Waiting does not help if the scorer itself is wrong. So it is tried with a synthetic sample before any is generated.
Until it has scored a generated sample, every failed sample is scored again at once. The same error text twice counts
against the scorer, unless the error is an outage.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Set
from typing import Literal

from msgspec.structs import replace

from omni_async.aio.backoff import Backoff, Breaker, State
from omni_async.aio.clock import Clock
from omni_async.config import reward as sections
from omni_async.media import Media
from omni_async.rewards.base import Outage, ScoreError, Scorer, Unbounded
from omni_async.rewards.calls import MediaList, Prompts, Reply, ScorerCalls, ScorerHangs
from omni_async.rewards.probe import Probe
from omni_async.rewards.threads import Threads
from omni_async.types import Answer, Prompt, Score

# The pause if samples are retried at once: a scorer that is down must not be called continuously.
_FIRST_PAUSE_S = 1.0
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class ScorerHealth:
    """The state of a scorer, and its `calls`.

    `report` gets a sentence when the scorer is down for longer than a first pause, when it is given up, and when it
    answers again. `is_tried`: a synthetic sample is tried. Otherwise no error counts as a mistake of the scorer."""

    def __init__(
        self,
        label: str,
        scorer: Scorer,
        secrets: Set[str],
        limits: sections.Scorer,
        config: sections.Reward,
        clock: Clock,
        threads: Threads,
        report: Callable[[str], Awaitable[None]],
        is_tried: bool,
    ) -> None:
        self.calls = ScorerCalls(label, scorer, secrets, limits, config, threads, lambda: self.down)
        self.probed: list[Score] = []  # its scores of the probe
        self.probe_s = 0.0  # seconds per sample of the probe
        self._label = label
        self._clock = clock
        self._report = report
        self._outage_s = config.outage_s
        pauses = Backoff(config.backoff_s or _FIRST_PAUSE_S, config.backoff_max_s)
        self._breaker = Breaker(clock, pauses=pauses, give_up_s=config.outage_s)
        self._doubted = is_tried  # until the scorer has scored a generated sample
        self._known: tuple[MediaList, Prompts] | None = None  # a sample that the scorer could score
        self._calling_known = asyncio.Lock()  # so that samples that fail together share one call with the known sample
        self._reported: Literal["", "down", "given up"] = ""

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

    async def try_out(self, probe: Probe) -> str | None:
        """Score a synthetic sample.

        Returns why the scorer is wrong, or None. An unreachable scorer counts as down from then on."""
        media, prompts = probe.media, probe.prompts
        began = self._clock.now()
        reply, wrong = await self._repeated(await self.calls.score(media, prompts), media, prompts)
        if isinstance(reply, ScoreError):
            self._breaker.trip(str(reply))
            return probe.failed(str(reply)) if wrong else None
        self.probed = reply
        self.probe_s = (self._clock.now() - began) / len(media)
        self._known = media[:1], prompts[:1]
        return None

    def answered(self, media: Media, prompt: Prompt) -> None:
        """Remember a sample with a cached score: the scorer can score it, so it may serve as the known sample."""
        if self._known is None:
            self._known = [media.copy()], [prompt]  # a copy, because the original is the object store's

    async def attribute(self, reply: Reply | None, media: MediaList, prompts: Prompts) -> list[Answer]:
        """Return the answer for each sample of a call from the scorer's reply; None if it is closed off and not called.

        While the scorer is down, the call is an attempt if `recover` allowed one. Raises ScorerHangs."""
        answers = await self._answers(reply, media, prompts)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors and self._breaker.state is State.HALF_OPEN:
            await self._missed(errors[0])
        return [answer if answer.error is None else self._final(answer) for answer in answers]

    async def _answers(self, reply: Reply | None, media: MediaList, prompts: Prompts) -> list[Answer]:
        if reply is None:
            return [self._failure(self.outage)] * len(media)
        wrong = False
        if self._doubted and len(media) == 1:
            reply, wrong = await self._repeated(reply, media, prompts)
        if not isinstance(reply, ScoreError):
            if self._known is None or self._doubted:
                self._known = [media[0].copy()], prompts[:1]  # a copy, because the original is the object store's
            self._doubted = False
            await self._is_back()
            return [Answer(score=score) for score in reply]
        if len(media) > 1:
            return await self._one_by_one(media, prompts, str(reply))
        if isinstance(reply, Unbounded):  # the scorer answered, and would return the same again
            await self._is_back()
            return [Answer(error=str(reply), fault="reject")]
        async with self._calling_known:
            if not self.down and (self._known is None or isinstance(await self.calls.score(*self._known), ScoreError)):
                self._breaker.trip(str(reply))
        return [self._failure(str(reply), wrong)]

    async def _repeated(self, first: Reply, media: MediaList, prompts: Prompts) -> tuple[Reply, bool]:
        """Repeat a call once if it failed, but not for an outage. Return the last reply, and whether both failed alike.

        Then time does not repair the failure. Addresses of objects in its text may differ."""
        if not isinstance(first, ScoreError) or isinstance(first, Outage):
            return first, False
        reply = await self.calls.score(media, prompts)
        if not isinstance(reply, ScoreError) or isinstance(reply, Outage):
            return reply, False
        return reply, _ADDRESS.sub("0x", str(reply)) == _ADDRESS.sub("0x", str(first))

    async def _one_by_one(self, media: MediaList, prompts: Prompts, error: str) -> list[Answer]:
        """Score the samples of a failed batch one by one.

        While the scorer is down, stop after the time of one time-out, because it may hang with each sample."""
        answers: list[Answer] = []
        loop = asyncio.get_running_loop()
        began = loop.time()
        for one, prompt in zip(media, prompts, strict=True):
            if self.down and loop.time() - began >= self.calls.timeout_s:
                answers.append(self._failure(error))
            else:
                reply = None if self.is_closed_off else await self.calls.score([one], [prompt])
                answers += await self._answers(reply, [one], [prompt])
        return answers

    def _failure(self, error: str, wrong: bool = False) -> Answer:
        """Return a sample's failure; while the scorer is down, the failure is the scorer's."""
        return Answer(error=error, fault="outage" if self.down else "retry", wrong=wrong)

    def _final(self, failure: Answer) -> Answer:
        """Return the failure as the sample's own if the scorer has answered since or is given up."""
        if failure.fault == "reject":
            return failure
        if not self.down:
            return replace(failure, fault="retry")
        if not self._breaker.given_up:
            return failure
        reason = self._unnamed(self.outage)
        return Answer(error=f"scorer {self._label!r} has been failing for {self._breaker.open_s:.0f} s: {reason}")

    def _unnamed(self, reason: str) -> str:
        """Return a reason without the scorer's name, for a sentence that already has it."""
        return reason.removeprefix(f"scorer {self._label!r}").lstrip(":, ")

    async def _missed(self, reason: str) -> None:
        self._breaker.missed(reason)
        if not self._reported:
            self._reported = "down"
            await self._report(f"warning: scorer {self._label!r} fails ({self._unnamed(reason)}); its samples wait")

    async def _is_back(self) -> None:
        seconds, reported = self._breaker.open_s, self._reported
        self._breaker.succeeded()
        self._reported = ""
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
            reply = await self.calls.score(*self._known)
            if isinstance(reply, ScoreError):
                await self._missed(str(reply))
            else:
                await self._is_back()

    async def _give_up(self) -> None:
        if self.calls.hanging:
            raise ScorerHangs(f"{self.calls.hanging}, and reward.outage_s = {self._outage_s:g} is over")
        if self._reported != "given up":
            self._reported = "given up"
            seconds = f"{self._breaker.open_s:.0f} s"
            await self._report(f"warning: scorer {self._label!r} has been failing for {seconds}; its samples fail now")

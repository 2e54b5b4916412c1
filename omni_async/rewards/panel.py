"""Calls the scorers of a reward for a sample concurrently, and combines their answers.

Every scorer has its own queue and forms batches from it; none waits for another. Waits for the scorers
(`omni_async.rewards.calls`), for the file of cached answers, if any, and for the pauses between attempts of optional
scorers. `omni_async.rewards.health` decides whose fault a failure is.

Answers of deterministic scorers are looked up before the scorers are called. If a scorer fails for a sample, the other
scorers' answers are kept for a while, so that a retry does not call them again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import nullcontext

from omni_async.aio.backoff import Backoff
from omni_async.aio.batches import Batcher, Load, room_of
from omni_async.aio.clock import Clock
from omni_async.aio.waiting import cancel
from omni_async.config import reward as sections
from omni_async.control.reward_formula import NoReward
from omni_async.media import Media
from omni_async.rewards.base import Addresses, ScoreError, concurrency_of, require_media
from omni_async.rewards.cache import ScoreCache
from omni_async.rewards.health import ScorerHealth
from omni_async.rewards.loaded import LoadedReward, LoadedScorer
from omni_async.rewards.probe import Probe
from omni_async.rewards.statistics import ScorerStatistics
from omni_async.rewards.threads import Threads
from omni_async.types import Answer, Prompt, ScorerReport

# Samples whose answers so far are kept for a retry.
_MOST_UNFINISHED = 1024
# Precedence of several failures: first failures that a retry would not change, then failures that are not the sample's.
_ORDER = {"reject": 0, "outage": 1, "replace": 2, "retry": 3}

Sample = tuple[Media, Prompt]


class PanelScorer:
    """One scorer of a reward, with its queue, its health and its answers in the `cache`."""

    def __init__(
        self,
        label: str,
        loaded: LoadedScorer,
        limits: sections.Scorer,
        config: sections.Reward,
        health: ScorerHealth,
        statistics: ScorerStatistics,
        cache: ScoreCache,
    ) -> None:
        self.label, self.health, self.statistics = label, health, statistics
        self.is_optional = limits.on_failure == "leave_out"
        batch = config.batch if limits.batch is None else limits.batch
        self.load = Load(batch, concurrency_of(loaded.scorer) if limits.concurrency is None else limits.concurrency)
        self._batcher = Batcher[Sample, Answer](self._serve, self.load, limits.latency_s)
        self._cache = cache
        self._identity = loaded.identity if config.cache.enabled else None
        self._pauses = Backoff(config.backoff_s, config.backoff_max_s)
        self._retries = config.retries
        self._recovering: asyncio.Task[None] | None = None

    def score(self, media: Media, prompt: Prompt) -> Awaitable[Answer | None]:
        """Queue a sample now, and return its future answer.

        The answer is None if the scorer is left out: after all retries, or at once while it is down."""
        answer = self._begin(media, prompt)
        return answer if answer is not None and not self.is_optional else self._unless_left_out(answer, media, prompt)

    def _begin(self, media: Media, prompt: Prompt) -> asyncio.Future[Answer] | None:
        if self.is_optional and self.health.is_closed_off:
            return None
        return self.statistics.timed(self._batcher.submit((media, prompt)))

    async def _unless_left_out(
        self, answer: asyncio.Future[Answer] | None, media: Media, prompt: Prompt
    ) -> Answer | None:
        attempts = 0
        while answer is not None:
            found = await answer
            if found.score is not None:
                return found
            attempts += 1
            if found.fault != "retry" or attempts > self._retries:
                break
            await asyncio.sleep(self._pauses.pause_s(attempts))
            answer = self._begin(media, prompt)
        if self.health.down and (self._recovering is None or self._recovering.done()):
            # In the background; if the scorer has never answered, samples have to show whether it does.
            self._recovering = asyncio.create_task(self.health.recover())
        return None

    async def try_out(self, probe: Probe | None) -> str | None:
        """Let the scorer score the probe, unless its answers are cached. Returns why the scorer is wrong, or None."""
        if probe is None:
            return None
        keys, known = await self._cache.find(self._identity, probe.media, probe.prompts)
        if None not in known:
            self.health.answered(probe.media[0], probe.prompts[0])
            return None
        wrong = await self.health.try_out(probe)
        if self.health.probed:
            await self._cache.keep(keys, self.health.probed)
        return wrong

    async def _serve(self, batch: list[Sample]) -> list[Answer]:
        """Return the answers to a batch, from the cache or the scorer. Raises ScorerHangs."""
        media, prompts = [one for one, _ in batch], [prompt for _, prompt in batch]
        keys, known = await self._cache.find(self._identity, media, prompts)
        answers = {i: Answer(score=score, cached=1) for i, score in enumerate(known) if score is not None}
        for i in answers:
            self.health.answered(media[i], prompts[i])
        if left := [i for i in range(len(batch)) if i not in answers]:
            media, prompts = [media[i] for i in left], [prompts[i] for i in left]
            # A scorer that is down is not called.
            with self.statistics.call([one.index for one in prompts]) if not self.health.down else nullcontext():
                reply = None if self.health.is_closed_off else await self.health.calls.score(media, prompts)
                fresh = await self.health.attribute(reply, media, prompts)
            answers |= zip(left, fresh, strict=True)
            await self._cache.keep([keys[i] for i in left], [one.score for one in fresh])
        self.statistics.answered(answers.values())
        return [answers[i] for i in range(len(batch))]

    async def close(self) -> None:
        await cancel([] if self._recovering is None else [self._recovering])
        await self._batcher.close()
        await self.health.calls.close()


class Panel:
    """The scorers of a reward; `async with` closes them.

    `report` gets messages about them for the user. `probe`: the sample that they are tried with before any sample is
    generated. `observe` is called after every call of a scorer: its label, the prompt of each sample, start and end.
    `addresses` returns the addresses of a role of the run, for scorers that have `connect`."""

    def __init__(
        self,
        name: str,
        reward: LoadedReward,
        config: sections.Reward,
        clock: Clock,
        report: Callable[[str], Awaitable[None]],
        threads: Callable[[str], Threads] = Threads,
        probe: Probe | None = None,
        observe: Callable[[str, Sequence[int], float, float], None] = lambda *_: None,
        addresses: Addresses | None = None,
    ) -> None:
        self._formula = reward.formula
        self._probe = probe
        self._cache = cache = ScoreCache(config.cache, threads(f"{name}/cache"), report)

        def scorer_of(label: str, loaded: LoadedScorer, limits: sections.Scorer) -> PanelScorer:
            of_scorer = threads(f"{name}/{label}")
            scorer, secrets = loaded.scorer, loaded.secrets
            health = ScorerHealth(label, scorer, secrets, limits, config, clock, of_scorer, report, probe is not None)
            if addresses is not None:
                health.calls.connect(addresses)
            return PanelScorer(label, loaded, limits, config, health, ScorerStatistics(label, clock, observe), cache)

        self.scorers = [*map(scorer_of, reward.formula.labels, reward.scorers, reward.formula.scorers)]
        self._unfinished: OrderedDict[Hashable, dict[int, Answer]] = OrderedDict()

    async def try_out(self) -> str | None:
        """Let every scorer score the probe. Returns why one is wrong, or None."""
        found = await asyncio.gather(*(scorer.try_out(self._probe) for scorer in self.scorers))
        return next(filter(None, found), None)

    def room(self, coming: int = 0) -> int:
        """Return how many more samples to accept, see `room_of`; at most one, as an attempt, while `down`."""
        room = room_of([scorer.load for scorer in self.scorers], coming)
        return min(room, 1) if self.down else room

    @property
    def down(self) -> bool:
        """Whether samples should wait for `recover`: a scorer that cannot be left out is down."""
        return any(scorer.health.down for scorer in self.scorers if not scorer.is_optional)

    @property
    def outages(self) -> list[str]:
        """The errors of the scorers that are down."""
        return [scorer.health.outage for scorer in self.scorers if scorer.health.down]

    async def recover(self) -> None:
        """Return when samples may be sent to every scorer that cannot be left out, even if they will fail."""
        await asyncio.gather(*(scorer.health.recover() for scorer in self.scorers if not scorer.is_optional))

    async def score(self, media: Media, prompt: Prompt, key: Hashable = None, *, whole: bool = False) -> Answer:
        """Score one sample.

        Args:
            media: the sample's.
            prompt: the sample's; it decides which scorers are called.
            key: identifies the sample if it is retried after a failure; None if it is not retried.
            whole: the score is compared with samples outside its group, so a score that lacks a scorer is a failure.

        Raises:
            ScorerHangs: too many calls of a scorer do not return."""
        try:
            require_media([media], [prompt])
        except ScoreError as error:
            return Answer(error=str(error))
        answers = self._unfinished.pop(key, {})
        numbers = [number for number in self._formula.asked(prompt) if number not in answers]
        found = await asyncio.gather(*(self.scorers[number].score(media, prompt) for number in numbers))
        answers = answers | {number: one for number, one in zip(numbers, found, strict=True) if one is not None}
        scores = {number: one.score for number, one in answers.items() if one.score is not None}
        if failures := [one for one in answers.values() if one.score is None]:
            if key is not None and scores:
                self._unfinished[key] = {number: answers[number] for number in scores}
                if len(self._unfinished) > _MOST_UNFINISHED:
                    self._unfinished.popitem(last=False)
            return min(failures, key=lambda one: _ORDER[one.fault])
        if not scores:
            return Answer(error="every scorer that is asked for it has failed and may be left out")
        try:
            score = self._formula.combine(scores)
        except NoReward as error:
            return Answer(error=str(error), fault="reject")
        if whole and (absent := self._formula.unanswered(prompt, score)):
            return Answer(error=f"no answer of {', '.join(absent)}")
        return Answer(score=score, cached=sum(one.cached for one in answers.values()))

    def take_reports(self) -> list[ScorerReport]:
        """Return each scorer's statistics since the last call."""
        return [scorer.statistics.take(scorer.load.waiting) for scorer in self.scorers]

    async def __aenter__(self) -> Panel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel pending work, and let the scorers free their resources."""
        await asyncio.gather(*(scorer.close() for scorer in self.scorers))
        self._cache.close()

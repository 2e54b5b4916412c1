"""Calls the scorers of a reward for a sample concurrently, and combines their answers.

Every scorer has its own queue and forms batches from it; none waits for another. Waits for the scorers, each behind its
guard (`omni_async.rewards.guard`), for the file of cached answers, if any, and for the pauses between attempts of
optional scorers. Answers of deterministic scorers are looked up before the scorers are called.

If a scorer fails for a sample, the other scorers' answers are kept for a while, so that a retry does not call them
again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from omni_async.aio.backoff import Backoff
from omni_async.aio.batches import Batcher, Load
from omni_async.aio.clock import Clock
from omni_async.aio.waiting import cancel
from omni_async.config.schema import Reward
from omni_async.control.reward_formula import NoReward
from omni_async.media import Media
from omni_async.rewards.base import Addresses, ScoreError, require_media
from omni_async.rewards.cache import ScoreCache
from omni_async.rewards.guard import Failure, GuardedScorer
from omni_async.rewards.kept_answers import KeptAnswers, Keys
from omni_async.rewards.loaded import LoadedReward, Member
from omni_async.rewards.probe import Probe
from omni_async.rewards.statistics import ScorerStatistics
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score, ScorerReport

# Samples whose answers so far are kept for a retry.
_MOST_UNFINISHED = 1024
# Precedence of several failures: first failures that a retry would not change, then failures that are not the sample's.
_ORDER = {"reject": 0, "outage": 1, "replace": 2, "retry": 3}

Sample = tuple[Media, Prompt]


class Answer(NamedTuple):
    """One scorer's outcome for a sample. `kept`: it was in the cache."""

    outcome: Score | Failure
    kept: bool = False


class Result(NamedTuple):
    """A sample's score, or why it has none. `cached`: how many of the scorers' answers came from the cache."""

    outcome: Score | Failure
    cached: int = 0


class AskedScorer:
    """One scorer of a reward, with its queue, its guard and its cached answers."""

    def __init__(
        self,
        member: Member,
        config: Reward,
        guard: GuardedScorer,
        kept: KeptAnswers | None,
        statistics: ScorerStatistics,
    ) -> None:
        limits = member.config
        batch = config.batch if limits.batch is None else limits.batch
        allowed = member.scorer.concurrency if limits.concurrency is None else limits.concurrency
        self.label = member.label
        self.is_optional = limits.on_failure == "leave_out"
        self.guard = guard
        self.statistics = statistics
        self._kept = kept
        self._batcher = Batcher[Sample, Answer](self._answer, Load(batch, allowed), limits.latency_s)
        self._pauses = Backoff(config.backoff_s, config.backoff_max_s)
        self._retries = config.retries
        self._recovering: asyncio.Task[None] | None = None

    @property
    def load(self) -> Load:
        return self._batcher.load

    def score(self, media: Media, prompt: Prompt) -> Awaitable[Answer | None]:
        """Queue a sample now, and return its future answer.

        The answer is None if the scorer is left out: after all retries, or at once while it is down."""
        return self._answered(self._begin(media, prompt), media, prompt)

    def _begin(self, media: Media, prompt: Prompt) -> asyncio.Future[Answer] | None:
        if self.is_optional and self.guard.is_closed_off:
            return None
        return self._batcher.submit((media, prompt))

    async def _answered(self, answer: asyncio.Future[Answer] | None, media: Media, prompt: Prompt) -> Answer | None:
        attempts = 0
        while answer is not None:
            found = await self.statistics.timed(answer)
            if isinstance(found.outcome, Score) or not self.is_optional:
                return found
            attempts += 1
            if found.outcome.fault != "retry" or attempts > self._retries:
                break
            await asyncio.sleep(self._pauses.pause_s(attempts))
            answer = self._begin(media, prompt)
        if self.guard.down:
            self._recover()
        return None

    def _recover(self) -> None:
        """Wait in a background task until an optional scorer answers again."""
        if self._recovering is None or self._recovering.done():
            self._recovering = asyncio.create_task(self._recovered())

    async def _recovered(self) -> None:
        await self.guard.recover()  # if it has never answered, samples have to show whether it does

    async def try_out(self, probe: Probe | None) -> str | None:
        """Let the scorer score the probe, unless its answers are cached. Returns why the scorer is wrong, or None."""
        kept = self._kept
        keys = [] if kept is None or probe is None else await kept.keys(probe.media, probe.prompts)
        if kept and probe and keys and None not in keys and len(await kept.look_up(keys)) == len({*keys}):
            self.guard.answered(probe.media[0], probe.prompts[0])
            return None
        if (wrong := await self.guard.try_out()) is not None:
            return wrong
        if kept is not None and self.guard.probed:
            await kept.keep({key: one for key, one in zip(keys, self.guard.probed, strict=True) if key is not None})
        return None

    async def _answer(self, batch: list[Sample]) -> list[Answer]:
        """Return the answers to a batch, from the cache or the scorer. Raises ScorerHangs."""
        media, prompts = [one for one, _ in batch], [prompt for _, prompt in batch]
        kept = self._kept
        keys: Keys = [None] * len(batch) if kept is None else await kept.keys(media, prompts)
        known = {} if kept is None else await kept.look_up(keys)
        answers = {i: Answer(known[key], kept=True) for i, key in enumerate(keys) if key in known and key is not None}
        for i in answers:
            self.guard.answered(media[i], prompts[i])
        left = [i for i in range(len(batch)) if i not in answers]
        if left:
            # A scorer that is down is not called.
            with self.statistics.call([batch[i][1].index for i in left]) if not self.guard.down else nullcontext():
                outcomes = await self.guard.score([media[i] for i in left], [prompts[i] for i in left])
            answers |= {i: Answer(outcome) for i, outcome in zip(left, outcomes, strict=True)}
            fresh = {keys[i]: outcome for i, outcome in zip(left, outcomes, strict=True) if isinstance(outcome, Score)}
            if kept and fresh:
                await kept.keep({key: score for key, score in fresh.items() if key is not None})
        self.statistics.answered(answer.outcome if not answer.kept else None for answer in answers.values())
        return [answers[i] for i in range(len(batch))]

    async def close(self) -> None:
        await cancel([] if self._recovering is None else [self._recovering])
        await self._batcher.close()
        await self.guard.close()


class Panel:
    """The scorers of a reward.

    `report` gets messages about them for the user. `probe`: the sample that they are tried with before any sample is
    generated. `observe` is called after every call of a scorer: its label, the prompt of each sample, start and end."""

    def __init__(
        self,
        name: str,
        reward: LoadedReward,
        config: Reward,
        clock: Clock,
        report: Callable[[str], Awaitable[None]],
        threads: Callable[[str], Threads] = Threads,
        probe: Probe | None = None,
        observe: Callable[[str, Sequence[int], float, float], None] = lambda *_: None,
    ) -> None:
        self._formula = reward.formula
        self._probe = probe
        is_kept = config.cache.enabled and any(member.identity is not None for member in reward.members)
        self._cache = ScoreCache(config.cache) if is_kept else None
        self._cache_threads = threads(f"{name}/cache") if is_kept else None

        def asked(member: Member) -> AskedScorer:
            of_scorer = threads(f"{name}/{member.label}")
            guard = GuardedScorer(member.label, member.scorer, config, member.config, clock, of_scorer, report, probe)
            kept = None
            if self._cache is not None and self._cache_threads is not None and member.identity is not None:
                kept = KeptAnswers(member.identity, self._cache, self._cache_threads, report)
            return AskedScorer(member, config, guard, kept, ScorerStatistics(member.label, clock, observe))

        self.scorers = [asked(member) for member in reward.members]
        self._unfinished: OrderedDict[Hashable, dict[int, Answer]] = OrderedDict()

    def connect(self, addresses: Addresses) -> None:
        """Pass the scorers a function that returns the addresses of a role of the run."""
        for scorer in self.scorers:
            scorer.guard.connect(addresses)

    async def try_out(self) -> str | None:
        """Let every scorer score the probe. Returns why one is wrong, or None."""
        found = await asyncio.gather(*(scorer.try_out(self._probe) for scorer in self.scorers))
        return next(filter(None, found), None)

    @property
    def loads(self) -> Sequence[Load]:
        """Each scorer's load."""
        return [scorer.load for scorer in self.scorers]

    @property
    def down(self) -> bool:
        """Whether samples should wait for `recover`: a scorer that cannot be left out is down."""
        return any(scorer.guard.down for scorer in self.scorers if not scorer.is_optional)

    @property
    def outages(self) -> list[str]:
        """The errors of the scorers that are down."""
        return [scorer.guard.outage for scorer in self.scorers if scorer.guard.down]

    async def recover(self) -> None:
        """Return when samples may be sent to every scorer that cannot be left out, even if they will fail."""
        await asyncio.gather(*(scorer.guard.recover() for scorer in self.scorers if not scorer.is_optional))

    async def score(self, media: Media, prompt: Prompt, key: Hashable = None) -> Result:
        """Score one sample.

        Args:
            media: the sample's.
            prompt: the sample's; it decides which scorers are called.
            key: identifies the sample if it is retried after a failure; None if it is not retried.

        Raises:
            ScorerHangs: too many calls of a scorer do not return."""
        try:
            require_media([media], [prompt])
        except ScoreError as error:
            return Result(Failure(str(error)))
        known = self._unfinished.pop(key, {})
        asked = [number for number in self._formula.asked(prompt) if number not in known]
        found = await asyncio.gather(*(self.scorers[number].score(media, prompt) for number in asked))
        answers = known | {number: one for number, one in zip(asked, found, strict=True) if one is not None}
        failures = [one.outcome for one in answers.values() if isinstance(one.outcome, Failure)]
        scores = {number: one.outcome for number, one in answers.items() if isinstance(one.outcome, Score)}
        if failures:
            if key is not None and scores:
                self._keep_unfinished(key, {number: answers[number] for number in scores})
            return Result(min(failures, key=lambda one: _ORDER[one.fault]))
        if not scores:
            return Result(Failure("every scorer that is asked for it has failed and may be left out"))
        try:
            return Result(self._formula.combine(scores), sum(one.kept for one in answers.values()))
        except NoReward as error:
            return Result(Failure(str(error), "reject"))

    async def score_whole(self, media: Media, prompt: Prompt, key: Hashable = None) -> Result:
        """Score one sample for comparison with samples outside its group; a score that lacks a scorer is a failure.

        Args:
            media, prompt, key: as of `score`.

        Raises:
            ScorerHangs: as of `score`."""
        result = await self.score(media, prompt, key)
        if isinstance(result.outcome, Score) and (absent := self._formula.unanswered(prompt, result.outcome)):
            return Result(Failure(f"no answer of {', '.join(absent)}"))
        return result

    def take_reports(self) -> list[ScorerReport]:
        """Return each scorer's statistics since the last call."""
        return [scorer.statistics.take(scorer.load.waiting) for scorer in self.scorers]

    def _keep_unfinished(self, key: Hashable, answers: dict[int, Answer]) -> None:
        self._unfinished[key] = answers
        if len(self._unfinished) > _MOST_UNFINISHED:
            self._unfinished.popitem(last=False)

    async def close(self) -> None:
        """Cancel pending work, and let the scorers free their resources."""
        await asyncio.gather(*(scorer.close() for scorer in self.scorers))
        if self._cache_threads is not None:
            self._cache_threads.close()
        if self._cache is not None:
            self._cache.close()

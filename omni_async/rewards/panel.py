"""Asks all scorers of a reward, one after the other, and combines what they say of a sample.

Waits for the scorers, each behind its guard (`omni_async.rewards.guard`), and for the file of kept answers, if there is
one. Answers of deterministic scorers are looked up before they are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from omni_async.aio.clock import Clock
from omni_async.config.schema import Reward
from omni_async.media import Media
from omni_async.rewards.base import ScoreError, Unbounded, require_media
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.guard import Failure, GuardedScorer
from omni_async.rewards.kept_answers import KeptAnswers
from omni_async.rewards.probe import Probe
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score


class Panel:
    """All guarded scorers of a reward.

    `report` gets messages about them for the user. `probe`: the sample that they are tried with before any sample is
    drawn."""

    def __init__(
        self,
        name: str,
        reward: WeightedScorer,
        config: Reward,
        clock: Clock,
        report: Callable[[str], Awaitable[None]],
        threads: Callable[[str], Threads] = Threads,
        probe: Probe | None = None,
    ) -> None:
        self._reward = reward
        self._max_abs = config.max_abs
        self._guards = [
            GuardedScorer(label, scorer, config, clock, threads(f"{name}/{label}"), report, probe)
            for label, _, scorer, _ in reward.members
        ]
        self._probe = probe
        identities = [member.identity for member in reward.members]
        self._kept: KeptAnswers | None = None
        if config.cache.enabled and any(identity is not None for identity in identities):
            self._kept = KeptAnswers(identities, config.cache, threads(f"{name}/cache"), report)
        self._hits: Counter[int] = Counter()

    async def try_out(self) -> str | None:
        """Let every scorer score the probe, but one that is known to have. Returns why one is wrong, if one is."""
        probe = self._probe
        kept = self._kept
        keys = {} if kept is None or probe is None else await kept.keys(probe.media, probe.prompts)
        for number, guard in enumerate(self._guards):
            asked = [key for (member, _), key in keys.items() if member == number]
            if kept and probe and asked and len(await kept.look_up(asked)) == len({*asked}):
                guard.answered(probe.media[0], probe.prompts[0])
                continue
            if (wrong := await guard.try_out()) is not None:
                return wrong
            answers = {keys[number, i]: one for i, one in enumerate(guard.probed) if (number, i) in keys}
            if kept and answers:
                await kept.keep(answers)
        return None

    def take_hits(self) -> Counter[int]:
        """Return, by position in the last batch, how many answers came from the cache; the next call returns none."""
        hits, self._hits = self._hits, Counter()
        return hits

    @property
    def down(self) -> bool:
        """Whether samples should wait for `recover`."""
        return any(guard.down for guard in self._guards)

    @property
    def outages(self) -> list[str]:
        """The errors of the scorers that are down."""
        return [guard.outage for guard in self._guards if guard.down]

    async def recover(self) -> None:
        """Return when samples may be sent to every scorer, even if they will fail."""
        for guard in self._guards:
            await guard.recover()

    async def score(self, media: Sequence[Media], prompts: Sequence[Prompt]) -> list[Score | Failure]:
        """Return one outcome per sample. A sample that a scorer fails is not shown to those after it."""
        failures: dict[int, Failure] = {}
        for i, (one, prompt) in enumerate(zip(media, prompts, strict=True)):
            try:
                require_media([one], [prompt])
            except ScoreError as error:
                failures[i] = Failure(str(error))
        rows: list[list[Score]] = [[] for _ in media]
        self._hits = Counter()
        kept = self._kept
        keys = {} if kept is None or failures else await kept.keys(media, prompts)
        for number, guard in enumerate(self._guards):
            known = await self._known(number, keys)
            for i, score in known.items():
                if i not in failures:
                    rows[i].append(score)
                    self._hits[i] += 1
                    guard.answered(media[i], prompts[i])
            left = [i for i in range(len(media)) if i not in failures and i not in known]
            if not left:
                continue
            outcomes = await guard.score([media[i] for i in left], [prompts[i] for i in left])
            fresh: dict[bytes, Score] = {}
            for i, outcome in zip(left, outcomes, strict=True):
                if isinstance(outcome, Failure):
                    failures[i] = outcome
                    continue
                rows[i].append(outcome)
                if (number, i) in keys:
                    fresh[keys[number, i]] = outcome
            if kept and fresh:
                await kept.keep(fresh)
        return [failures.get(i) or self._combined(row, prompts[i]) for i, row in enumerate(rows)]

    async def _known(self, scorer: int, keys: Mapping[tuple[int, int], bytes]) -> dict[int, Score]:
        """Return, by position in the batch, the answers of one scorer that are kept."""
        asked = {i: key for (number, i), key in keys.items() if number == scorer}
        found = await self._kept.look_up([*asked.values()]) if self._kept and asked else {}
        return {i: found[key] for i, key in asked.items() if key in found}

    def _combined(self, row: list[Score], prompt: Prompt) -> Score | Failure:
        try:
            return self._reward.combine(row, prompt, self._max_abs)
        except Unbounded as error:
            return Failure(str(error), "reject")

    def close(self) -> None:
        for guard in self._guards:
            guard.close()
        if self._kept is not None:
            self._kept.close()

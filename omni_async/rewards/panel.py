"""Calls all scorers of a reward, each guarded by itself.

Waits for them one after the other, as each `GuardedScorer` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from omni_async.aio.clock import Clock
from omni_async.config.schema import Reward
from omni_async.media import Media
from omni_async.rewards.base import ScoreError, Unbounded
from omni_async.rewards.checks import require_media
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.guard import Failure, GuardedScorer
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
            for label, _, scorer in reward.members
        ]

    async def try_out(self) -> str | None:
        """Lets every scorer score the probe. Returns why one is wrong, if one is."""
        for guard in self._guards:
            if (wrong := await guard.try_out()) is not None:
                return wrong
        return None

    @property
    def down(self) -> bool:
        """Returns whether samples should wait for `recover`."""
        return any(guard.down for guard in self._guards)

    @property
    def outages(self) -> list[str]:
        """Returns the errors of the scorers that are down."""
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
        for guard in self._guards:
            left = [i for i in range(len(media)) if i not in failures]
            if not left:
                break
            for i, outcome in zip(
                left, await guard.score([media[i] for i in left], [prompts[i] for i in left]), strict=True
            ):
                if isinstance(outcome, Failure):
                    failures[i] = outcome
                else:
                    rows[i].append(outcome)
        return [failures.get(i) or self._combine(row, prompts[i]) for i, row in enumerate(rows)]

    def _combine(self, row: list[Score], prompt: Prompt) -> Score | Failure:
        try:
            return self._reward.combine(row, prompt, self._max_abs)
        except Unbounded as error:
            return Failure(str(error), "reject")

    def close(self) -> None:
        for guard in self._guards:
            guard.close()

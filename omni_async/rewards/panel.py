"""All scorers of a reward, each guarded by itself. Waits for them one after the other; unblocked by what each `GuardedScorer` is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from omni_async.config.schema import Reward
from omni_async.control.clock import Clock
from omni_async.rewards.base import ScoreError
from omni_async.rewards.checks import require_images
from omni_async.rewards.composition import WeightedScorer
from omni_async.rewards.guard import Failure, GuardedScorer
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np


class Panel:
    """`tell` gets what a person should know of them."""

    def __init__(
        self,
        name: str,
        reward: WeightedScorer,
        config: Reward,
        clock: Clock,
        tell: Callable[[str], Awaitable[None]],
        threads: Callable[[str], Threads] = Threads,
    ) -> None:
        self._reward = reward
        self._guards = [
            GuardedScorer(label, scorer, config, clock, threads(f"{name}/{label}"), tell) for label, _, scorer in reward.members
        ]

    @property
    def down(self) -> bool:
        """Whether samples should wait for `recover`."""
        return any(guard.down for guard in self._guards)

    async def recover(self) -> None:
        """Until samples may be sent to every scorer, be it in vain."""
        for guard in self._guards:
            await guard.recover()

    async def score(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> list[Score | Failure]:
        """One outcome per image. A sample that a scorer fails is not shown to those after it."""
        failures: dict[int, Failure] = {}
        for i, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            try:
                require_images(self._reward.name, [image], [prompt])
            except ScoreError as error:
                failures[i] = Failure(str(error))
        rows: list[list[Score]] = [[] for _ in images]
        for guard in self._guards:
            left = [i for i in range(len(images)) if i not in failures]
            if not left:
                break
            for i, outcome in zip(left, await guard.score([images[i] for i in left], [prompts[i] for i in left]), strict=True):
                if isinstance(outcome, Failure):
                    failures[i] = outcome
                else:
                    rows[i].append(outcome)
        return [failures.get(i) or self._combine(row, prompts[i]) for i, row in enumerate(rows)]

    def _combine(self, row: list[Score], prompt: Prompt) -> Score | Failure:
        try:
            return self._reward.combine(row, prompt)
        except ScoreError as error:
            return Failure(str(error))

    def close(self) -> None:
        for guard in self._guards:
            guard.close()

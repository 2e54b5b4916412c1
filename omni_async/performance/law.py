"""Computes the laws of overlap: the least time of an update, in step and asynchronously.

Seconds per optimizer update throughout.

    T_sync      = T_g + T_r + T_t + T_s
    T_async(S)  = max(T_g + T_p, T_r, T_t + sigma, L / (S + 1))

L is the wave latency: the seconds from admitting an update's groups to engines that hold what was learned from them.
Without streaming inside a wave L = T_g + T_r + T_t + T_s; streaming shortens it. S = 0 is the synchronous loop. For
service times that do not vary the law is exact in step without streaming, and wherever the bottleneck is never idle;
otherwise it is a lower bound.
"""

from __future__ import annotations

import math

import msgspec


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds per update of the stages, each on devices of its own.

    Generation T_g, reward T_r and training T_t; the publish T_s, of which `blocked` (sigma) stops the trainer; the
    pause T_p that it forces on generation; the wave latency L (of several updates, if a publish frees the slots of
    several: then their mean, so that L / (S + 1) is still the share of an update)."""

    generate: float
    score: float
    train: float
    publish: float
    blocked: float = 0.0
    pause: float = 0.0
    wave: float | None = None

    @property
    def total(self) -> float:
        """The seconds of an update whose stages run one after the other."""
        return self.generate + self.score + self.train + self.publish

    @property
    def latency(self) -> float:
        return self.total if self.wave is None else self.wave

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The stage that an asynchronous job with enough staleness waits for, and its seconds."""
        stages = {"rollout": self.generate + self.pause, "reward": self.score, "trainer": self.train + self.blocked}
        name = max(stages, key=lambda stage: stages[stage])
        return name, stages[name]


def async_step(times: StageTimes, max_updates: int) -> float:
    """Return the seconds of an update with a staleness budget of `max_updates` updates."""
    return max(times.bottleneck[1], times.latency / (max_updates + 1))


def max_speedup(times: StageTimes) -> float:
    """Return the largest speed-up of any overlap over the synchronous loop on the same partition.

    What exceeds it is not overlap. Infinite if no stage takes any time."""
    return times.total / times.bottleneck[1] if times.bottleneck[1] > 0 else math.inf


def smallest_useful_budget(times: StageTimes, variation: float = 0.0) -> int:
    """Return the smallest S at which the bottleneck is always busy; one more where `variation` exceeds 0.25.

    `variation` is the largest coefficient of variation of a stage."""
    if times.bottleneck[1] == 0:
        return 0
    needed = math.ceil(times.latency / times.bottleneck[1] - 1e-9) - 1
    return max(0, needed) + (variation > 0.25)

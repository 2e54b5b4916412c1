"""Takes the steps before the window once for all samples of a group on an engine (`rollout.share_prefix`).

These steps are noise-free. Samples with the same initial noise therefore pass through the same latents until the first
noisy step, where they branch (Flow-GRPO-Fast, in the public code of arXiv 2505.05470). In a batch they share a row. A
sample that begins later continues from the latest latents that others reached. The stored latents are only a cache: a
prefix that is missing is computed again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from omni_async.rollout.recent import Recent
from omni_async.rollout.stepping import InFlight

# Latents of the newest groups suffice, because engines begin samples group by group. A sample of 1024 x 1024 pixels has
# about 1 MiB, a video of 81 frames of 1280 x 720 about 19 MiB.
MOST_BYTES = 64 * 2**20


class _State(NamedTuple):
    latents: torch.Tensor
    versions: tuple[int, ...]  # of the steps taken so far


class Prefixes:
    """The latest state of every shared prefix, for one thread.

    With `shared` false nothing is shared. At most `most_bytes` of latents are kept, on the samples' device, or one
    state if it is larger; the least recently used prefix is dropped first."""

    def __init__(self, shared: bool, most_bytes: int = MOST_BYTES) -> None:
        self._shared = shared
        self._kept: Recent[Hashable, _State] = Recent(most_bytes, lambda state: state.latents.nbytes)

    def clear(self) -> None:
        """Forget all states, because the weights change.

        A new sample then takes all of its steps with the new weights, as without sharing."""
        self._kept.clear()

    def join(self, sample: InFlight) -> None:
        """Move a sample that has taken no step to the latest state of its prefix."""
        request = sample.request
        if not self._shared or request.initial_seed is None or not sample.window_start:
            return
        images = tuple(image.digest for image in request.prompt.images)
        sample.prefix = (
            *(request.initial_seed, request.prompt.text, images, request.spec),
            *(request.num_inference_steps, sample.window_start),
        )
        if (state := self._kept.get(sample.prefix)) is not None:
            sample.follow(*state)

    def rows(self, samples: Sequence[InFlight]) -> list[list[int]]:
        """Group samples whose next step is the same: lists of their positions, in the order of first positions."""
        rows: dict[Hashable, list[int]] = {}
        for position, sample in enumerate(samples):
            common = sample.prefix is not None and sample.step < sample.window_start
            step = (sample.prefix, tuple(sample.versions)) if common else position
            rows.setdefault(step, []).append(position)
        return [*rows.values()]

    def spread(self, samples: Sequence[InFlight], rows: Sequence[Sequence[int]]) -> None:
        """Let the samples of every row follow its first sample, which took the step alone."""
        for first, *others in rows:
            leader = samples[first]
            if leader.prefix is None or leader.step > leader.window_start:
                continue
            for other in others:
                samples[other].follow(leader.latents, leader.versions)
            if len(set(leader.versions)) == 1:  # otherwise the weights have changed since its first step
                # Cloned, because a view would keep its whole batch alive.
                self._kept.put(leader.prefix, _State(leader.latents.clone(), tuple(leader.versions)))

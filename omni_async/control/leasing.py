"""Samples on their way to an engine: queued, then leased to exactly one engine until it answers. Pure bookkeeping; waits for nothing."""

from __future__ import annotations

import heapq
import math
from collections import deque

from omni_async.types import SampleRequest


class WorkQueue:
    """Training samples leave oldest group first, so a sample that is generated again goes first; validation samples in their order, at most
    `share` of an engine's places while training samples wait."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._training: list[tuple[int, int, SampleRequest]] = []  # a heap
        self._validation: deque[SampleRequest] = deque()
        self._leases: dict[str, tuple[str, SampleRequest]] = {}

    def add(self, request: SampleRequest) -> None:
        if request.kind == "validation":
            self._validation.append(request)
        else:
            heapq.heappush(self._training, (request.group, request.sample, request))

    def lease(self, engine: str, free: int, capacity: int, engines: int) -> list[SampleRequest]:
        """Up to `free` samples for an engine with `capacity` places, one of `engines`."""
        validating = sum(1 for owner, request in self._leases.values() if owner == engine and request.kind == "validation")
        allowed = math.ceil(self._share * capacity) - validating if self._training else free
        chosen = [self._validation.popleft() for _ in range(min(free, allowed, len(self._validation)))]
        # Several engines share a short queue evenly; a long one is first come, first served.
        fair = math.ceil(len(self._training) / engines)
        chosen += [heapq.heappop(self._training)[2] for _ in range(min(free - len(chosen), fair))]
        self._leases.update({request.sample_id: (engine, request) for request in chosen})
        return chosen

    def end_lease(self, engine: str, sample_id: str) -> SampleRequest | None:
        """What the engine was asked for; None for a second answer, or one from an engine the sample is not leased to (any more): the
        sample's place, if it has one, belongs to somebody else."""
        owner, request = self._leases.get(sample_id, (None, None))
        if owner != engine:
            return None
        del self._leases[sample_id]
        return request

    def leased(self, sample_id: str) -> bool:
        return sample_id in self._leases

    def forget(self, group: int) -> None:
        """The group ended: none of its queued samples is wanted. Leases stay until their engines answer."""
        self._training = [entry for entry in self._training if entry[0] != group]
        heapq.heapify(self._training)

"""Leases samples to engines: each is queued, then leased to exactly one engine until it answers. Pure bookkeeping;
waits for nothing."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque

from omni_async.types import SampleKind, SampleRequest


class WorkQueue:
    """A queue that training samples leave oldest group first, so a sample that is generated again goes first;
    validation samples leave in their order, for at most `share` of an engine's slots while training samples wait.
    Engines are kept equally full of training samples."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._training: dict[int, list[tuple[int, SampleRequest]]] = {}  # group -> a heap of its queued samples
        self._groups: list[int] = []  # a heap of the groups in `_training`, and of some that were forgotten
        self._validation: deque[SampleRequest] = deque()
        self._leases: dict[str, tuple[str, SampleRequest]] = {}
        self._leased: Counter[tuple[SampleKind, str]] = Counter()  # (kind, engine) -> leases
        self.num_training = 0  # training samples queued
        self.num_training_leases = 0  # training samples at engines, those whose group has ended included

    @property
    def waiting(self) -> bool:
        """Returns whether a sample of either kind is queued."""
        return self.num_training > 0 or bool(self._validation)

    def add(self, request: SampleRequest) -> None:
        if request.kind == "validation":
            self._validation.append(request)
            return
        if request.group not in self._training:
            self._training[request.group] = []
            heapq.heappush(self._groups, request.group)
        heapq.heappush(self._training[request.group], (request.sample, request))
        self.num_training += 1

    def lease(self, engine: str, free: int, capacity: int, engines: int) -> list[SampleRequest]:
        """Leases up to `free` samples to an engine with `capacity` slots, one of `engines`; at least one if any is
        queued."""
        chosen = self._take_validation(engine, free, capacity) if self._validation else []
        if self.num_training:
            chosen += self._take_training(engine, free - len(chosen), engines)
        for request in chosen:
            self._leases[request.sample_id] = (engine, request)
        return chosen

    def _take_validation(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        leased = self._leased["validation", engine]
        allowed = math.ceil(self._share * capacity) - leased if self.num_training else free
        count = max(0, min(free, allowed, len(self._validation)))
        self._leased["validation", engine] = leased + count
        return [self._validation.popleft() for _ in range(count)]

    def _take_training(self, engine: str, free: int, engines: int) -> list[SampleRequest]:
        leased = self._leased["train", engine]
        even = math.ceil((self.num_training + self.num_training_leases) / engines)
        count = min(free, max(1, even - leased), self.num_training)
        self._leased["train", engine] = leased + count
        self.num_training -= count
        self.num_training_leases += count
        return [self._next_training() for _ in range(count)]

    def _next_training(self) -> SampleRequest:
        while (queued := self._training.get(self._groups[0])) is None:
            heapq.heappop(self._groups)
        _, request = heapq.heappop(queued)
        if not queued:
            del self._training[heapq.heappop(self._groups)]
        return request

    def end_lease(self, engine: str, sample_id: str) -> SampleRequest | None:
        """Ends the lease and returns its request; None for a second answer, or one from an engine the sample is not
        leased to (any more): the sample's buffer slot, if it has one, belongs to another engine's lease."""
        owner, request = self._leases.get(sample_id, (None, None))
        if owner != engine or request is None:
            return None
        del self._leases[sample_id]
        self._leased[request.kind, engine] -= 1
        self.num_training_leases -= request.kind == "train"
        return request

    def leases_of(self, engine: str) -> list[str]:
        """Returns the samples that the engine has not answered for, in the order it got them."""
        return [sample_id for sample_id, (owner, _) in self._leases.items() if owner == engine]

    def leased(self, sample_id: str) -> bool:
        return sample_id in self._leases

    def forget(self, group: int) -> None:
        """Removes the queued samples of a group that ended. Leases stay until their engines answer."""
        self.num_training -= len(self._training.pop(group, ()))

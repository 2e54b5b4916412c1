"""Implements the two bounded buffers between the roles.

Room is reserved *before* work begins: a sample's buffer slot when it is leased to an engine, a group's when it is
admitted. So `put` never waits, nothing that is finished ever waits for room, and the classic deadlock (a buffer full of
young groups while the trainer waits for the oldest) cannot form. Backpressure is felt where it does no harm: at the
next lease or admission.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import chain, islice

from msgspec import Struct

from omni_async.types import ReadyGroup, SampleKind, ScoreJob


class BufferStatistics(Struct, frozen=True):
    """Counts of a buffer: `reserved` counts slots promised or filled, `ready` the entries that can be taken now."""

    capacity: int
    reserved: int
    ready: int


class TrajectoryBuffer:
    """Samples that are being generated, wait for a score, or are being scored."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._reserved: set[str] = set()
        self._queues: dict[SampleKind, OrderedDict[str, ScoreJob]] = {
            "validation": OrderedDict(),
            "train": OrderedDict(),
        }
        self._scoring: dict[str, tuple[str, ScoreJob]] = {}  # sample -> the reward worker that has it
        self._suspects: set[str] = set()

    @property
    def free(self) -> int:
        return self.capacity - len(self._reserved)

    def reserve(self, sample_id: str) -> None:
        if self.free <= 0:
            raise ValueError(f"no room for sample {sample_id}: all {self.capacity} buffer slots are reserved")
        self._reserved.add(sample_id)

    def put(self, job: ScoreJob) -> None:
        if job.sample_id not in self._reserved:
            raise ValueError(f"sample {job.sample_id} has no buffer slot reserved")
        self._queues[job.kind][job.sample_id] = job

    def put_off(self, job: ScoreJob) -> None:
        """Removes the job from those being scored: its reward worker answered, and the sample is to be scored again,
        but not yet."""
        self._scoring.pop(job.sample_id, None)

    def retry(self, job: ScoreJob) -> None:
        """Puts the job at the front of its queue: the trainer needs the group of an older sample sooner."""
        self._scoring.pop(job.sample_id, None)
        self.put(job)
        self._queues[job.kind].move_to_end(job.sample_id, last=False)

    def suspect(self, sample_id: str) -> None:
        """Marks the sample to be handed out alone from now on: if it breaks its reward worker, no other sample is to
        blame."""
        self._suspects.add(sample_id)

    def queued(self, kind: SampleKind) -> bool:
        """Returns whether a sample of this kind waits for a score."""
        return bool(self._queues[kind])

    def take(self, worker: str, limit: int, kinds: Iterable[SampleKind] = ("validation", "train")) -> list[ScoreJob]:
        """Hands samples to a reward worker, one kind after the other, each in the order of arrival; or one suspect."""
        waiting = chain.from_iterable(self._queues[kind].values() for kind in kinds)
        jobs = list(islice(waiting, limit))
        first_suspect = next((position for position, job in enumerate(jobs) if job.sample_id in self._suspects), limit)
        jobs = jobs[: max(1, first_suspect)]
        for job in jobs:
            del self._queues[job.kind][job.sample_id]
            self._scoring[job.sample_id] = (worker, job)
        return jobs

    def being_scored(self, worker: str, sample_id: str) -> bool:
        """Returns whether this reward worker has taken the sample and not answered yet, and the score is still of
        use."""
        return sample_id in self._scoring and self._scoring[sample_id][0] == worker

    def jobs_of(self, worker: str) -> list[ScoreJob]:
        """Returns the jobs that the reward worker has taken and not answered, in that order."""
        return [job for owner, job in self._scoring.values() if owner == worker]

    def release(self, sample_id: str) -> None:
        """Frees the sample's buffer slot: it was scored, or will never be."""
        self._reserved.discard(sample_id)
        self._suspects.discard(sample_id)
        self._scoring.pop(sample_id, None)

    def discard(self, sample_ids: set[str]) -> None:
        """Removes samples that are not to be scored, and frees their buffer slots."""
        for sample_id in sample_ids:
            for queue in self._queues.values():
                queue.pop(sample_id, None)
            self._scoring.pop(sample_id, None)
        self._reserved -= sample_ids
        self._suspects -= sample_ids

    def statistics(self) -> BufferStatistics:
        return BufferStatistics(self.capacity, len(self._reserved), sum(map(len, self._queues.values())))


class ReplayBuffer:
    """Scored groups, taken by the trainer in windowed admission order.

    `window` = 1 is strict first-in-first-out. With a larger window a ready group may overtake up to `window - 1` older
    ones that are not ready, but only while every other untaken group can still be trained within its own budget: group
    g, admitted at version a, must be taken by update a + S, so before a younger group takes a position in an update,
    enough positions must be left for all groups due by each later update.
    """

    def __init__(self, capacity: int, *, window: int, max_updates: int, groups_per_update: int) -> None:
        self.capacity = capacity
        self._window = window
        self._max_updates = max_updates
        self._per_update = groups_per_update
        self._admitted: OrderedDict[int, int] = OrderedDict()  # untaken groups, in admission order -> admitted version
        self._of_version: Counter[int] = Counter()  # untaken groups by admitted version: S + 1 versions at most
        self._ready: dict[int, ReadyGroup] = {}

    @property
    def free(self) -> int:
        return self.capacity - len(self._admitted)

    def reserve(self, group: int, version: int) -> None:
        if self.free <= 0:
            raise ValueError(f"no room for group {group}: all {self.capacity} buffer slots are reserved")
        self._admitted[group] = version
        self._of_version[version] += 1

    def put(self, group: ReadyGroup) -> None:
        if group.group not in self._admitted:
            raise ValueError(f"group {group.group} has no buffer slot reserved")
        self._ready[group.group] = group

    def unput(self, group: int) -> None:
        """Marks a group as not ready, if it was ready; it keeps its buffer slot."""
        self._ready.pop(group, None)

    def end(self, group: int) -> None:
        """Removes a group that was rejected or dropped."""
        if group in self._admitted:
            self._leave(group)
            self._ready.pop(group, None)

    @property
    def all_ready(self) -> bool:
        """Returns whether every untaken group could be taken."""
        return len(self._ready) == len(self._admitted)

    def take(self, update: int, needed: int) -> ReadyGroup | None:
        """Returns the group that update number `update` (version being trained) should train next, if one is ready;
        `needed` is how many groups the update still needs, this one included."""
        for overtaken, group in enumerate(self._admitted):
            if overtaken >= self._window:
                return None
            if group in self._ready and (overtaken == 0 or self._others_stay_in_time(group, update, needed - 1)):
                self._leave(group)
                return self._ready.pop(group)
        return None

    def _leave(self, group: int) -> None:
        version = self._admitted.pop(group)
        self._of_version[version] -= 1
        if not self._of_version[version]:
            del self._of_version[version]

    def _others_stay_in_time(self, taken: int, update: int, positions: int) -> bool:
        """Returns whether all groups due by each update still fit into the positions up to it."""
        due = 0
        for version in sorted(self._of_version):
            others = self._of_version[version] - (version == self._admitted[taken])
            due += others
            if others and due > positions + (version + self._max_updates - update) * self._per_update:
                return False
        return True

    def ready(self) -> list[ReadyGroup]:
        """Returns the groups that wait to be taken, oldest first."""
        return [self._ready[group] for group in self._admitted if group in self._ready]

    def __contains__(self, group: int) -> bool:
        return group in self._admitted

    def statistics(self) -> BufferStatistics:
        return BufferStatistics(self.capacity, len(self._admitted), len(self._ready))

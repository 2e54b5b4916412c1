"""Bounds the bytes of live samples: trajectory and media, from a group's admission until it has ended.

Bytes are reserved *before* work begins, for a whole group when it is admitted, so a finished sample never waits for
room. A sample is expected to be as large as the largest one of its bucket so far. Of a bucket that has none yet it is
expected to have its full share: the bound divided by the samples of one update. An update's groups are always held
together, so a sample that is larger than its share means that the bound is too small, and the run ends.

While no sample is larger than its share, whatever is admitted and not ended holds at most its shares. So if fewer
groups than an update needs are live, there is room for the next one: the trainer never waits for a group that the
bound keeps out. Samples of a group that ended count until their engines have answered or are lost, and then the next
group is admitted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct

from omni_async.config.sizes import size_text


class BytesStatistics(Struct, frozen=True):
    """Bytes of live samples: `reserved` those that are held or expected, `ready` those that are held, `most` the
    highest `ready` since the last update. `capacity` is None without a bound."""

    capacity: int | None
    reserved: int
    ready: int
    most: int


class HeldBytes:
    """The bytes of live samples, of at most `bound` in all (None: no bound). `samples_per_update` samples are trained
    together."""

    def __init__(self, bound: int | None, samples_per_update: int) -> None:
        self._bound = bound
        self._samples_per_update = samples_per_update
        self._share = 0 if bound is None else bound // samples_per_update
        self._bucket: dict[str, int] = {}  # of every live sample
        self._bytes: dict[str, int] = {}  # of those that are made
        self._num_expected: dict[int, int] = defaultdict(int)  # those that are to be made, by bucket
        self._largest: dict[int, int] = {}  # sizes by bucket
        self._held = 0
        self._most = 0

    @property
    def bounded(self) -> bool:
        return self._bound is not None

    @property
    def reserved(self) -> int:
        return self._held + sum(count * self._size(bucket) for bucket, count in self._num_expected.items())

    def _size(self, bucket: int) -> int:
        return self._largest.get(bucket, self._share)

    def has_room(self, bucket: int, count: int) -> bool:
        """Returns whether `count` more samples of the bucket may be made."""
        return self._bound is None or self.reserved + count * self._size(bucket) <= self._bound

    def reserve(self, bucket: int, sample_ids: Iterable[str]) -> None:
        before = len(self._bucket)
        self._bucket.update(dict.fromkeys(sample_ids, bucket))
        self._num_expected[bucket] += len(self._bucket) - before

    def made(self, sample_id: str, size: int) -> str | None:
        """Records that the sample has `size` bytes. Returns what is wrong with the bound if it is too small."""
        bucket = self._bucket[sample_id]
        self._num_expected[bucket] -= 1
        self._bytes[sample_id] = size
        if size > self._largest.get(bucket, -1):
            self._largest[bucket] = size
        self._held += size
        if self._held > self._most:
            self._most = self._held
        if self._bound is None or size <= self._share:
            return None
        return (
            f"buffer.max_bytes: sample {sample_id} has {size_text(size)}, and the {self._samples_per_update} samples of"
            f" an update are held together: expected at least {size * self._samples_per_update}, got {self._bound}"
        )

    def make_again(self, sample_id: str) -> None:
        """Records that the sample is lost, and its group is not; it keeps its reservation."""
        size = self._bytes.pop(sample_id, None)
        if size is not None:
            self._held -= size
            self._num_expected[self._bucket[sample_id]] += 1

    def release(self, sample_ids: Iterable[str]) -> None:
        """Frees the bytes of samples that nobody needs any more."""
        for sample_id in sample_ids:
            bucket = self._bucket.pop(sample_id, None)
            if bucket is None:
                continue
            size = self._bytes.pop(sample_id, None)
            if size is None:
                self._num_expected[bucket] -= 1
            else:
                self._held -= size

    def begin_update(self) -> None:
        """Begins to measure `most` anew."""
        self._most = self._held

    def statistics(self) -> BytesStatistics:
        return BytesStatistics(self._bound, self.reserved, self._held, self._most)

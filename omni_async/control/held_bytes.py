"""Bounds the bytes of live samples: trajectory and media, from a group's admission until it has ended.

Bytes are reserved *before* work begins, for a whole group at its admission, so a finished sample never waits for room.
A sample's expected size is the largest size in its bucket so far. In a bucket without a finished sample it is the full
share: the bound divided by the samples of one update. An update's groups are always held together. A sample larger than
its share therefore means that the bound is too small, and the run ends.

While no sample exceeds its share, live groups hold at most their shares. So if fewer groups than an update needs are
live, there is room for the next group: the trainer never waits for a group that the bound keeps out. Samples of an
ended group count until their engines have answered or are lost; then the next group is admitted. This class only
counts; the sample table records which sample holds which bytes.
"""

from __future__ import annotations

from collections import defaultdict

from omni_async.config.section import size_text


class HeldBytes:
    """The bytes of live samples, at most `bound` in total (None: no bound).

    `samples_per_update` samples are trained together."""

    def __init__(self, bound: int | None, samples_per_update: int) -> None:
        self.bound = bound
        self._samples_per_update = samples_per_update
        self._share = 0 if bound is None else bound // samples_per_update
        self._num_expected: dict[int, int] = defaultdict(int)  # samples to be generated, by bucket
        self._largest: dict[int, int] = {}  # sizes by bucket
        self._held = 0
        self._most = 0

    @property
    def reserved(self) -> int:
        return self._held + sum(count * self._size(bucket) for bucket, count in self._num_expected.items())

    def _size(self, bucket: int) -> int:
        return self._largest.get(bucket, self._share)

    def has_room(self, bucket: int, count: int) -> bool:
        """Return whether there is room for `count` more samples of the bucket."""
        return self.bound is None or self.reserved + count * self._size(bucket) <= self.bound

    def reserve(self, bucket: int, count: int) -> None:
        """Expect `count` more samples of the bucket."""
        self._num_expected[bucket] += count

    def change(self, bucket: int, expected: int, own: int, size: int) -> None:
        """Record that a sample starts or stops being expected, or holding bytes.

        Args:
            bucket: the sample's.
            expected: 1: it is to be generated; -1: no longer; 0: no change.
            own: 1: it is generated and holds bytes; -1: no longer; 0: no change.
            size: these bytes; read only if `own` is not 0."""
        self._num_expected[bucket] += expected
        if own > 0:
            self._held += size
            if self._held > self._most:
                self._most = self._held
            if size > self._largest.get(bucket, -1):
                self._largest[bucket] = size
        elif own:
            self._held -= size

    def problem(self, sample_id: str, size: int) -> str | None:
        """Return an error text if the bound is too small for a sample of `size` bytes; else None."""
        if self.bound is None or size <= self._share:
            return None
        return (
            f"buffer.max_bytes: sample {sample_id} has {size_text(size)}, and the {self._samples_per_update} samples of"
            f" an update are held together: expected at least {size * self._samples_per_update}, got {self.bound}"
        )

    def begin_update(self) -> None:
        """Reset `most` to the bytes held now."""
        self._most = self._held

    def statistics(self) -> dict[str, int | None]:
        return {"capacity": self.bound, "reserved": self.reserved, "ready": self._held, "most": self._most}

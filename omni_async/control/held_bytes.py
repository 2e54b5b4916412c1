"""Bounds the bytes of live samples: trajectory and media, from a group's admission until it has ended.

Bytes are reserved *before* work begins, for a whole group when it is admitted, so a finished sample never waits for
room. A sample is expected to be as large as the largest one of its bucket so far. Of a bucket that has none yet it is
expected to have its full share: the bound divided by the samples of one update. An update's groups are always held
together, so a sample that is larger than its share means that the bound is too small, and the run ends.

While no sample is larger than its share, whatever is admitted and not ended holds at most its shares. So if fewer
groups than an update needs are live, there is room for the next one: the trainer never waits for a group that the
bound keeps out. Samples of a group that ended count until their engines have answered or are lost, and then the next
group is admitted. Which sample holds what is the sample table's to know: this counts.
"""

from __future__ import annotations

from collections import defaultdict

from omni_async.config.section import size_text


class HeldBytes:
    """The bytes of live samples, of at most `bound` in all (None: no bound).

    `samples_per_update` samples are trained together."""

    def __init__(self, bound: int | None, samples_per_update: int) -> None:
        self.bound = bound
        self._samples_per_update = samples_per_update
        self._share = 0 if bound is None else bound // samples_per_update
        self._num_expected: dict[int, int] = defaultdict(int)  # those that are to be made, by bucket
        self._largest: dict[int, int] = {}  # sizes by bucket
        self._held = 0
        self._most = 0

    @property
    def reserved(self) -> int:
        return self._held + sum(count * self._size(bucket) for bucket, count in self._num_expected.items())

    def _size(self, bucket: int) -> int:
        return self._largest.get(bucket, self._share)

    def has_room(self, bucket: int, count: int) -> bool:
        """Return whether `count` more samples of the bucket may be made."""
        return self.bound is None or self.reserved + count * self._size(bucket) <= self.bound

    def reserve(self, bucket: int, count: int) -> None:
        """Expect `count` more samples of the bucket."""
        self._num_expected[bucket] += count

    def change(self, bucket: int, expected: int, own: int, size: int) -> None:
        """Record that a sample is now expected or made, or no longer.

        Args:
            bucket: the sample's.
            expected: 1: it is to be made; -1: no longer; 0: that stays as it was.
            own: likewise, whether it is made and holds bytes.
            size: these bytes; read where `own` is not 0."""
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
        """Return what is wrong with the bound, if it is too small for a sample of `size` bytes."""
        if self.bound is None or size <= self._share:
            return None
        return (
            f"buffer.max_bytes: sample {sample_id} has {size_text(size)}, and the {self._samples_per_update} samples of"
            f" an update are held together: expected at least {size * self._samples_per_update}, got {self.bound}"
        )

    def begin_update(self) -> None:
        """Begin to measure `most` anew."""
        self._most = self._held

    def statistics(self) -> dict[str, int | None]:
        return {"capacity": self.bound, "reserved": self.reserved, "ready": self._held, "most": self._most}

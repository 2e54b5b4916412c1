"""Bounds the bytes of live samples: trajectories from a group's admission until it has ended, media until the score.

Bytes are reserved *before* work begins, for a whole group at its admission, so a finished sample never waits for room.
A trajectory's expected size is the largest of its bucket so far, with a part of the conditioning that a group's samples
share. Media are expected as large as the largest so far, of every sample that will be shown, and of as many others as
have a place in the trajectory buffer: a scored sample may be lost, and needs its media again. In a bucket without a
finished sample a trajectory has the full share: the bound without media, divided by the samples of one update. An
update's groups are always held together. If the largest sizes leave no room for them, the bound is too small, and the
run ends.

So an update's groups always have room: the trainer never waits for a group that the bound keeps out. Samples of an
ended group count until their engines have answered or are lost; then the next group is admitted. This class only
counts; the sample table records which sample holds which bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from omni_async.config import Config
from omni_async.config.held import num_conditionings, num_shown, num_with_media
from omni_async.config.section import size_text
from omni_async.types import SampleResult


class Change(NamedTuple):
    """What a transition of a sample changes: 1 begins, -1 ends, 0 neither.

    expected: it is to be generated. own: it is generated. unscored: it is generated and has no score."""

    expected: int
    own: int
    unscored: int


class HeldBytes:
    """The bytes of live samples, at most `buffer.max_bytes` in total, if that is given."""

    def __init__(self, config: Config) -> None:
        self.bound = config.buffer.bound
        self._samples_per_update = config.trainer.groups_per_update * config.rollout.group_size
        self._with_media = num_with_media(config, config.trainer.groups_per_update)  # of the samples of an update
        self._num_shown = num_shown(config)  # of the samples of an update
        self._places = config.buffer.trajectories
        self._group_size, self._num_conditionings = config.rollout.group_size, num_conditionings(config)
        self._num_live = self._num_live_shown = 0
        self._num_expected: dict[int, int] = defaultdict(int)  # samples to be generated, by bucket
        self._num_expected_shown = 0  # those of them that keep their media
        self._num_unscored = 0  # samples that hold media until their score
        self._largest: dict[int, int] = {}  # trajectories' sizes by bucket
        self._largest_media = 0
        self._held = 0
        self._most = 0

    @property
    def reserved(self) -> int:
        return self._reserved(0, 0, 0)

    def _reserved(self, bucket: int, count: int, shown: int) -> int:
        """Return the reserved bytes with `count` more samples of the bucket, and `shown` of them keep their media."""
        others = self._num_live - self._num_live_shown + count - shown
        media = self._num_expected_shown + shown + max(0, min(others, self._places) - self._num_unscored)
        trajectories = sum(number * self._size(each) for each, number in self._num_expected.items() if number)
        return self._held + trajectories + count * self._size(bucket) + media * self._largest_media

    def _size(self, bucket: int) -> int:
        without_media = (self.bound or 0) - self._with_media * self._largest_media
        return self._largest.get(bucket, max(0, without_media) // self._samples_per_update)

    def may_show(self, count: int, shown: int) -> bool:
        """Return whether `shown` of `count` more samples may keep their media.

        Groups that replace rejected groups may have the same place in an update, so too many samples would be shown."""
        updates = -(-(self._num_live + count) // self._samples_per_update)
        return self._num_live_shown + shown <= updates * self._num_shown

    def has_room(self, bucket: int, count: int, shown: int) -> bool:
        """Return whether there is room for `count` more samples of the bucket, `shown` of them to be shown."""
        shown = shown if self.may_show(count, shown) else 0
        fits = self.bound is None or self._reserved(bucket, count, shown) <= self.bound
        return fits or self._num_live + count <= self._samples_per_update

    def reserve(self, bucket: int, count: int, shown: int) -> None:
        """Expect `count` more samples of the bucket, and `shown` of them keep their media."""
        self._num_live += count
        self._num_live_shown += shown
        self._num_expected[bucket] += count
        self._num_expected_shown += shown

    def change(self, bucket: int, shown: bool, change: Change, result: SampleResult | None, alone: int) -> None:
        """Record a sample's transition.

        Args:
            bucket: the sample's.
            shown: whether it keeps its media after the score.
            change: what begins or ends.
            result: the sample, if it is generated.
            alone: bytes of shared objects that no other sample of its group holds."""
        expected, own, unscored = change
        if unscored and not shown and result is not None:
            self._num_unscored += unscored
            self._held += unscored * result.media_bytes
        if expected:
            self._num_expected[bucket] += expected
        self._num_live += expected + own
        if shown:
            self._num_expected_shown += expected
            self._num_live_shown += expected + own
        if not own or result is None:
            return
        self._held += own * (result.nbytes + alone + (result.media_bytes if shown else 0))
        if own > 0:
            if self._held > self._most:
                self._most = self._held
            trajectory = result.nbytes + (self._of_sample(result) if result.shared else 0)
            if trajectory > self._largest.get(bucket, -1):
                self._largest[bucket] = trajectory
            if result.media_bytes > self._largest_media:
                self._largest_media = result.media_bytes

    def _of_sample(self, result: SampleResult) -> int:
        """Return a sample's part of the bytes that samples of its group share, if every engine stores these."""
        shared = sum(size for _, size in result.shared)
        return -(-shared * self._num_conditionings // self._group_size)

    def problem(self, sample_id: str) -> str | None:
        """Return an error text, which names a sample, if the bound is too small for the samples so far; else None."""
        if self.bound is None:
            return None
        trajectory, media = max(self._largest.values(), default=0), self._largest_media
        least = self._samples_per_update * trajectory + self._with_media * media
        if least <= self.bound:
            return None
        also = f", {self._with_media} of them with {size_text(media)} of media" if media else ""
        return (
            f"buffer.max_bytes: with sample {sample_id} a trajectory has up to {size_text(trajectory)}, and the"
            f" {self._samples_per_update} samples of an update are held together{also}: expected at least {least}, got"
            f" {self.bound}"
        )

    def begin_update(self) -> None:
        """Reset `most` to the bytes held now."""
        self._most = self._held

    def statistics(self) -> dict[str, int | None]:
        return {"capacity": self.bound, "reserved": self.reserved, "ready": self._held, "most": self._most}

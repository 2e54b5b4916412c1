"""Defines the counts that buffers report, for status, metrics and tests."""

from __future__ import annotations

from msgspec import Struct


class BufferStatistics(Struct, frozen=True):
    """Counts of a buffer: `reserved` counts slots promised or filled, `ready` the entries that can be taken now."""

    capacity: int
    reserved: int
    ready: int


class SlotStatistics(Struct, frozen=True):
    """Counts of the slots that bound staleness: `live` are those of groups that have not ended."""

    capacity: int
    live: int
    awaiting_publication: int


class BytesStatistics(Struct, frozen=True):
    """Bytes of live samples.

    `reserved` those that are held or expected, `ready` those that are held, `most` the highest `ready` since the last
    update. `capacity` is None without a bound."""

    capacity: int | None
    reserved: int
    ready: int
    most: int

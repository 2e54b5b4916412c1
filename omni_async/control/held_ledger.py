"""Keeps the ledger of a resumed run as it is until the attempt has something to record.

Entries that an attempt makes before its first update, for groups that it rejected or dropped, are void if it ends
there: the checkpoint that it went on from does not count these lines, and the next attempt makes the groups again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from omni_async.control.ledger_prefix import LedgerDamaged
from omni_async.types import LedgerEntry


class LedgerSink(Protocol):
    def __call__(self, entry: LedgerEntry) -> None: ...

    def sync(self) -> None:
        """Make every line survive a crash of the machine."""


class HeldBackSink:
    """A sink that holds entries in memory until a group is trained, or until `sync`.

    From then on a checkpoint that counts them counts lines of the file.

    `take_over` opens the file's sink, and with that makes lines that an earlier attempt left there after the checkpoint
    void. It is called once, or again after it raised."""

    def __init__(self, take_over: Callable[[], LedgerSink]) -> None:
        self._take_over = take_over
        self._sink: LedgerSink | None = None
        self._held: list[LedgerEntry] = []

    def __call__(self, entry: LedgerEntry) -> None:
        self._held.append(entry)
        if self._sink is not None or entry.event == "trained":
            self._hand_over()

    def _hand_over(self) -> LedgerSink:
        """Write the held entries.

        OSError if they cannot be written, also because the file is no longer the one that the attempt began from."""
        if self._sink is None:
            try:
                self._sink = self._take_over()
            except LedgerDamaged as error:
                raise OSError(str(error)) from None
        while self._held:
            self._sink(self._held.pop(0))  # one that could not be written is the sink's to write before the next
        return self._sink

    def sync(self) -> None:
        """Make every line survive a crash of the machine, the held ones included. OSError if they do not."""
        self._hand_over().sync()

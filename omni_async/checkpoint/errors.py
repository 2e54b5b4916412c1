"""Defines the error for a checkpoint that cannot be used."""

from __future__ import annotations

from omni_async.config.redact import one_line

_LONGEST = 2000


class CheckpointError(ValueError):
    """Raised with one line: which checkpoint, and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST))

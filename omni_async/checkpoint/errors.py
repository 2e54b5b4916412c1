"""What can be wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(ValueError):
    """One line: which checkpoint, and what is wrong with it."""

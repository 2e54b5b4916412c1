"""What the training engine raises when a run must stop."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training cannot go on: non-finite gradients, a checkpoint that does not fit, an engine used out of order."""

"""Defines the error that the training engine raises when a run must stop."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """Training cannot go on: non-finite gradients, a checkpoint that does not fit, engine calls out of order."""

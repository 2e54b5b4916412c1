"""Sets how many examples a property is tried on: a third of them, unless the session runs everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

whole = True  # tests/conftest.py sets it before test files are imported


def few(examples: int) -> Callable[[Any], Any]:
    """Sets the number of examples, each as slow as it needs to be, with fixtures of the whole test."""
    number = examples if whole else -(-examples // 3)
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))

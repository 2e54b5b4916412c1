"""Hides installed packages from a library that imports them only if they are there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def hidden(packages: Sequence[str]) -> Iterator[None]:
    """Make imports of the packages fail inside the context, in all threads, unless they are imported already."""
    blocked: dict[str, Any] = dict.fromkeys(package for package in packages if package not in sys.modules)
    sys.modules.update(blocked)  # None is Python's own mark of a module that must not be imported
    try:
        yield
    finally:
        for package in blocked:
            del sys.modules[package]

"""Measures what a call costs in a way that a busy machine does not change: lines run, and how processor time grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

TIMES = 8
# Linear work grows 8 times, with some room for noise; quadratic work grows 64 times.
LINEAR = 24.0


def require_lines(most: int, work: Callable[[], T]) -> T:
    """Return the result of `work`. AssertionError as soon as it has run more than `most` lines of Python.

    Lines of everything that it calls in this thread count; work inside a function written in C does not."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            assert count <= most, f"more than {most} lines of Python were run"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(former)


def growth(work: Callable[[int], Any], size: int, tries: int = 5) -> float:
    """Return how many times the processor time of `work` grows from `size` to TIMES * `size`: the least of each."""

    def least(n: int) -> float:
        found = []
        for _ in range(tries):
            began = time.thread_time()
            work(n)
            found.append(time.thread_time() - began)
        return min(found)

    return least(TIMES * size) / least(size)

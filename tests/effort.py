"""Measures what a call costs in a way that a busy machine does not change: lines run, and how processor time grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

TIMES = 8
# Linear work grows 8 times, with some room for noise; quadratic work grows 64 times.
LINEAR = 24.0


def require_lines(most: int, work: Callable[[], Any]) -> int:
    """Run `work` and return how many lines of Python it ran. AssertionError as soon as they are more than `most`.

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
        work()
    finally:
        sys.settrace(former)
    return count


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

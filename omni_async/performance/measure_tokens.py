"""Fits the times of answers that are drawn token by token to their stays in engines.

Reading the prompt is no separate part of a stay: its seconds count as seconds of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from omni_async.performance.profile import NUM_QUANTILES, STANDARD_ERRORS, ServiceTime, TokenTimes, slope_of
from omni_async.types import Span


class Stay(NamedTuple):
    """An answer in its engine.

    - `joined`: when it began, in the clock's seconds.
    - `tokens`: how many the engine drew for it, or for the longest answer that had to end with it.
    - `together`: the mean number of answers in the engine meanwhile.
    - `seconds`: without pauses for swaps."""

    joined: float
    tokens: int
    together: float
    seconds: float


def token_times(stays: Sequence[Stay]) -> TokenTimes | None:
    """Return the times of tokens, and the lengths of answers; None without answers.

    Least squares give a token's `fixed_s` and `unit_s`, both >= 0, scaled to the sum of all seconds. If the seconds of
    a token do not grow with the answers in the engine (their slope is at most two jackknife standard errors), all of
    them are fixed."""
    stays = [stay for stay in stays if stay.tokens > 0 and stay.seconds > 0]
    if not stays:
        return None
    tokens, together, seconds = np.array([stay[1:] for stay in stays], dtype=np.float64).T
    slope, error = slope_of(*np.unique([together, seconds / tokens], axis=1))
    found = np.array([1.0, 0.0])
    if slope > STANDARD_ERRORS * error:
        work = tokens * together
        found = np.linalg.lstsq(np.stack([tokens, work], axis=1), seconds, rcond=None)[0]
        if found[0] < 0:
            found = np.array([0.0, 1.0])
    found = np.maximum(found, 0.0)
    found *= seconds.sum() / (tokens @ (found[0] + found[1] * together))
    lengths = np.sort(tokens)[((np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES * len(tokens)).astype(int)]
    return TokenTimes(ServiceTime(float(found[0]), float(found[1])), tuple(int(length) for length in lengths))


def tokens_of(span: Span) -> int:
    """Return the tokens of the answer in a span `generate`."""
    return sum(int(count) for _, count in span.args.get("version_steps", ()))


def stays_of(answers: Iterable[Span], swapped: Sequence[float], pause: float, max_batch: int) -> Iterator[Stay]:
    """Yield the stays of the training answers of an engine that lets them join and end at any token.

    Answers wait inside the engine, so a span begins before the answer joins if the engine is full.

    Args:
        answers: The spans of all answers of the engine.
        swapped: When its swaps ended, ascending.
        pause: Seconds of a swap.
        max_batch: The largest number of answers that it draws together."""
    spans = sorted(answers, key=lambda span: span.start)
    joined, running = [], list[float]()  # ends, a heap
    for span in spans:
        begin = span.start
        while running and running[0] <= begin:
            heapq.heappop(running)
        if len(running) >= max_batch:
            begin = heapq.heappop(running)
        heapq.heappush(running, span.end)
        joined.append(min(begin, span.end))
    ends = np.array([span.end for span in spans])
    starts = np.array(joined)
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times = times[order]
    number = np.repeat([1.0, -1.0], len(spans))[order].cumsum()
    area = np.concatenate([[0.0], (number[:-1] * np.diff(times)).cumsum()])
    there = np.interp(ends, times, area) - np.interp(starts, times, area)
    pauses = pause * (np.searchsorted(swapped, ends, "right") - np.searchsorted(swapped, starts, "right"))
    for span, begin, answer_s, paused in zip(spans, joined, there, pauses, strict=True):
        if span.end > begin and not is_validation(span):
            seconds = span.end - begin
            yield Stay(begin, tokens_of(span), float(answer_s) / seconds, max(0.0, seconds - float(paused)))


def is_validation(span: Span) -> bool:
    return str(span.args.get("sample", "")).startswith("v")

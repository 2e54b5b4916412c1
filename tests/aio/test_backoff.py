"""Pauses before another try double up to a limit, and what waits for their end can be called off. On virtual time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.aio.backoff import Backoff, Breaker, Later, State
from omni_async.aio.clock import ManualClock

SECONDS = st.floats(1e-3, 1e3)


@given(SECONDS, SECONDS, st.integers(1, 10**9))
def test_pauses_double_up_to_the_longest(first: float, longest: float, failures: int) -> None:
    backoff = Backoff(first, longest)
    pause, after = backoff.pause_s(failures), backoff.pause_s(failures + 1)
    assert after == min(longest, 2 * pause)
    assert backoff.pause_s(1) == min(first, longest)


@pytest.mark.virtual_time
async def test_what_is_put_off_happens_in_its_time_unless_it_is_cancelled() -> None:
    happened: list[tuple[str, float]] = []
    later = Later()
    for name, seconds in (("b", 2.0), ("a", 1.0), ("gone", 1.5), ("now", 3.0), ("now", 0.0), ("never", 9.0)):
        later.call(name, seconds, lambda name=name: happened.append((name, asyncio.get_running_loop().time())))
    later.cancel(["gone", "unknown"])
    await asyncio.sleep(5)
    later.cancel_all()
    later.call("too late", 0.0, lambda: happened.append(("too late", 0.0)))
    await asyncio.sleep(50)
    assert happened == [("now", 0.0), ("a", 1.0), ("b", 2.0)]


def make_breaker() -> tuple[Breaker, ManualClock]:
    clock = ManualClock(100.0)
    return Breaker(clock, pauses=Backoff(1.0, 8.0), give_up_s=60.0), clock


@given(
    st.lists(st.tuples(st.sampled_from(["succeeded", "trip", "try_again", "missed"]), st.floats(0, 30)), max_size=60)
)
def test_whatever_happens_it_is_closed_from_a_success_to_the_next_trip(story: list[tuple[str, float]]) -> None:
    """Trips only closed ones, tries only open ones, misses only half-open ones."""
    breaker, clock = make_breaker()
    allowed = {"trip": State.CLOSED, "try_again": State.OPEN, "missed": State.HALF_OPEN}
    opened, attempts = None, []
    for number, (what, seconds) in enumerate(story):
        clock.advance(seconds)
        if what in allowed and breaker.state is not allowed[what]:
            continue
        getattr(breaker, what)(*([f"reason {number}"] if what in ("trip", "missed") else []))
        if what == "trip":
            opened, attempts = clock.now(), []
        elif what == "succeeded":
            opened = None
        if what in ("trip", "missed"):
            attempts.append((clock.now(), f"reason {number}"))
        assert (breaker.state is State.CLOSED) == (opened is None)
        assert (breaker.state is State.HALF_OPEN) == (what == "try_again")
        assert breaker.given_up == (opened is not None and clock.now() - opened >= 60.0)
        if opened is not None:
            assert breaker.reason == attempts[-1][1] and breaker.open_s == clock.now() - opened
            assert breaker.pause_s == min(8.0, 2.0 ** (len(attempts) - 1)), "after a success it is as new"
            assert breaker.due == (clock.now() - attempts[-1][0] >= breaker.pause_s)

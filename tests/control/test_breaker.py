from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omni_async.control.backoff import Backoff
from omni_async.control.breaker import Breaker, State
from omni_async.control.clock import ManualClock


def make_breaker(clock: ManualClock | None = None, in_a_row: int = 3) -> Breaker:
    return Breaker(clock or ManualClock(100.0), in_a_row=in_a_row, pauses=Backoff(1.0, 8.0), give_up_s=60.0)


def test_failures_in_a_row_make_it_suspicious_and_a_success_between_them_does_not() -> None:
    breaker = make_breaker()
    for reason in ("a", "b"):
        breaker.failed(reason)
        assert not breaker.suspicious
    breaker.succeeded()
    for reason in ("c", "d"):
        breaker.failed(reason)
        assert not breaker.suspicious
    breaker.failed("e")
    assert breaker.suspicious and breaker.state is State.CLOSED and breaker.reason == "e"
    breaker.trip()
    assert not breaker.suspicious and breaker.state is State.OPEN


def test_attempts_come_after_ever_longer_pauses_and_it_gives_up_in_the_end() -> None:
    clock = ManualClock(100.0)
    breaker = make_breaker(clock)
    breaker.trip()
    pauses = []
    while not breaker.given_up:
        pauses.append(breaker.pause_s)
        assert not breaker.due
        clock.advance(breaker.pause_s)
        assert breaker.due
        breaker.try_again()
        breaker.missed()
    assert pauses == [1.0, 2.0, 4.0, *[8.0] * 7]
    assert breaker.open_s == 63.0
    clock.advance(breaker.pause_s)
    assert breaker.due, "attempts go on"


def test_after_a_success_it_is_as_new() -> None:
    clock = ManualClock()
    breaker = make_breaker(clock)
    breaker.trip()
    clock.advance(1000.0)
    breaker.try_again()
    breaker.missed()
    breaker.try_again()
    breaker.succeeded()
    assert breaker.state is State.CLOSED and not breaker.given_up and not breaker.suspicious
    breaker.trip()
    assert breaker.pause_s == 1.0 and breaker.open_s == 0.0 and not breaker.given_up


@given(
    st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["failed", "succeeded", "trip", "try_again", "missed"]), st.floats(0, 30)), max_size=60)
)
def test_whatever_happens_it_is_closed_exactly_since_the_last_success_or_until_the_first_trip(
    in_a_row: int, story: list[tuple[str, float]]
) -> None:
    """In the order its user keeps: trips only closed ones, tries only open ones, misses only half-open ones."""
    clock = ManualClock()
    breaker = make_breaker(clock, in_a_row)
    allowed = {"trip": State.CLOSED, "try_again": State.OPEN, "missed": State.HALF_OPEN}
    failures, opened = 0, None
    for what, seconds in story:
        clock.advance(seconds)
        if what in allowed and breaker.state is not allowed[what]:
            continue
        if what == "failed":
            breaker.failed("x")
            failures += 1
        else:
            getattr(breaker, what)()
        if what == "trip":
            opened = clock.now()
        elif what == "succeeded":
            failures, opened = 0, None
        assert (breaker.state is State.CLOSED) == (opened is None)
        assert breaker.suspicious == (opened is None and failures >= in_a_row)
        assert breaker.given_up == (opened is not None and clock.now() - opened >= 60.0)
        assert 1.0 <= breaker.pause_s <= 8.0 or opened is None

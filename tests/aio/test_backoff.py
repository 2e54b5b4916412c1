"""Pauses before another try double up to a limit, and what waits for their end can be called off. On virtual time."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from omni_async.aio.backoff import Backoff, Later
from omni_async.simulation.virtual_time import run

SECONDS = st.floats(1e-3, 1e3)


@given(SECONDS, SECONDS, st.integers(1, 10**9))
def test_pauses_double_up_to_the_longest(first: float, longest: float, failures: int) -> None:
    backoff = Backoff(first, longest)
    pause, after = backoff.pause_s(failures), backoff.pause_s(failures + 1)
    assert after == min(longest, 2 * pause)
    assert backoff.pause_s(1) == min(first, longest)


def test_what_is_put_off_happens_in_its_time_unless_it_is_cancelled() -> None:
    happened: list[tuple[str, float]] = []

    async def main() -> int:
        later = Later()
        for name, seconds in (("b", 2.0), ("a", 1.0), ("gone", 1.5), ("now", 0.0), ("never", 9.0)):
            later.call(name, seconds, lambda name=name: happened.append((name, asyncio.get_running_loop().time())))
        later.cancel(["gone", "unknown"])
        await asyncio.sleep(5)
        left = len(later)
        later.close()
        later.call("too late", 0.0, lambda: happened.append(("too late", 0.0)))
        await asyncio.sleep(50)
        return left

    assert run(main()) == 1
    assert happened == [("now", 0.0), ("a", 1.0), ("b", 2.0)]

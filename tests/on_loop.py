"""Runs a test that is a coroutine function on an event loop of its own."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

LIMIT_S = 60.0


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), LIMIT_S))

    return run

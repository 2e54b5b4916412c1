"""Closes files and sockets of this process in forked children, before these do anything else.

A child that a scorer or a library forks without an exec has every open file of its parent, and with them the parent's
locks and listening sockets until the child ends, also after the parent was killed. (After an exec they are closed
already.)
"""

from __future__ import annotations

import os
import weakref
from functools import cache
from typing import Any, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> Any: ...


T = TypeVar("T", bound=Closable)

_own: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_from_children(handle: T) -> T:
    """Close `handle`, a file or a socket, in every child that is forked while it is open here; return it."""
    _register()
    _own.add(handle)
    return handle


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for handle in [*_own]:
        handle.close()

"""Decides whether an exception of a scorer is its own fault, or that of something it needs and that may come back.

The decision is a heuristic, for a scorer may raise any exception. Unreachable services, time-outs and exhausted memory
are outages, recognised by the exceptions of Python and by the names that HTTP, RPC and accelerator libraries give to
theirs. A server that answers and refuses the request (HTTP 401, say) will refuse it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from omni_async.rewards.base import Outage, ScoreError

# These say that a file is not where it should be, unlike every other OSError.
_MISTAKES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_NAMES = re.compile(
    r"timeout|timedout|connect|network|transport|protocol|unavailable|ratelimit|overload|rpc|http"
    r"|clienterror|servererror|apierror|outofmemory",
    re.IGNORECASE,
)
_REFUSED = frozenset({400, 401, 403, 405, 413, 415, 422})
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def is_outage(error: BaseException) -> bool:
    """Return whether asking again later may help, judging by the exception and those that led to it."""
    try:
        return any(_is_outage(one) for one in _chain(error))
    except Exception:  # noqa: BLE001 (attributes of foreign exceptions may raise, and then there is nothing to judge by)
        return False


def repeats(error: ScoreError, before: ScoreError) -> bool:
    """Return whether a scorer failed twice in the same way, and in one that time does not repair.

    Addresses of objects may differ."""
    if isinstance(error, Outage) or isinstance(before, Outage):
        return False
    return _ADDRESS.sub("0x", str(error)) == _ADDRESS.sub("0x", str(before))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, Outage):
        return True
    if isinstance(error, _MISTAKES) or _status(error) in _REFUSED:
        return False
    if isinstance(error, OSError | EOFError | MemoryError):
        return True
    return any(_NAMES.search(kind.__name__) for kind in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP server's status, by the names that the client libraries have for it."""
    of_response = getattr(error, "response", None)
    found = [getattr(error, "code", None), getattr(error, "status", None), getattr(error, "status_code", None)]
    return next((code for code in (*found, getattr(of_response, "status_code", None)) if isinstance(code, int)), None)

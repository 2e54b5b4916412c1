"""Judges exceptions of foreign scorer code, and makes them fit for ledgers and logs: short, and without credentials.

Whether an exception is the scorer's own fault, or that of something it needs and that may come back, is a heuristic,
for a scorer may raise any exception. Unreachable services, time-outs and exhausted memory are outages, recognised by
the exceptions of Python and by the names that HTTP, RPC and accelerator libraries give to theirs. A server that answers
and refuses the request (HTTP 401, say) will refuse it again.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Iterator, Set
from pathlib import Path
from typing import Any, TypeVar

from omni_async.config.redact import redact_text
from omni_async.rewards.base import Addresses, Outage, ScoreError, Scorer, concurrency_of, is_async
from omni_async.types import Prompt

T = TypeVar("T")

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


# ---- what is shown of an exception -----------------------------------------------------------------------------------

_LONGEST = 2000
# Characters of an encoded secret for one of its own, at most: `\\\\u0073`, `%2525E4%2525BD...`.
_WIDEST = 24
_OUR_FILES = (str(Path(__file__).parent), "<frozen", importlib.__file__)
_LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def told(error: BaseException) -> str:
    """Return the kind and the text of an exception; an exception is foreign code, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (nothing more can be shown)
        return f"{type(error).__name__}: an exception that cannot be shown"


def place_of(error: BaseException) -> str:
    """Return ` (file:line)` of the innermost line that the scorer's author wrote, if any.

    Neither this package nor Python's import machinery; an installed library only where nothing else is left."""
    if isinstance(error, SyntaxError) and error.filename:
        return ""  # its text says so
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OUR_FILES)]
    frames = [one for one in frames if not one.filename.startswith(_LIBRARIES)] or frames
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def call_discreetly(call: Callable[[], T], secrets: Set[str]) -> T:
    """Call foreign code; an exception that is not fit to be shown is replaced by one of ours, see `shown_as`."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 (sys.exit with a key in its text, too)
        raise shown_as(error, secrets) from None


def shown_as(error: BaseException, secrets: Set[str]) -> BaseException:
    """Return the exception, or one of ours if its text would show a secret, or is too long.

    Such a text has one of `secrets`, a URL's password or more than 2000 characters. What is returned instead is an
    `Outage`, if it is one, or else a `ScoreError`, with the same traceback."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 (`told` reports it)
        return error
    shown = _cut(text, secrets)
    if shown == text:
        return error
    kind = Outage if is_outage(error) else ScoreError
    return kind(f"{type(error).__name__}: {shown}").with_traceback(error.__traceback__)


def _cut(text: str, secrets: Set[str]) -> str:
    """Return `text` without `secrets`, and without its end if it is too long."""
    margin = _WIDEST * max(map(len, secrets), default=0)
    looked_at = text[: 10 * _LONGEST + margin]
    shown = redact_text(looked_at, secrets)
    if len(looked_at) < len(text):
        shown = shown[: max(0, len(shown) - margin)]  # where a secret may have been cut through
    elif len(shown) <= _LONGEST:
        return shown
    return f"{shown[:_LONGEST]}... ({len(text)} characters)"


class Discreet:
    """A scorer whose exceptions are made fit to be shown. `is_async`: whether `ask` awaits it, or `score` calls it."""

    def __init__(self, scorer: Scorer, secrets: frozenset[str]) -> None:
        self.name = getattr(scorer, "name", type(scorer).__name__)  # not for messages: they show the recipe's name
        self.concurrency = concurrency_of(scorer)
        self.accepts = getattr(scorer, "accepts", None)
        self.is_async = is_async(scorer)
        self._scorer: Any = scorer
        self._secrets = secrets

    def score(self, media: list[Any], prompts: list[Prompt], /) -> Any:
        return call_discreetly(lambda: self._scorer.score(media, prompts), self._secrets)

    async def ask(self, media: list[Any], prompts: list[Prompt], /) -> Any:
        try:
            return await self._scorer.score(media, prompts)
        except BaseException as error:  # noqa: BLE001 (foreign code)
            raise shown_as(error, self._secrets) from None

    def connect(self, addresses: Addresses) -> None:
        """Tell the scorer, if it wants to know, how to find the addresses of a role."""
        if (connect := getattr(self._scorer, "connect", None)) is not None:
            call_discreetly(lambda: connect(addresses), self._secrets)

    async def close(self, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        """Close the scorer, if it has something to close. What that raises is of no use any more.

        `in_thread` calls what may block."""
        close = getattr(self._scorer, "close", None)
        with contextlib.suppress(Exception):
            if inspect.iscoroutinefunction(close):
                await close()
            elif callable(close):
                await in_thread(close)

"""Classifies exceptions of foreign scorer code, and makes them short and free of credentials for ledgers and logs.

A scorer may raise any exception, so a heuristic decides whether the scorer itself is at fault, or something that it
needs and that may recover. Unreachable services, time-outs and exhausted memory are outages. They are recognised by
Python's exceptions and by the names that HTTP, RPC and accelerator libraries give theirs. A server that answers and
refuses a request (for example HTTP 401) will refuse it again.
"""

from __future__ import annotations

import importlib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import TypeVar

from omni_async.config.redact import one_line, redact_text
from omni_async.rewards.base import Outage, ScoreError, Unbounded

T = TypeVar("T")

# Unlike every other OSError, these mean that a file is missing or in the wrong place.
_MISTAKES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_NAMES = re.compile(
    r"timeout|timedout|connect|network|transport|protocol|unavailable|ratelimit|overload|rpc|http"
    r"|clienterror|servererror|apierror|outofmemory",
    re.IGNORECASE,
)
_REFUSED = frozenset({400, 401, 403, 405, 413, 415, 422})


def is_outage(error: BaseException) -> bool:
    """Return whether a later call may succeed, judging by the exception and its causes."""
    try:
        return any(_is_outage(one) for one in _chain(error))
    except Exception:  # noqa: BLE001 (attributes of foreign exceptions may raise, and then there is nothing to judge by)
        return False


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
    """Return the HTTP server's status, under the names that client libraries use for it."""
    of_response = getattr(error, "response", None)
    found = [getattr(error, "code", None), getattr(error, "status", None), getattr(error, "status_code", None)]
    return next((code for code in (*found, getattr(of_response, "status_code", None)) if isinstance(code, int)), None)


# ---- what is shown of an exception -----------------------------------------------------------------------------------

_LONGEST = 2000
# A reason goes into a line of the ledger and of the console, too short for a server's error page.
_LONGEST_REASON = 300
# The most characters that encode one character of a secret: `%F0%9F%98%80`, `\ud83d\ude00`.
_WIDEST = 12
_OUR_FILES = (str(Path(__file__).parent), "<frozen", importlib.__file__)
_LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def told(error: BaseException) -> str:
    """Return the type and text of an exception, even if its `__str__` raises: exceptions are foreign code, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 (nothing more can be shown)
        return f"{type(error).__name__}: an exception that cannot be shown"


def place_of(error: BaseException) -> str:
    """Return ` (file:line)` of the innermost line that the scorer's author wrote, if any.

    Skips this package and Python's import machinery, and installed libraries unless no other line is left."""
    if isinstance(error, SyntaxError) and error.filename:
        return ""  # its text contains the file and line
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OUR_FILES)]
    frames = [one for one in frames if not one.filename.startswith(_LIBRARIES)] or frames
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def score_error(label: str, error: BaseException, secrets: Set[str]) -> ScoreError:
    """Return what a scorer raised as one line that names the scorer and the place, without `secrets`."""
    error = shown_as(error, secrets)
    text = " ".join((str(error) if isinstance(error, ScoreError) else told(error)).split())
    if not text.startswith(f"scorer {label!r}"):
        text = f"scorer {label!r}: {text}"
    text, place = one_line(text), place_of(error)
    if len(place) > _LONGEST_REASON // 2:
        place = ""  # the error matters more than its place
    longest = _LONGEST_REASON - len(place)
    shown = text if len(text) <= longest else f"{text[: longest - 3]}..."
    kind = Outage if is_outage(error) else Unbounded if isinstance(error, Unbounded) else ScoreError
    return kind(shown + place)


def call_discreetly(call: Callable[[], T], secrets: Set[str]) -> T:
    """Call foreign code; replace an exception that is not fit to be shown, see `shown_as`."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 (sys.exit with a key in its text, too)
        raise shown_as(error, secrets) from None


def shown_as(error: BaseException, secrets: Set[str]) -> BaseException:
    """Return the exception, or a replacement if its text contains a secret or is too long.

    An unfit text contains one of `secrets` or a URL's password, or has more than 2000 characters. The replacement is an
    `Outage` if the exception is one, otherwise a `ScoreError`, with the same traceback."""
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
    """Return `text` without `secrets`, and cut off if it is too long."""
    margin = _WIDEST * max(map(len, secrets), default=0)
    looked_at = text[: 10 * _LONGEST + margin]
    shown = redact_text(looked_at, secrets)
    if len(looked_at) < len(text):
        shown = shown[: max(0, len(shown) - margin)]  # the cut may have split a secret
    elif len(shown) <= _LONGEST:
        return shown
    return f"{shown[:_LONGEST]}... ({len(text)} characters)"

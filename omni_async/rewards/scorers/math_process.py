"""Compares mathematical answers with math-verify, as a script that the scorer `math_answer` runs in a process.

A line of standard input is a JSON list of the target, the answer and the seconds of CPU time for both. A line of
standard output is the reply: whether the target could be parsed, whether the answer could, and whether they are equal.

A short text such as 9^{9^{9^9}} can occupy sympy for ever, without a release of the interpreter lock. So the kernel
ends the process when the time is over: the signal of the timer has its default action. The scorer sees the signal.

It imports nothing of this package, because the script's own path may not be importable.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

OVER = signal.SIGPROF
_MEMORY = 2**31
_DELIMITERS = ("$", r"\(", r"\[", r"\boxed")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the caller has to limit the time


def delimited(text: str) -> str:
    """Return a formula as math-verify finds it in a text: between dollars, unless it has delimiters."""
    return text if any(mark in text for mark in _DELIMITERS) else f"${' '.join(text.split())}$"


@lru_cache(1000)
def parsed_target(target: str) -> list[Any]:
    """Return the expressions of a target; an empty list if math-verify cannot parse it."""
    return parse(delimited(target), fallback_mode="no_fallback", parsing_timeout=None)


def compared(target: str, answer: str) -> tuple[bool, bool, bool]:
    """Return whether the target can be parsed, whether the answer can, and whether they are equal."""
    wanted, found = parsed_target(target), parse(answer, parsing_timeout=None)
    return bool(wanted), bool(found), bool(wanted and found) and verify(wanted, found, timeout_seconds=None)


def main() -> None:
    """Reply to every line."""
    signal.signal(OVER, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {OVER})
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = _MEMORY if most == resource.RLIM_INFINITY else min(most, _MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    replies, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no reply
    for line in sys.stdin:
        target, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply = compared(target, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()

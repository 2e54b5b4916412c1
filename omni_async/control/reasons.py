"""Shortens and counts the reasons why samples have no score and groups were not trained. Pure functions.

The ledger has every reason in full, credentials masked. A summary needs few and short reasons. It therefore omits the
number of tries, the type of a plain exception and the place in a file: they distinguish reasons that mean the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from omni_async.config.redact import one_line, redact_text

OTHER = "other reasons"
_MOST = 5
_LONGEST = 160
_TRIED = re.compile(r"(?P<what>reward|generation) failed \d+ times: ")
_SCORER = re.compile(r"scorer (?P<label>'[^']*'|\"[^\"]*\"): ")
_PLAIN = re.compile(r"(?:ValueError|RuntimeError|ScoreError|Exception): ")


def short(reason: str, name_scorer: bool = True) -> str:
    """Return a reason in one line of at most 160 characters, without details that differ from case to case.

    Args:
        reason: as in the ledger.
        name_scorer: whether the scorer that failed is named; not needed for a single scorer."""
    text = reason
    tried = _TRIED.match(text)
    text = text[tried.end() :] if tried else text
    scorer = _SCORER.match(text)
    text = _PLAIN.sub("", _without_place(text[scorer.end() :] if scorer else text), count=1)
    if scorer and name_scorer:
        text = f"{text} (scorer {scorer['label']})"
    if tried and tried["what"] == "generation":
        text = f"generation failed: {text}"
    text = one_line(redact_text(" ".join(text.split()))) or "no reason was given"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _without_place(text: str) -> str:
    """Return the text without ` (file:line)` at its end."""
    start = text.rfind(" (")
    if start < 0 or not text.endswith(")"):
        return text
    _, colon, line = text[start + 2 : -1].rpartition(":")
    return text[:start] if colon and line.isdecimal() else text


def count(reasons: Mapping[str, int], name_scorer: bool = True) -> dict[str, int]:
    """Return the most frequent reasons, shortened, with their numbers; the rest counts as `other reasons`.

    Args:
        reasons: reason as in the ledger -> how often it was given.
        name_scorer: as for `short`."""
    found: Counter[str] = Counter()
    for reason, number in reasons.items():
        found[short(reason, name_scorer)] += number
    rest = found.pop(OTHER, 0)
    ordered = sorted(found.items(), key=lambda one: (-one[1], one[0]))
    rest += sum(number for _, number in ordered[_MOST:])
    return dict(ordered[:_MOST]) | ({OTHER: rest} if rest else {})


def listed(counts: Mapping[str, int]) -> str:
    """Format one reason as `no face found`, several as `no face found (3), timed out (1)`."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{reason} ({number})" for reason, number in counts.items())

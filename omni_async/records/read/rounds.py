"""Writes validation rounds to lines of `metrics.jsonl`, and reads them back from any such file, even an edited one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from omni_async.control.reasons import OTHER
from omni_async.control.rounds import REWARD, Round
from omni_async.types import count, finite

_PREFIX = "validation/"
_MOST_REASONS, _LONGEST = 10, 200


def line_of(finished: Round, means: Mapping[str, float | None], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round as the content of a line.

    Args:
        finished: the round.
        means: its means by metric name.
        more: further numbers."""
    counted = [{"reason": reason, "samples": number} for reason, number in finished.reasons.items()]
    return {
        **means,
        "samples": finished.scored,
        "asked": finished.asked,
        **more,
        "reasons": counted,
        "drawn": finished.drawn,
        "scores": finished.scores,
    }


def read_rounds(lines: Iterable[Mapping[str, Any]]) -> list[Round]:
    """Return the rounds among the lines, by version, as `in_order` does."""
    return in_order([read_round(line) for line in lines if is_round(line)])


def in_order(rounds: Sequence[Round]) -> list[Round]:
    """Return the rounds by version; of a repeated version, the newest.

    Rounds of earlier versions, which did not count unscored samples, have no `asked`: it becomes the largest number of
    scored samples."""
    most = max((one.scored for one in rounds if one.scored is not None and one.asked is None), default=None)
    known = [replace(one, asked=most) if one.scored is not None and one.asked is None else one for one in rounds]
    newest = {one.version: one for one in known}
    return sorted(newest.values(), key=lambda one: one.version)


def is_round(line: Mapping[str, Any]) -> bool:
    """Return whether a line of metrics is a validation round's."""
    return "finished" not in line and _PREFIX + REWARD in line and count(line.get("update")) is not None


def read_round(line: Mapping[str, Any]) -> Round:
    """Return the round in a line for which `is_round` holds. Invalid values become unknown."""
    means = {name.removeprefix(_PREFIX): finite(value) for name, value in line.items() if name.startswith(_PREFIX)}
    scored, asked = count(line.get("samples")), count(line.get("asked"))
    scores = _scores(line.get("scores"), asked)
    drawn = line.get("drawn")
    return Round(
        line["update"],
        means.pop(REWARD),
        {name: value for name, value in means.items() if value is not None},
        scored=scored,
        asked=asked,
        reasons=_reasons(line.get("reasons")),
        drawn=drawn if isinstance(drawn, str) and scores else "",
        scores=scores,
    )


def _scores(found: Any, asked: int | None) -> dict[str, tuple[float | None, ...]]:
    """Return the columns; an empty dict if they are incomplete."""
    if not isinstance(found, dict) or REWARD not in found:
        return {}
    if any(not isinstance(column, list) or len(column) != asked for column in found.values()):
        return {}
    return {str(name): tuple(finite(value) for value in column) for name, column in found.items()}


def _reasons(found: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in found[:_MOST_REASONS] if isinstance(found, list) else ():
        number = count(one.get("samples")) if isinstance(one, dict) else None
        if number:
            reason = str(one.get("reason", OTHER))[:_LONGEST]
            counts[reason] = counts.get(reason, 0) + number
    return counts

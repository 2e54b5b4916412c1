"""Builds the data of a timeline for `page/lanes.js`; a report embeds a bounded part of the spans.

Times are seconds since the first span.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import structs

from omni_async.commands.report.blocks import Lanes
from omni_async.records.read.record import Run
from omni_async.records.read.spans import Actor, ReadSpan, group_of, lane_order, prompts_of
from omni_async.types import LedgerEntry

MOST_SPANS = 6000
HINT = (
    "A lane per worker. Drag to move; pinch, the buttons, or the wheel after a click zoom; arrows, + and - work, too."
    " Click a sample to follow its group."
)
_LONGEST_ARGS = 4000  # characters of a span's arguments
_LONGEST_READ = 2**14  # bytes of arguments, with the unused ones
_KEPT = ("sample", "versions", "version_steps", "media_bytes", "scorer", "samples", "version", "step", "megabytes")


class Timeline:
    """The extent of a run's spans, their workers, and the spans that ended last, collected one by one.

    `number`: of all spans. `start`, `end`: of their times."""

    def __init__(self, spans: Iterable[ReadSpan]) -> None:
        self.number, self.start, self.end = 0, math.inf, -math.inf
        self.actors: dict[str, None] = {}
        self._newest: list[ReadSpan] = []
        for span in spans:
            self.number += 1
            self.start, self.end = min(self.start, span.start), max(self.end, span.end)
            self.actors[span.actor] = None
            fits = memoryview(span.args).nbytes <= _LONGEST_READ
            self._newest.append(structs.replace(span, args=span.args.copy() if fits else msgspec.Raw(b"{}")))
            if len(self._newest) > 2 * MOST_SPANS:
                self._forget()
        self._forget()

    def _forget(self) -> None:
        """Keep the spans for a page, and the newest other span."""
        self._newest = sorted(self._newest, key=_end)[-MOST_SPANS - 1 :]

    @property
    def newest(self) -> list[ReadSpan]:
        """The spans for a page, up to `MOST_SPANS`, in the order of their starts."""
        return sorted(self._newest[-MOST_SPANS:], key=lambda span: span.start)

    @property
    def whole_from(self) -> float:
        """The end of the newest span without a place in `newest`; the start, if all have one."""
        return self.start if self.number <= MOST_SPANS else self._newest[0].end


def _end(span: ReadSpan) -> float:
    return span.end


def lanes(run: Run, timeline: Timeline) -> Lanes:
    """Return the timeline of a run, of at least one span."""
    return Lanes("lanes", "What every worker did", HINT, embedded(timeline, run.ledger))


def embedded(timeline: Timeline, ledger: Iterable[LedgerEntry]) -> dict[str, Any]:
    """Return the newest spans of a run, and details of their groups.

    Args:
        timeline: of at least one span.
        ledger: the groups that ended."""
    kept, origin = timeline.newest, timeline.start
    slots = lane_order(timeline.actors)
    place = {slot: number for number, slot in enumerate(slots)}
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(span.kind for span in kept))}
    actors: dict[str, Actor] = {}
    boxes: dict[str, list[Any]] = {name: [] for name in ("lane", "track", "kind", "group", "start", "end", "args")}
    args: dict[str, int] = {}
    calls: dict[str, list[int]] = {}
    for number, span in enumerate(kept):
        actor = actors.setdefault(span.actor, Actor(span.actor))
        found = _arguments(span)
        text = msgspec.json.encode({name: found[name] for name in _KEPT if name in found}).decode()
        text = text if len(text) <= _LONGEST_ARGS else "{}"
        row = (
            place[actor.worker.slot],
            actor.track_of(span.start, span.end),
            kinds[span.kind],
            group_of(found.get("group"), found.get("sample")),
            round(span.start - origin, 6),
            round(max(span.start, span.end) - origin, 6),
            args.setdefault(text, len(args)),
        )
        for column, value in zip(boxes.values(), row, strict=True):
            column.append(value)
        if scored := prompts_of(found.get("prompts")):
            calls[str(number)] = scored
    shown = {group for group in boxes["group"] if group >= 0}
    groups = {
        str(entry.group): {"entry": msgspec.to_builtins(entry), "prompt": entry.text or None}
        for entry in ledger
        if entry.group in shown
    }
    start, end = timeline.whole_from - origin, timeline.end - origin
    return {
        "static": True,
        "lanes": slots,
        "kinds": [*kinds],
        "start": start,
        "end": round(end, 6),
        "boxes": boxes,
        "args": [msgspec.json.decode(text) for text in args],
        "calls": calls,
        "groups": groups,
        "note": _note(len(kept), timeline.number, start, end),
    }


def _arguments(span: ReadSpan) -> dict[str, Any]:
    try:
        return msgspec.json.decode(span.args, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}


def _note(kept: int, all_: int, start: float, end: float) -> str:
    whole = "Times are seconds since the first span."
    if kept == all_:
        return f"All {all_:,} spans. {whole}"
    return (
        f"The newest {kept:,} of {all_:,} spans, from second {start:.0f} to second {end:.0f}: a page with all of them"
        f" would be too large, and `omni-async watch` shows them. {whole}"
    )

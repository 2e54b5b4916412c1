"""Builds the data of a timeline for `page/lanes.js`; a report embeds a bounded part of the spans.

Times are seconds since the first span.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from omni_async.commands.report.blocks import Lanes
from omni_async.records.read.record import Run
from omni_async.records.read.spans import Actor, group_of, lane_order, prompts_of
from omni_async.types import LedgerEntry, Span

MOST_SPANS = 6000
HINT = (
    "A lane per worker. Drag to move; pinch, the buttons, or the wheel after a click zoom; arrows, + and - work, too."
    " Click a sample to follow its group."
)
_LONGEST_ARGS = 4000  # characters of a span's arguments
_KEPT = ("sample", "versions", "version_steps", "media_bytes", "scorer", "samples", "version", "step", "megabytes")


def lanes(run: Run, spans: Sequence[Span]) -> Lanes:
    """Return the timeline of a run; `spans` are all of its spans, at least one."""
    return Lanes("lanes", "What every worker did", HINT, embedded(spans, run.ledger))


def newest(spans: Sequence[Span]) -> list[Span]:
    """Return the spans for a page: the `MOST_SPANS` spans that ended last, ordered by start."""
    return sorted(sorted(spans, key=lambda span: span.end)[-MOST_SPANS:], key=lambda span: span.start)


def embedded(spans: Sequence[Span], ledger: Iterable[LedgerEntry]) -> dict[str, Any]:
    """Return the newest spans of a run, and details of their groups.

    Args:
        spans: the run's spans, in any order; at least one.
        ledger: the groups that ended."""
    ordered = sorted(spans, key=lambda span: span.end)
    kept = newest(spans)
    origin = min(span.start for span in spans)
    slots = lane_order(span.actor for span in spans)
    place = {slot: number for number, slot in enumerate(slots)}
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(span.kind for span in kept))}
    actors: dict[str, Actor] = {}
    boxes: dict[str, list[Any]] = {name: [] for name in ("lane", "track", "kind", "group", "start", "end", "args")}
    args: dict[str, int] = {}
    calls: dict[str, list[int]] = {}
    for number, span in enumerate(kept):
        actor = actors.setdefault(span.actor, Actor(span.actor))
        text = msgspec.json.encode({name: span.args[name] for name in _KEPT if name in span.args}).decode()
        text = text if len(text) <= _LONGEST_ARGS else "{}"
        row = (
            place[actor.worker.slot],
            actor.track_of(span.start, span.end),
            kinds[span.kind],
            group_of(span.args.get("group"), span.args.get("sample")),
            round(span.start - origin, 6),
            round(max(span.start, span.end) - origin, 6),
            args.setdefault(text, len(args)),
        )
        for column, value in zip(boxes.values(), row, strict=True):
            column.append(value)
        if scored := prompts_of(span.args.get("prompts")):
            calls[str(number)] = scored
    shown = {group for group in boxes["group"] if group >= 0}
    groups = {
        str(entry.group): {"entry": msgspec.to_builtins(entry), "prompt": entry.text or None}
        for entry in ledger
        if entry.group in shown
    }
    end = ordered[-1].end - origin
    start = 0.0 if len(kept) == len(ordered) else ordered[-MOST_SPANS - 1].end - origin
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
        "note": _note(len(kept), len(ordered), start, end),
    }


def _note(kept: int, all_: int, start: float, end: float) -> str:
    whole = "Times are seconds since the first span."
    if kept == all_:
        return f"All {all_:,} spans. {whole}"
    return (
        f"The newest {kept:,} of {all_:,} spans, from second {start:.0f} to second {end:.0f}: a page with all of them"
        f" would be too large, and `omni-async watch` shows them. {whole}"
    )

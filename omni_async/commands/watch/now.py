"""Describes the current state of a run as a section of the page: progress, buffers, alerts, workers, newest samples.

Pure functions of the run's answer and its folder's content.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from omni_async.commands.report.alerts import alert_blocks
from omni_async.commands.watch.actions import Action
from omni_async.config.role_table import scalable_roles
from omni_async.config.section import size_text
from omni_async.records.read.alerts import Alert
from omni_async.records.read.follow import Follower
from omni_async.records.read.record import RunStatus
from omni_async.records.write.console import duration
from omni_async.types import MOST, Count, Text, Time, Value
from omni_async.worker import BUILT_IN_ROLES, Worker

Block = dict[str, Any]
_Held = Annotated[int, Meta(ge=-1, lt=MOST)]  # an engine's version, -1 for none yet


class _Told(TypedDict):
    text: Text


class _Progress(TypedDict, total=False):
    update: Count
    updates: Count
    eta_s: Time | None
    reward: Value | None
    told: _Told | None


class _Answer(TypedDict, total=False):
    """The parts of a run's answer that the page shows."""

    doing: Text
    progress: _Progress
    parts: Annotated[dict[Text, dict[Text, Any]], Meta(max_length=20_000)]
    engines: Annotated[dict[Text, _Held], Meta(max_length=20_000)]
    buffers: Annotated[dict[Text, dict[Text, Count | None]], Meta(max_length=100)]
    conservation: Annotated[dict[Text, Count], Meta(max_length=100)]


def require_answer(answer: Mapping[str, Any]) -> None:
    """Raise msgspec.ValidationError unless the page can show a run's answer."""
    msgspec.convert(answer, _Answer)


_GROUPS = ("admitted", "trained", "rejected", "dropped", "live")
_SHOWN_PARTS = 200
_NEWEST_GRIDS = 2


def now_section(
    follower: Follower,
    status: RunStatus,
    answer: Mapping[str, Any] | None,
    alerts: Sequence[Alert],
    actions: Iterable[Action],
    doing: str | None,
) -> dict[str, Any]:
    """Return the section.

    Args:
        follower: the run's folder, as far as it was read.
        status: the run's status.
        answer: the run's last answer over its control socket; None: it does not answer.
        alerts: the current alerts.
        actions: recent actions from the page.
        doing: the run's current activity for a button's request."""
    blocks = [
        _facts(follower, status, answer),
        *msgspec.to_builtins(alert_blocks(alerts)),
        *([_buttons(answer, doing)] if status == "running" else []),
        *_buffers(answer),
        *_pictures(follower),
        *_parts(answer),
        *_done(actions),
    ]
    lead = "Refreshed while you look." if status == "running" else "The run is over."
    return {"id": "now", "title": "Now", "lead": lead, "blocks": blocks, "tabs": []}


def _fact(label: str, value: str, detail: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _facts(follower: Follower, status: RunStatus, answer: Mapping[str, Any] | None) -> Block:
    progress: Mapping[str, Any] = (answer or {}).get("progress") or {}
    last = follower.updates.line(-1) if len(follower.updates) else {}
    update = progress.get("update", int(last.get("update", 0)))
    of = f" of {progress['updates']}" if "updates" in progress else ""
    items = [_fact("Status", status, (answer or {}).get("doing") or _told(progress))]
    left = progress.get("eta_s")
    detail = f"about {duration(left)} left" if left is not None and math.isfinite(left) else _when(last)
    items.append(_fact("Update", f"{update}{of}", detail))
    reward = progress.get("reward", last.get("reward") if "accuracy" not in last else None)
    if reward is not None:
        items.append(
            _fact("Reward", f"{reward:.3f}", "mean of the newest updates" if progress else "of the last update")
        )
    if (rate := last.get("images_per_s")) is not None:
        items.append(
            _fact(
                "Images/s",
                f"{rate:.3g}",
                f"{last.get('images', 0):,.0f} {'so far' if status == 'running' else 'in all'}",
            )
        )
    if (age := last.get("staleness/mean")) is not None:
        detail = f"{last.get('staleness/max', 0):.0f} at most, in the last update"
        reserve, starved = (last.get(f"admission/{name}", 0.0) for name in ("reserve_s", "starved_s"))
        if reserve or starved:
            detail += f"; reserve {reserve:.3g} s, the trainer waited {starved:.3g} s"
        items.append(_fact("Staleness", f"{age:.2g}", detail))
    groups = (answer or {}).get("conservation") or _counted(follower, last)
    if groups:
        counted = ", ".join(f"{groups[name]} {name}" for name in _GROUPS[1:] if name in groups)
        items.append(_fact("Groups", f"{groups.get('admitted', 0):,}", counted))
    return {"kind": "facts", "items": items}


def _counted(follower: Follower, last: Mapping[str, float]) -> dict[str, int]:
    """Return the groups by ending: of the whole run if it is over, otherwise as of its last update."""
    if follower.summary is not None:
        return {name: getattr(follower.summary.counters, name) for name in _GROUPS}
    return {name: int(last[f"conservation/{name}"]) for name in _GROUPS if f"conservation/{name}" in last}


def _told(progress: Mapping[str, Any]) -> str:
    told = progress.get("told")
    return "" if not told else f"last message: {told['text']}"


def _when(last: Mapping[str, float]) -> str:
    try:
        return f"at {datetime.fromtimestamp(last['finished']):%Y-%m-%d %H:%M:%S}"
    except (KeyError, OverflowError, ValueError, OSError):
        return ""


def _buttons(answer: Mapping[str, Any] | None, doing: str | None) -> Block:
    running = answer is not None
    parts = Counter(Worker.parse(name).role for name in (answer or {}).get("parts", ()))
    may = {*scalable_roles()}
    roles = {role: count for role, count in parts.items() if role in may or role not in BUILT_IN_ROLES}
    return {"kind": "actions", "id": "actions", "running": running, "roles": roles if running else {}, "doing": doing}


def _buffers(answer: Mapping[str, Any] | None) -> list[Block]:
    held: Mapping[str, Mapping[str, Any]] = (answer or {}).get("buffers") or {}
    items = []
    for name, one in held.items():
        taken = one.get("reserved", one.get("live", 0) + one.get("awaiting_publication", 0))
        capacity = one.get("capacity")
        shown = size_text if name == "bytes" else str
        of = "no bound" if capacity is None else f"of {shown(capacity)}"
        ready = f", {shown(one['ready'])} ready" if "ready" in one else ""
        items.append({"label": name, "taken": taken, "of": capacity, "text": f"{shown(taken)} {of}{ready}"})
    hint = "Places taken; a full buffer makes the role before it wait."
    return [{"kind": "meters", "id": "buffers-now", "title": "Buffers", "hint": hint, "items": items}] if items else []


def _pictures(follower: Follower) -> list[Block]:
    items: list[dict[str, str]] = []
    for kind, version in reversed(follower.samples):
        name = f"{kind}-{version:06d}.png"
        if len(items) < _NEWEST_GRIDS and not any(one["group"] == kind for one in items):
            what = "Training samples of update" if kind == "train" else "Validation round of version"
            items.append({"group": kind, "src": f"samples/{name}", "label": f"{what} {version}"})
    return [{"kind": "pictures", "id": "newest", "title": "Newest samples", "items": items}] if items else []


def _parts(answer: Mapping[str, Any] | None) -> list[Block]:
    if not answer or not answer.get("parts"):
        return []
    engines = answer.get("engines", {})
    rows = [
        [name, str(where.get("pid", "")), _weights(engines.get(name))]
        for name, where in [*answer["parts"].items()][:_SHOWN_PARTS]
    ]
    more = len(answer["parts"]) - len(rows)
    return [
        {
            "kind": "table",
            "id": "parts",
            "title": "Workers",
            "columns": ["worker", "process", "weights"],
            "rows": rows,
            "hint": f"and {more} more" if more else "",
            "searchable": len(rows) > 12,
            "fold": 8,
        }
    ]


def _weights(held: int | None) -> str:
    return "" if held is None else "none yet" if held < 0 else f"version {held}"


def _done(actions: Iterable[Action]) -> list[Block]:
    rows = [
        [
            f"{datetime.fromtimestamp(one.time):%H:%M:%S}",
            " ".join([one.action, *(f"{role}={count}" for role, count in one.workers.items())]),
            one.address,
            one.result,
        ]
        for one in reversed([*actions])
    ]
    if not rows:
        return []
    columns = ["at", "what", "from", "result"]
    hint = "Recorded in actions.jsonl of the run folder."
    table = {"kind": "table", "id": "done", "title": "Done from this page", "columns": columns, "rows": rows}
    return [{**table, "hint": hint, "searchable": False, "fold": 5}]

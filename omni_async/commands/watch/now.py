"""Describes the current state of a run as a section of the page.

The first screen has the progress, the bottleneck, problems, the reward curve and the newest samples; other alerts,
buffers, accelerators, buttons and workers follow. Pure functions of the run's answer and its folder's content.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
from msgspec import Meta

from omni_async.commands.emulated import emulated
from omni_async.commands.report.alerts import alert_blocks
from omni_async.commands.report.blocks import Axis, Chart, Series, series, thinned
from omni_async.commands.report.setup import bottleneck
from omni_async.commands.report.shown import axes
from omni_async.commands.report.waiting import STAGES, shares_from
from omni_async.commands.watch.actions import Action
from omni_async.commands.watch.report_sections import LIVE_CHARTS
from omni_async.config.role_table import scalable_roles
from omni_async.config.section import size_text
from omni_async.records.read.alerts import Alert
from omni_async.records.read.follow import EVENTS, Follower
from omni_async.records.read.record import RunStatus
from omni_async.records.write.console import duration, groups_left_out
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


class _Measured(TypedDict):
    name: Text
    memory_bytes: Count
    total_bytes: Count
    utilisation: Value | None


class _Device(TypedDict):
    number: Count
    workers: Annotated[list[Text], Meta(max_length=20_000)]
    device: _Measured


class _Answer(TypedDict, total=False):
    """The parts of a run's answer that the page shows."""

    doing: Text
    progress: _Progress
    parts: Annotated[dict[Text, dict[Text, Any]], Meta(max_length=20_000)]
    engines: Annotated[dict[Text, _Held], Meta(max_length=20_000)]
    buffers: Annotated[dict[Text, dict[Text, Count | None]], Meta(max_length=100)]
    conservation: Annotated[dict[Text, Count], Meta(max_length=100)]
    reasons: Annotated[dict[Text, Count], Meta(max_length=100)]
    drop_reasons: Annotated[dict[Text, Count], Meta(max_length=100)]
    devices: Annotated[list[_Device], Meta(max_length=10_000)]


def require_answer(answer: Mapping[str, Any]) -> None:
    """Raise msgspec.ValidationError unless the page can show a run's answer."""
    msgspec.convert(answer, _Answer)


_GROUPS = ("admitted", "trained", "rejected", "dropped", "live")
_RECENT = 5  # updates that name the bottleneck
_SHOWN_PARTS = 200
_SHOWN_WORKERS = 4  # of an accelerator
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
    problems, others = ([one for one in alerts if (one.level == "problem") is first] for first in (True, False))
    marked = emulated(follower.config)
    blocks = [
        *([{"kind": "text", "text": f"{marked}.", "tone": "warning"}] if marked else []),
        _facts(follower, answer),
        *msgspec.to_builtins(alert_blocks(problems)),
        *_curve(follower),
        *_pictures(follower),
        *_buffers(answer),
        *_devices(answer),
        *([_buttons(answer, doing)] if status == "running" else []),
        *msgspec.to_builtins(alert_blocks(others)),
        *_left_out(follower, answer),
        *_parts(answer),
        *_done(actions),
    ]
    return {"id": "now", "title": "Now", "lead": _lead(status, answer), "blocks": blocks, "tabs": []}


def _lead(status: RunStatus, answer: Mapping[str, Any] | None) -> str:
    """Return what the run does, or the last message of a role."""
    if status != "running":
        return "The run is over."
    told = ((answer or {}).get("progress") or {}).get("told")
    return (answer or {}).get("doing") or (f"Last message: {told['text']}" if told else "Refreshed while you look.")


def _fact(label: str, value: str, detail: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _facts(follower: Follower, answer: Mapping[str, Any] | None) -> Block:
    progress: Mapping[str, Any] = (answer or {}).get("progress") or {}
    last = follower.updates.line(-1) if len(follower.updates) else {}
    update = progress.get("update", int(last.get("update", 0)))
    of = f" of {progress['updates']}" if "updates" in progress else ""
    left = progress.get("eta_s")
    detail = f"about {duration(left)} left" if left is not None and math.isfinite(left) else _when(last)
    items = [_fact("Update", f"{update}{of}", detail)]
    shares = _shares(follower)
    staleness = follower.config.get("staleness")
    if {"rollout", "trainer"} <= shares.keys():
        budget = staleness.get("max_updates") if isinstance(staleness, dict) else None
        found = bottleneck(shares, budget)
        items.append(_fact("Bottleneck", found.value, found.detail))
    reward = progress.get("reward", last.get("reward") if "accuracy" not in last else None)
    if reward is not None:
        items.append(
            _fact("Reward", f"{reward:.3f}", "mean of the newest updates" if progress else "of the last update")
        )
    if (rate := last.get("images_per_s")) is not None:
        made = "read" if "accuracy" in last else "generated"
        items.append(
            _fact(
                "Samples/s",
                f"{rate:.3g}",
                f"{last.get('images', 0):,.0f} {made} for training up to the last update",
            )
        )
    if (rate := last.get("tokens_per_s")) is not None:
        middle, long, versions = (last.get(f"answer_{name}", 0) for name in ("tokens/median", "tokens/p95", "versions"))
        detail = f"answers of {middle:.0f} tokens in the median, {long:.0f} at 95 %, {versions:.2g} versions inside"
        items.append(_fact("Tokens/s", f"{rate:.3g}", detail))
    if (age := last.get("staleness/mean")) is not None:
        detail = f"{last.get('staleness/max', 0):.0f} at most, in the last update"
        reserve, starved = (last.get(f"admission/{name}", 0.0) for name in ("reserve_s", "starved_s"))
        if reserve or starved:
            detail += f"; reserve {reserve:.3g} s, the trainer waited {starved:.3g} s"
        items.append(_fact("Staleness", f"{age:.2g}", detail))
    groups, _, _ = _endings(follower, answer)
    if groups.get("admitted"):
        counted = ", ".join(f"{groups[name]} {name}" for name in _GROUPS[1:] if name in groups)
        items.append(_fact("Groups", f"{groups['admitted']:,}", counted))
    return {"kind": "facts", "items": items, "compact": True}


def _shares(follower: Follower) -> Mapping[str, Mapping[str, float]]:
    """Return role -> state -> share of the time, of the whole run if it is over, otherwise of its newest updates."""
    if follower.summary is not None:
        return {role: states for role, states in follower.summary.busy.items() if "busy" in states}
    columns = ((role, follower.updates.column(f"busy/{role}", _RECENT)) for role in STAGES)
    found = ((role, column[np.isfinite(column)]) for role, column in columns)
    return shares_from({role: float(np.median(column)) for role, column in found if len(column)})


_Counts = Mapping[str, int]


def _endings(follower: Follower, answer: Mapping[str, Any] | None) -> tuple[_Counts, _Counts, _Counts | None]:
    """Return the groups by ending, then the reasons of rejected, and of dropped groups.

    They are the running job's, the summary's, or the ledger's."""
    if answer and "conservation" in answer:
        return answer["conservation"], answer.get("reasons", {}), answer.get("drop_reasons", {})
    if (summary := follower.summary) is not None:
        return msgspec.to_builtins(summary.counters), summary.reject_reasons, summary.drop_reasons
    ended = follower.ended
    counts = {"admitted": len(ended), **{event: ended.events[event] for event in EVENTS}}
    return counts, ended.why("rejected"), ended.why("dropped")


def _left_out(follower: Follower, answer: Mapping[str, Any] | None) -> list[Block]:
    """Return a sentence per ending on the groups that were not trained, with their reasons."""
    counts, rejected, dropped = _endings(follower, answer)
    if not {*EVENTS, "admitted"} <= counts.keys():
        return []
    lines = groups_left_out(counts, rejected, dropped)
    return [{"kind": "text", "text": f"{line}.", "tone": "plain"} for line in lines]


_MOST_POINTS = 400  # of the curve, which is sent again whenever it changes


def _curve(follower: Follower) -> list[Block]:
    """Return the chart of the training reward (of preferences: the accuracy) and of the validation reward."""
    updates = follower.updates
    reward, accuracy = LIVE_CHARTS
    key, what = (accuracy, "preference accuracy") if accuracy in updates else (reward, "training reward")
    versions, minutes = updates.column("update"), np.nan_to_num(updates.column("wall_s")) / 60
    rounds = sorted((one for one in follower.rounds if one.reward is not None), key=lambda one: one.version)
    at = [float(minutes[i - 1]) if (i := np.searchsorted(versions, one.version, "right")) else 0.0 for one in rounds]
    curves = [
        _thin(series(what, _places(versions.tolist(), minutes.tolist()), updates.column(key).tolist())),
        _thin(series("validation reward", _places([one.version for one in rounds], at), [o.reward for o in rounds], 1)),
    ]
    drawn = [one for one in curves if any(value is not None for value in one.y)]
    if not drawn:
        return []
    hint = "Training prompts differ from update to update; validation prompts do not."
    return [msgspec.to_builtins(Chart(key, "Reward" if key == reward else "Learning", hint, axes(), Axis(""), drawn))]


def _places(versions: Sequence[float], minutes: Sequence[float]) -> dict[str, list[float]]:
    return {"update": [float(one) for one in versions], "minutes": [round(one, 4) for one in minutes]}


def _thin(one: Series) -> Series:
    kept = thinned(one.y, _MOST_POINTS)
    x = {axis: [places[i] for i in kept] for axis, places in one.x.items()}
    return msgspec.structs.replace(one, x=x, y=[one.y[i] for i in kept])


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


def _devices(answer: Mapping[str, Any] | None) -> list[Block]:
    items = []
    for one in (answer or {}).get("devices") or ():
        device = one["device"]
        used, total, busy = device["memory_bytes"], device["total_bytes"], device["utilisation"]
        share = "" if busy is None else f", busy {busy:.0%}"
        label = f"{one['number']}: {', '.join(one['workers'][:_SHOWN_WORKERS])}"
        items.append(
            {"label": label, "taken": used, "of": total, "text": f"{size_text(used)} of {size_text(total)}{share}"}
        )
    names = ", ".join(dict.fromkeys(one["device"]["name"] for one in (answer or {}).get("devices") or ()))
    hint = f"{names}. Memory in use by all processes; busy over the last 30 seconds."
    title = "Accelerators"
    return [{"kind": "meters", "id": "devices-now", "title": title, "hint": hint, "items": items}] if items else []


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

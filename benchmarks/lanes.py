"""Draws who works when: a job on emulated devices, in step and asynchronous, on one axis of time.

The roles, the coordinator and their messages are those of a run, in one process. Time is virtual, so the same recipe
and profile always give the same lanes. Waits for nothing real.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes

from benchmarks.arguments import EMULATED
from omni_async.config import Config, load
from omni_async.control.events import RunEvent
from omni_async.records.write.activity import WAITS
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.timeline import union
from omni_async.runtime.inprocess import events_of
from omni_async.runtime.preflight.check import preflight
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.simulation.virtual_time import run as run_in_virtual_time
from omni_async.types import Span
from omni_async.worker import Worker

RECIPE = EMULATED / "qwen_image_lora_h800.yaml"
_UNSCALED = "emulation.time_scale=1"  # spans have the profile's seconds
_WARM_UP = 4  # updates that are not drawn: the pipeline fills
_DRAWN = 2  # updates in step that the time axis has
_UPDATES = "trainer.updates=16"
_ROLES = ("rollout", "reward", "trainer")  # top to bottom


class Lanes(NamedTuple):
    """What every worker did in a stretch of time.

    `busy`: worker -> disjoint (start, end), in seconds since the stretch began. `ends`: when updates ended in it.
    `update_s`: mean seconds per update of the whole steady part."""

    busy: dict[str, list[tuple[float, float]]]
    ends: list[float]
    update_s: float


def lanes_of(recipe: Path = RECIPE) -> tuple[Lanes, Lanes]:
    """Run a recipe with `schedule=sync` and with `schedule=async`; return the same number of seconds of both."""
    in_step = _emulated(load(recipe, ["schedule=sync", _UNSCALED, _UPDATES]))
    seconds = _ends(in_step)[_WARM_UP + _DRAWN - 1] - _ends(in_step)[_WARM_UP - 1]
    overlapped = _emulated(load(recipe, ["schedule=async", _UNSCALED, _UPDATES]))
    return cut(in_step, seconds), cut(overlapped, seconds)


def cut(events: Sequence[RunEvent], seconds: float) -> Lanes:
    """Return the lanes of a job for some seconds, from the end of its fourth update on."""
    ends = _ends(events)
    start = ends[_WARM_UP - 1]
    busy: dict[str, list[tuple[float, float]]] = {}
    for span in _spans(events):
        worker = Worker.parse(span.actor)
        if worker.role in _ROLES and span.kind not in WAITS:
            begins, stops = max(0.0, span.start - start), min(seconds, span.end - start)
            if begins < stops:
                busy.setdefault(worker.slot, []).append((begins, stops))
    steady = [later - earlier for earlier, later in pairwise(ends[_WARM_UP - 1 : -2])]
    inside = [end - start for end in ends if 0 < end - start <= seconds + 1e-6]
    return Lanes({name: union(own) for name, own in sorted(busy.items(), key=_place)}, inside, fmean(steady))


def draw_lanes(axes: Axes, in_step: Lanes, overlapped: Lanes, colours: tuple[str, str]) -> None:
    """Draw the lanes in step above, the asynchronous ones below. A mark on top of either is the end of an update."""
    rows: list[str] = []
    for name, lanes, colour in zip(("synchronous", "asynchronous"), (in_step, overlapped), colours, strict=True):
        top = len(rows)
        for worker, busy in lanes.busy.items():
            axes.broken_barh([(a / 60, (b - a) / 60) for a, b in busy], (len(rows) + 0.12, 0.76), color=colour)
            rows.append(worker)
        axes.plot([end / 60 for end in lanes.ends], [top - 0.12] * len(lanes.ends), "v", color=colour, clip_on=False)
        text = f"{name}: an update takes {lanes.update_s:.0f} s"
        axes.text(0, top - 0.3, text, color=colour, fontweight="bold", va="bottom")
        rows += [""] if lanes is in_step else []
    axes.set_yticks([row + 0.5 for row, name in enumerate(rows) if name], [name for name in rows if name])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows), -1.1)
    axes.set_xlim(left=0)
    axes.set_xlabel("minutes of 5 emulated GPUs")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _place(lane: tuple[str, object]) -> tuple[int, str]:
    return _ROLES.index(Worker.parse(lane[0]).role), lane[0]


def _ends(events: Sequence[RunEvent]) -> list[float]:
    return [event.data["finished"] for event in events if event.kind == "update"]


def _spans(events: Sequence[RunEvent]) -> list[Span]:
    return [span for event in events if event.kind == "spans" for span in event.data["spans"]]


def _emulated(config: Config) -> list[RunEvent]:
    """Run a job in virtual time and return its events."""
    with tempfile.TemporaryDirectory() as folder:
        return run_in_virtual_time(events_of(preflight(config), RunDirectory(Path(folder)), VirtualClock))

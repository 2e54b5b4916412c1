"""Implements `omni-async status`, `scale` and `stop`, from the answer of a run or from the files in its folder."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from omni_async.checkpoint.folders import newest_first, version_of
from omni_async.commands.command_line import add_command, newest_run, run_folder
from omni_async.commands.emulated import emulated_run
from omni_async.config import ConfigError
from omni_async.config.draws import rate_unit
from omni_async.config.reading import is_within
from omni_async.config.redact import one_line
from omni_async.config.role_table import scalable_roles
from omni_async.config.section import size_text
from omni_async.control.rounds import Round
from omni_async.records.read.next_steps import next_steps
from omni_async.records.read.record import ended_groups, engine_of, reason_of
from omni_async.records.read.rounds import is_round, read_rounds
from omni_async.records.write.console import columns, cpu_line, duration, groups_left_out, validated, validation_lines
from omni_async.records.write.files import read_foreign
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Summary, ValidationPoint, read_summary, with_rounds
from omni_async.runtime.driver.control_socket import MOST_WORKERS, ControlError, NotRunning, Request, ask
from omni_async.types import LedgerEntry, count, finite
from omni_async.worker import BUILT_IN_ROLES

_STATUS = """\
Show the state of a job. For a running job: update and time left, reward, staleness, the last validation round, how
groups ended, the last message of a role with its time (a scorer is down, for example), workers with their processes
and the versions that engines hold, buffers, and the memory and utilisation of accelerators. For a job that ended or was
killed: the files that it left.

  omni-async status
  omni-async status runs/quickstart-20260101-120000 --json
"""

_SCALE = """\
Change the number of engines, reward workers or workers of an installed role of a running job. New engines get work
once they hold the newest weights; the command waits for this and reports it. Engines that leave finish their samples
first. Training continues meanwhile:

  omni-async scale runs/quickstart-20260101-120000 rollout=3
  omni-async scale runs/quickstart-20260101-120000 rollout=1 reward=2
"""


_STOP = """\
Stop a running job as Ctrl-C does: it writes a checkpoint, and the same recipe with checkpoint.resume=auto resumes
from it:

  omni-async stop runs/quickstart-20260101-120000
"""


def add_operations(commands: Any) -> None:
    handler, group = f"{__name__}:operate", "look at a run, and steer it"
    status = add_command(commands, "status", "show how a job is, or how it ended", _STATUS, handler, group)
    scale = add_command(commands, "scale", "change a running job's engines or reward workers", _SCALE, handler, group)
    stop = add_command(commands, "stop", "end a running job, with a checkpoint", _STOP, handler, group)
    status.add_argument("run", nargs="?", type=run_folder, help="its run folder (default: the newest run in runs/)")
    for parser in (scale, stop):
        parser.add_argument("run", type=run_folder, help="its run folder, or its name in runs/")
    status.add_argument("--json", action="store_true", help="for a program")
    scale.add_argument("workers", nargs="+", metavar="ROLE=N", help="rollout=N, reward=N or POOL=N, at least 1")


def operate(options: argparse.Namespace) -> int:
    if options.run is None:
        options.run = newest_run(Path("runs"))
    if not (options.run / "config.yaml").is_file():
        raise ConfigError(f"{options.run} is not a run folder")
    marked = filter(None, [emulated_run(options.run)])
    request = Request(
        scale=_workers(options.workers) if options.command == "scale" else {}, stop=options.command == "stop"
    )
    try:
        status = ask(options.run / "control.sock", request, tell=lambda text: _tell([one_line(text)]))
    except NotRunning as error:
        found = left_behind(options.run)
        if options.command != "status":
            if found.summary is not None and not found.running:
                raise ConfigError(f"the run is over: {_ended(found.summary, found.rate_unit)[0]}") from None
            raise ConfigError(str(error)) from None
        if options.json:
            return _say([msgspec.json.format(msgspec.json.encode(found), indent=2).decode()])
        left = map(one_line, left_behind_lines(found))
        return _say([*marked, *left, *(() if found.running else next_steps(RunDirectory(options.run)))])
    except ControlError as error:
        raise ConfigError(str(error)) from None
    if request.stop:
        if "doing" in status:  # no session is alive that could save anything
            return _say([f"the run stops without a further checkpoint: it is {one_line(str(status['doing']))}"])
        return _say(["the run stops after it has written a checkpoint"])
    if getattr(options, "json", False):
        return _say([json.dumps(status, indent=2)])
    try:
        lines = [*marked, *map(one_line, running_lines(status))]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{options.run}: this version does not know its answer: {error!r}; use --json") from None
    return _say(lines)


def _say(lines: Iterable[str]) -> int:
    _tell(lines)
    return 0


def _tell(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()  # so that a line is visible before any wait that it announces


_MOST_ROUNDS = 1000
_OWN_ROLE = re.compile(r"[a-z][a-z_]{0,39}")


def _workers(words: list[str]) -> dict[str, int]:
    roles = scalable_roles()
    workers: dict[str, int] = {}
    for word in words:
        role, equals, number = word.partition("=")
        # Python refuses to convert thousands of digits.
        fits = len(number) < 20 and number.isdecimal() and 1 <= int(number) <= MOST_WORKERS
        # A run refuses the name of a pool or a server that it does not have.
        is_own = _OWN_ROLE.fullmatch(role) is not None and role not in BUILT_IN_ROLES
        if not (role in roles or is_own) or not equals or not fits:
            expected = " or ".join(f"{role}=N" for role in roles)
            raise ConfigError(f"scale: {one_line(word, 100)!r}: expected {expected} with N from 1 to {MOST_WORKERS}")
        if role in workers:
            raise ConfigError(f"scale: {word!r}: {role} is there twice")
        workers[role] = int(number)
    return workers


# ---- status of a run that answers ------------------------------------------------------------------------------------

_GROUPS = ("admitted", "trained", "rejected", "dropped", "live")


def running_lines(status: Mapping[str, Any]) -> list[str]:
    """Render a running job for a person: its progress and learning, then its parts and buffers."""
    if "doing" in status:
        return [f"it is {status['doing']}"]
    lines = _progress(status["progress"]) if "progress" in status else []
    lines += _groups(status["conservation"], status.get("reasons", {}), status.get("drop_reasons"))
    if (told := status.get("progress", {}).get("told")) is not None:
        lines.append(f"last message{_at(told['at'])}: {told['text']}")
    head = ["part", "process", "weights", *(["address"] if any(status["addresses"].values()) else [])]
    parts = [_part(name, where, status)[: len(head)] for name, where in status["parts"].items()]
    buffers = [_buffer(name, held) for name, held in status["buffers"].items()]
    lines += ["", *columns([head, *parts]), "", *columns([["places in", "taken", "of", "ready"], *buffers])]
    if devices := status.get("devices"):
        lines += ["", *columns([["accelerator", "memory", "of", "busy", "used by"], *map(_device, devices)])]
    if scorers := status.get("scorers"):
        rows = [_scorer(label, one) for label, one in scorers.items()]
        lines += ["", *columns([["scorer", "samples in it", "waiting", "answers in", "1 of 20 in"], *rows])]
    return [*lines, "", f"faults mended: {status['faults']}"]


def _device(found: Mapping[str, Any]) -> list[str]:
    """Render an accelerator: its memory in use by all processes, and the share of the last 30 s that it was busy."""
    one, busy = found["device"], found["device"]["utilisation"]
    memory = (size_text(one[name]) for name in ("memory_bytes", "total_bytes"))
    share = "" if busy is None else f"{busy:.0%}"
    return [f"{found['number']} {one['name']}", *memory, share, ", ".join(found["workers"])]


def _scorer(label: str, found: Mapping[str, Any]) -> list[str]:
    """Render a scorer's current load, and the median and 95th percentile of its answer times in seconds."""
    seconds = [found.get(f"answer_s/p{percent}") for percent in (50, 95)]
    took = ["" if one is None else f"{one:.3g} s" for one in seconds]
    return [label, str(found["in_flight"]), str(found["queued"]), *took]


def _progress(found: Mapping[str, Any]) -> list[str]:
    left = "no update of this attempt yet" if found["eta_s"] is None else f"about {duration(found['eta_s'])} left"
    numbers = []
    if found["reward"] is not None:
        numbers.append(f"reward {found['reward']:.3f} (mean of the last {min(5, found['update'])} updates)")
    learned = ("accuracy", "margin", "grad_norm", "clip_fraction")
    numbers += [f"{name} {found[name]:.4g}" for name in learned if name in found]
    if (mean := found["staleness/mean"]) is not None:
        numbers.append(f"staleness {mean:.1f} updates on average, {found['staleness/max']:g} at most")
    reserve, starved = (found.get(f"admission/{name}", 0.0) for name in ("reserve_s", "starved_s"))
    if reserve or starved:
        numbers.append(f"reserve {reserve:.3g} s (trainer waited {starved:.3g} s)")
    if found["images_per_s"] is not None:
        numbers.append(f"{found.get('rate_unit', 'images/s')} {found['images_per_s']:.1f}")
    lines = [f"update {found['update']}/{found['updates']}, {left}", *filter(None, [", ".join(numbers)])]
    if (validation := found["validation"]) is not None:
        lines.append(validated(msgspec.convert(validation, ValidationPoint)))
    return lines


def _part(name: str, where: Mapping[str, Any], status: Mapping[str, Any]) -> list[str]:
    held = status["engines"].get(name)
    weights = "" if held is None else "none yet" if held < 0 else f"version {held}"
    return [name, str(where["pid"]), weights, status["addresses"].get(name, "")]


def _buffer(name: str, held: Mapping[str, int]) -> list[str]:
    taken = held["reserved"] if "reserved" in held else held.get("live", 0) + held.get("awaiting_publication", 0)
    if name == "bytes":
        bound = "no bound" if held["capacity"] is None else size_text(held["capacity"])
        return [name, size_text(taken), bound, size_text(held["ready"])]
    return [name, str(taken), str(held["capacity"]), str(held.get("ready", ""))]


def _groups(counts: Mapping[str, int], rejected: Mapping[str, int], dropped: Mapping[str, int] | None) -> list[str]:
    counted = ", ".join(f"{counts[name]} {name}" for name in _GROUPS)
    why = groups_left_out(counts, rejected, dropped) if rejected or dropped else []
    return [f"groups: {counted}", *why]


# ---- a run that does not answer --------------------------------------------------------------------------------------


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run that does not answer.

    running: whether another process still runs it, for example on another machine.
    update: the last update in its metrics, 0 without one; numbers: that update's.
    checkpoint: the newest folder.
    ended: groups by ending, and reject_reasons, drop_reasons: the reasons, from the ledger.
    unread: why some lines of the ledger are not counted; None: all are counted.
    resumes_from: the update that a running attempt continues from, until its first update; later ones do not count.
    rate_unit: of `images_per_s` in the numbers and in the summary."""

    run: str
    running: bool
    summary: Summary | None
    update: int
    finished: float | None
    numbers: dict[str, float]
    validation: ValidationPoint | None
    checkpoint: str | None
    ended: dict[str, int] = {}
    reject_reasons: dict[str, int] = {}
    drop_reasons: dict[str, int] = {}
    unread: str | None = None
    resumes_from: int | None = None
    rate_unit: str = "images/s"


def left_behind(folder: Path) -> LeftBehind:
    """Read the run's files. Raises ConfigError, one line, if they cannot be read."""
    run = RunDirectory(folder)
    resumption = run.resumption()
    try:
        summary = read_summary(run.summary) if os.path.lexists(run.summary) and resumption is None else None
        rounds, last = _measured(run)
        ended = _endings(run, None if resumption is None else resumption.groups)
    except (OSError, ValueError, RecursionError) as error:
        where = f"{Path(error.filename).name}: " if isinstance(error, OSError) and error.filename else ""
        raise ConfigError(f"{folder}: its summary or metrics cannot be read: {where}{reason_of(error)}") from None
    summary = summary and with_rounds(summary, rounds)
    learned = ("accuracy", "margin") if "accuracy" in last else ("reward",)  # preferences have no reward
    return LeftBehind(
        run=run.run_id,
        running=run.is_running(),
        summary=summary,
        update=int(last.get("update", 0)),
        finished=last.get("finished"),
        numbers={name: last[name] for name in (*learned, "staleness/mean", "images_per_s") if name in last},
        validation=ValidationPoint.of(rounds[-1]) if rounds else None,
        **ended,
        resumes_from=None if resumption is None else resumption.update,
        rate_unit=rate_unit(engine_of(run)),
        checkpoint=next((str(path) for path in newest_first(run.checkpoints) if is_within(path, folder)), None),
    )


def _measured(run: RunDirectory) -> tuple[list[Round], dict[str, float]]:
    """Return the newest validation rounds, and the numbers of the last update; the file may have been edited."""
    rounds: deque[dict[str, Any]] = deque(maxlen=_MOST_ROUNDS)
    last: dict[str, float] = {}
    for line in run.read_metrics():
        if is_round(line):
            rounds.append(line)
        elif "finished" in line and count(line["update"]) is not None:
            last = {name: number for name, value in line.items() if (number := finite(value)) is not None}
    return read_rounds(rounds), last


def _endings(run: RunDirectory, lines: int | None) -> dict[str, Any]:
    """Return the endings of groups and their reasons from the ledger, and why some of its lines are not counted.

    `lines`: how many count; None: all."""
    entries, unread = read_foreign(run.ledger, LedgerEntry, run.path)
    counts = dict(zip(("ended", "reject_reasons", "drop_reasons"), ended_groups(entries[:lines]), strict=True))
    return {**counts, "unread": unread}


def left_behind_lines(found: LeftBehind) -> list[str]:
    """Render for a person how a run ended, or that it was interrupted, and how to continue it."""
    if found.summary is not None and not found.running:
        return [*_ended(found.summary, found.rate_unit), *_goes_on(found)]
    running = "it is running, but does not answer from here: it may be starting or ending, or run on another machine"
    killed = "it is not running, and it left no summary: it was killed, or the machine went down"
    lines = [f"{found.run}: {running if found.running else killed}"]
    if found.resumes_from is not None:
        lines.append(f"it resumes from update {found.resumes_from}, and makes later updates again")
    if not found.update:
        lines.append("no update was made")
    else:
        names = {"images_per_s": found.rate_unit}
        numbers = "".join(f", {names.get(name, name)} {value:.3g}" for name, value in found.numbers.items())
        lines.append(f"the last update was {found.update}{_at(found.finished)}{numbers}")
    if (point := found.validation) is not None:
        lines.append(validated(point))
    if found.ended:
        lines += groups_left_out(found.ended, found.reject_reasons, found.drop_reasons)
    if found.unread is not None:
        lines.append(f"groups are counted from part of ledger.jsonl: {found.unread}")
    return lines if found.running else [*lines, *_goes_on(found)]


def _at(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return f", at {datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):  # no valid time
        return ""


def _ended(summary: Summary, unit: str) -> list[str]:
    reason = f" ({summary.reason})" if summary.reason else ""
    made = f"{summary.updates} update{'s' * (summary.updates != 1)}, {duration(summary.wall_s)} after loading"
    lines = [f"{summary.run}: {summary.status}{reason} after {made}"]
    if (first := summary.first_reward) is not None and (last := summary.last_reward) is not None:
        lines.append(f"reward {first:.3f} -> {last:.3f} (means of the first and the last 5 updates)")
    if summary.validation:
        lines += validation_lines(summary.validation, summary.validation_change)
    if trained := sum(summary.staleness.values()):
        mean = sum(age * count for age, count in summary.staleness.items()) / trained
        ages = f"staleness {mean:.1f} updates on average, {summary.staleness_max} at most"
        lines.append(f"{ages}; {unit} {summary.images_per_s:.1f}")
    lines += [cpu_line(summary.cpu_s)] if summary.cpu_s else []
    counts = msgspec.to_builtins(summary.counters)
    return [*lines, *_groups(counts, summary.reject_reasons, summary.drop_reasons)]


def _goes_on(found: LeftBehind) -> list[str]:
    if found.checkpoint is None:
        return ["it left no checkpoint to resume from"]
    more = " and a larger trainer.updates" if found.summary is not None and found.summary.status == "done" else ""
    way = f"the same recipe with checkpoint.resume={Path(found.checkpoint).parents[1]}{more} resumes it"
    version = version_of(Path(found.checkpoint))
    lost = 0 if version is None else found.update - version
    again = f", and makes {lost} update{'s' * (lost != 1)} again" if lost > 0 else ""
    return [f"its newest checkpoint is {found.checkpoint}; {way}{again}"]

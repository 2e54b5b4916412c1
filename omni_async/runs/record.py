"""Reads a run's folder, whatever became of the run: it may be under way, killed, interrupted, resumed or failed.

`read_run` refuses what is no run folder and nothing else: lines that were cut off, and files that cannot be read or
that another version wrote, are left out and counted (`Run.left_out`). Imports neither torch nor Ray.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from omni_async.checkpoint.folders import by_version
from omni_async.config import ConfigError
from omni_async.config.reading import open_file, read_file
from omni_async.config.yaml_text import parse_yaml
from omni_async.control.rounds import Round
from omni_async.runs.rounds import is_round, read_rounds
from omni_async.runs.spans import is_in_time
from omni_async.tracking.attempts import Attempt, Fault
from omni_async.tracking.rundir import RunDirectory
from omni_async.tracking.summary import Summary, read_summary
from omni_async.tracking.timeline import read_trace
from omni_async.types import LedgerEntry, Span

T = TypeVar("T")

RunStatus = Literal["running", "done", "interrupted", "failed", "killed"]
GridKind = Literal["train", "validation"]
_MEDIA = (".png", ".mp4", ".wav")
_GRID = re.compile(r"(train|validation)-(\d{6,})\.jsonl")


@dataclass(frozen=True)
class Tile:
    """One sample of a grid; the media are paths, None for those that it does not have."""

    number: int
    prompt: str
    target: str | None = None
    image: Path | None = None
    video: Path | None = None
    audio: Path | None = None
    row: dict[str, Any] = field(default_factory=dict)  # the whole line of the table


@dataclass(frozen=True)
class Grid:
    """The samples of an update (`kind` "train") or of a validation round, and the image with all of them."""

    kind: GridKind
    version: int
    image: Path
    tiles: tuple[Tile, ...]


@dataclass
class Run:
    """A run as its folder has it. Times are seconds since the epoch; lists are in the order of the files.

    `config`: config.yaml as plain data. `updates` and `rounds`: the lines of metrics.jsonl, of updates and of
    validation rounds. `summary`: None while the run is under way, after a kill, and where it cannot be read.
    `checkpoints`: version -> folder. `left_out`: file name -> why something of it is missing here."""

    folder: RunDirectory
    status: RunStatus
    config: dict[str, Any]
    updates: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    ledger: list[LedgerEntry]
    faults: list[Fault]
    attempts: list[Attempt]
    summary: Summary | None
    checkpoints: dict[int, Path]
    left_out: dict[str, str]

    @property
    def id(self) -> str:
        return self.folder.run_id

    @property
    def path(self) -> Path:
        return self.folder.path

    @property
    def reason(self) -> str | None:
        """Return why the run ended, unless it is done or killed."""
        if self.status in ("running", "killed", "done"):
            return None
        return self.summary.reason if self.summary else self.attempts[-1].reason

    @property
    def profile(self) -> Path | None:
        """Return the path of the run's profile, if it has one."""
        return self.folder.profile if self.folder.profile.is_file() else None

    def setting(self, path: str, default: Any = None) -> Any:
        """Return a value of the configuration, `rollout.sde.kind` say; `default` where there is none."""
        value: Any = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    @cached_property
    def validation(self) -> list[Round]:
        """The validation rounds by version, as they are compared."""
        return read_rounds(self.rounds)

    @cached_property
    def grids(self) -> list[Grid]:
        """Read the tables of samples, validation rounds first, each by version. Emulated runs have none."""
        found = []
        for path in sorted(self.folder.samples.glob("*.jsonl")) if self.folder.samples.is_dir() else ():
            if (made := _GRID.fullmatch(path.name)) is not None:
                kind: GridKind = "train" if made[1] == "train" else "validation"
                rows = self._read(path, dict[str, Any])
                tiles = tuple(_tile(number, row, path.parent) for number, row in enumerate(rows))
                found.append(Grid(kind, int(made[2]), path.with_suffix(".png"), tiles))
        return sorted(found, key=lambda grid: (grid.kind != "validation", grid.version))

    def spans(self) -> list[Span]:
        """Read the timeline of the newest attempt: `spans.jsonl` while there is one, else `trace.json`.

        Nothing is kept here: a run of a day has a million spans."""
        if self.folder.spans.exists():
            return [span for span in self._read(self.folder.spans, Span) if is_in_time(span)]
        try:
            spans = read_trace(self.folder.trace) if self.folder.trace.exists() else []
            return [span for span in spans if is_in_time(span)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.left_out[self.folder.trace.name] = f"cannot be read: {error}"
            return []

    def _read(self, path: Path, kind: type[T]) -> list[T]:
        records, why = _lines(path, kind)
        if why:
            self.left_out[path.name] = why
        return records


def read_run(folder: Path) -> Run:
    """Read the folder of a run. Raises ConfigError, one line, if it is none."""
    run = RunDirectory(folder)
    if not run.config_yaml.is_file():
        raise ConfigError(
            f"{folder} is not a run folder: it has no config.yaml; give the folder that `omni-async train` made in"
            " run.dir, such as runs/quickstart-20260101-120000"
        )
    left_out: dict[str, str] = {}

    def lines(path: Path, kind: type[T]) -> list[T]:
        records, why = _lines(path, kind)
        if why:
            left_out[path.name] = why
        return records

    metrics = [line for line in lines(run.metrics, dict[str, Any]) if _is_count(line.get("update"))]
    updates = [line for line in metrics if "finished" in line]
    attempts = lines(run.attempts, Attempt)
    summary = _summary(run, left_out)
    return Run(
        folder=run,
        status=run_status(run, summary, attempts, updates[-1]["finished"] if updates else 0.0),
        config=run_config(run, left_out),
        updates=updates,
        rounds=[line for line in metrics if is_round(line)],
        ledger=[entry for entry in lines(run.ledger, LedgerEntry) if is_entry(entry)],
        faults=lines(run.faults, Fault),
        attempts=attempts,
        summary=summary,
        checkpoints=_checkpoints(run),
        left_out=left_out,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_entry(entry: LedgerEntry) -> bool:
    """Return whether the numbers of a line are such as a run writes; one that was edited may have any."""
    versions = (entry.admitted_version, entry.trained_version, entry.staleness)
    return all(
        number is None or 0 <= number < 2**31 for number in (entry.group, entry.prompt, entry.attempts, *versions)
    )


def _lines(path: Path, kind: type[T]) -> tuple[list[T], str | None]:
    """Decode a file of JSON lines; return why some are missing, too. The last may be one that is being written."""
    records: list[T] = []
    bad = 0
    decoder = msgspec.json.Decoder(kind)
    try:
        with open_file(path) as file:
            for line in file:
                try:
                    records.append(decoder.decode(line))
                except (ValueError, RecursionError):
                    bad += line.endswith(b"\n")
    except FileNotFoundError:
        return [], None
    except OSError as error:
        return records, f"cannot be read: {error.strerror or error}"
    return records, f"{bad} {'line' if bad == 1 else 'lines'} cannot be read" if bad else None


def ended_groups(ledger: Iterable[LedgerEntry]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return how groups ended, with all as `admitted`; the reasons of rejected, and of dropped ones -> their number."""
    events, rejected, dropped = Counter[str](), Counter[str](), Counter[str]()
    for entry in ledger:
        events[entry.event] += 1
        if entry.reason is not None:
            (dropped if entry.event == "dropped" else rejected)[entry.reason] += 1
    counts = {"admitted": events.total(), **{name: events[name] for name in ("trained", "rejected", "dropped")}}
    return counts, dict(rejected), dict(dropped)


def _summary(run: RunDirectory, left_out: dict[str, str]) -> Summary | None:
    try:
        return read_summary(run.summary)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        left_out[run.summary.name] = f"cannot be read: {error}"
        return None


def run_config(run: RunDirectory, left_out: dict[str, str]) -> dict[str, Any]:
    """Read config.yaml as plain data; nothing, and a reason in `left_out`, if it cannot be read."""
    try:
        found = parse_yaml(read_file(run.config_yaml, largest=10_000_000).decode(), run.config_yaml.name)
    except (OSError, ValueError, RecursionError) as error:
        left_out[run.config_yaml.name] = f"cannot be read: {error}"
        return {}
    return found if isinstance(found, dict) else {}


def run_status(run: RunDirectory, summary: Summary | None, attempts: list[Attempt], last: Any) -> RunStatus:
    """Return what became of a run; `last`: when its newest update ended, in seconds since the epoch."""
    if run.is_running():
        return "running"
    if summary is not None:
        return summary.status
    # A full disk leaves no summary; the attempt's line says how it ended, unless a later one was killed.
    if attempts and isinstance(last, int | float) and attempts[-1].ended >= last:
        return attempts[-1].status
    return "killed"


def _checkpoints(run: RunDirectory) -> dict[int, Path]:
    try:
        return by_version(run.checkpoints)
    except OSError:
        return {}


def is_plain_file(path: Path) -> bool:
    """Return whether it is a file itself, and no link to one."""
    return path.is_file() and not path.is_symlink()


def _tile(number: int, row: dict[str, Any], folder: Path) -> Tile:
    def media(name: str) -> Path | None:
        value = row.get(name)
        # A table that somebody edited leads nowhere else, nor does a link in the folder.
        path = folder / Path(value).name if isinstance(value, str) else None
        return path if path is not None and path.suffix in _MEDIA and is_plain_file(path) else None

    target = row.get("target")
    return Tile(
        number=number,
        prompt=str(row.get("prompt", "")),
        target=None if target is None else str(target),
        image=media("image"),
        video=media("video"),
        audio=media("audio"),
        row=row,
    )

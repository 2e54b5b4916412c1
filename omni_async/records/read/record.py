"""Reads a run's folder in any state: in progress, killed, interrupted, resumed or failed.

`read_run` only refuses a folder that is no run folder. It leaves out and records (`Run.left_out`) damaged lines, and
files that cannot be read, lead out of the folder, or were written by another version. The memory for a file is bounded.
Imports neither torch nor Ray.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from omni_async.checkpoint.folders import by_version
from omni_async.config import ConfigError
from omni_async.config.reading import is_within, read_file, require_file
from omni_async.config.tree import require_plain_tree
from omni_async.config.yaml_text import parse_yaml
from omni_async.control.rounds import Round
from omni_async.records.read.rounds import is_round, read_rounds
from omni_async.records.read.run_spans import spans_of
from omni_async.records.read.spans import ReadSpan
from omni_async.records.write.attempts import Attempt, Fault
from omni_async.records.write.files import MOST_LINES, read_foreign
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Summary, read_summary
from omni_async.types import FARTHEST_S, LedgerEntry, count, finite

T = TypeVar("T")

RunStatus = Literal["running", "done", "interrupted", "failed", "killed"]
GridKind = Literal["train", "validation"]
_MEDIA = (".png", ".mp4", ".wav")
_GRID = re.compile(r"(train|validation)-(\d{6,9})\.jsonl")
# Maxima that a run may have and a page shows. No run writes files beyond these bounds.
_MOST_UPDATES = 100_000  # lines of metrics
_MOST_METRICS = 5000  # names
_MOST_TILES = 2000  # of a grid
_MOST_LEFT_OUT = 20
_LONGEST_TEXT = 10_000  # characters of a prompt
_LARGEST_CONFIG = 2**18  # bytes, the same bound as for any recipe


@dataclass(frozen=True)
class Tile:
    """One sample of a grid; its media are paths, None for missing media, and `text` is a text itself.

    `question` is the image of an answer's prompt."""

    number: int
    prompt: str
    target: str | None = None
    image: Path | None = None
    video: Path | None = None
    audio: Path | None = None
    text: str | None = None
    question: Path | None = None
    row: dict[str, Any] = field(default_factory=dict)  # the complete line of the table


@dataclass
class Grid:
    """The samples of an update (`kind` "train") or of a validation round, and the image with all of them.

    `left_out`: the run's dict of omissions."""

    kind: GridKind
    version: int
    image: Path
    left_out: dict[str, str]

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Read the samples from their table, on demand: a run has many tables, and a page shows some."""
        table, run = self.image.with_suffix(".jsonl"), self.image.parent.parent
        rows, why = read_foreign(table, dict[str, Any], run, most=_MOST_TILES)
        if why:
            _leave_out(self.left_out, f"samples/{table.name}", why)
        return tuple(_tile(number, row, table.parent, self.left_out) for number, row in enumerate(rows))


@dataclass
class Run:
    """A run as read from its folder. Times are seconds since the epoch; lists are in the order of the files.

    `config`: config.yaml as plain data. `updates` and `rounds`: the lines of metrics.jsonl, of updates and of
    validation rounds. `summary`: None while the run is in progress, after a kill, and if it cannot be read.
    `checkpoints`: version -> folder. `left_out`: file name -> why part of it is missing here."""

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
        return self.folder.profile if self.is_there(self.folder.profile) else None

    def setting(self, path: str, default: Any = None) -> Any:
        """Return a value of the configuration, such as `rollout.sde.kind`, or `default` if it is missing."""
        value: Any = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    @cached_property
    def validation(self) -> list[Round]:
        """The validation rounds by version, prepared for comparison."""
        return read_rounds(self.rounds)

    @cached_property
    def grids(self) -> list[Grid]:
        """List the tables of samples, validation rounds first, each by version. Emulated runs have none."""
        found = []
        for name in names_in(self.folder.samples, self.path, self.left_out):
            if (made := _GRID.fullmatch(name)) is not None:
                kind: GridKind = "train" if made[1] == "train" else "validation"
                image = (self.folder.samples / name).with_suffix(".png")
                found.append(Grid(kind, int(made[2]), image, self.left_out))
        return sorted(found, key=lambda grid: (grid.kind != "validation", grid.version))

    def spans(self) -> Iterator[ReadSpan]:
        """Yield the timeline of the newest attempt: `spans.jsonl` if it exists, otherwise `trace.json`.

        A run of a day has a million spans; `left_out` is complete after the last."""
        for path in (self.folder.spans, self.folder.trace):
            if self.is_there(path):
                return spans_of(path, self.folder, self.left_out)
        return iter(())

    def is_there(self, path: Path) -> bool:
        """Return whether a file of the run can be read; if its path holds anything else, `left_out` gets the reason."""
        return is_there(path, self.path, self.left_out)


def read_run(folder: Path) -> Run:
    """Read the folder of a run. Raises ConfigError, one line, if it is not a run folder."""
    run = RunDirectory(folder)
    if not run.config_yaml.is_file():
        raise ConfigError(
            f"{folder} is not a run folder: it has no config.yaml; give the folder that `omni-async train` made in"
            " run.dir, such as runs/quickstart-20260101-120000"
        )
    left_out: dict[str, str] = {}

    def lines(path: Path, kind: type[T], keep: Callable[[T], bool] | None = None, most: int = MOST_LINES) -> list[T]:
        records, why = read_foreign(path, kind, run.path, keep, most)
        if why:
            left_out[path.name] = why
        return records

    resumption = run.resumption()  # before the files that it is about
    metrics = lines(run.metrics, dict[str, Any], _MetricsCheck(), _MOST_UPDATES)
    ledger = lines(run.ledger, LedgerEntry)
    if resumption is not None:
        counting, all_lines = [*filter(resumption.counts, metrics)], len(metrics)
        metrics, ledger = counting, ledger[: resumption.groups]
        if len(metrics) < all_lines:
            again = f"the run resumes from update {resumption.update} and makes later updates again"
            left_out.setdefault(run.metrics.name, again)
    updates, rounds = _newest_of_each(metrics)
    attempts = lines(run.attempts, Attempt)
    # Before its first update, the summary is of earlier attempts.
    summary = _summary(run, left_out) if resumption is None else None
    return Run(
        folder=run,
        status=run_status(run, summary, attempts, updates[-1]["finished"] if updates else 0.0),
        config=run_config(run, left_out),
        updates=updates,
        rounds=rounds,
        ledger=ledger,
        faults=lines(run.faults, Fault),
        attempts=attempts,
        summary=summary,
        checkpoints=_checkpoints(run, left_out),
        left_out=left_out,
    )


def _newest_of_each(metrics: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lines of updates and of rounds. A resumed run makes updates again, and its lines replace earlier ones.

    A repeated update makes that update, all after it, and their rounds void."""
    updates: list[dict[str, Any]] = []
    rounds: dict[int, dict[str, Any]] = {}
    for line in metrics:
        number = line["update"]
        if is_round(line):
            rounds[number] = line
        elif "finished" in line:
            if updates and updates[-1]["update"] >= number:
                rounds = {version: one for version, one in rounds.items() if version < number}
            while updates and updates[-1]["update"] >= number:
                updates.pop()
            updates.append(line)
    return updates, [*rounds.values()]


class _MetricsCheck:
    """A filter for valid lines of metrics, by their update, their time, and the total number of metric names."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __call__(self, line: dict[str, Any]) -> bool:
        if count(line.get("update")) is None:
            return False
        finished = finite(line["finished"]) if "finished" in line else 0.0
        if finished is None or abs(finished) >= FARTHEST_S:
            return False
        if not line.keys() <= self._names:
            if len(self._names | line.keys()) > _MOST_METRICS:
                return False
            self._names |= line.keys()
        return True


def ended_groups(ledger: Iterable[LedgerEntry]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return counts of groups by ending, all as `admitted`; then the reasons of rejected, and of dropped groups."""
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
        left_out[run.summary.name] = f"cannot be read: {reason_of(error)}"
        return None


def reason_of(error: Exception) -> str:
    """Return why a file cannot be read, without the path in an OSError."""
    return str((isinstance(error, OSError) and error.strerror) or error)


def run_config(run: RunDirectory, left_out: dict[str, str]) -> dict[str, Any]:
    """Read config.yaml as plain data; if it cannot be read, return {} and put the reason in `left_out`."""
    try:
        content = read_file(run.config_yaml, _LARGEST_CONFIG, within=run.path)
        found = parse_yaml(content.decode(), run.config_yaml.name)
        require_plain_tree(found)  # pages cannot hold other values
    except (OSError, ValueError, RecursionError) as error:
        left_out[run.config_yaml.name] = f"cannot be read: {reason_of(error)}"
        return {}
    return found if isinstance(found, dict) else {}


def engine_of(run: RunDirectory) -> object:
    """Return `rollout.engine` of a run's config.yaml; None if it cannot be read."""
    rollout = run_config(run, {}).get("rollout")
    return rollout.get("engine") if isinstance(rollout, dict) else None


def run_status(run: RunDirectory, summary: Summary | None, attempts: list[Attempt], last: Any) -> RunStatus:
    """Return the state of a run; `last`: when its newest update ended, in seconds since the epoch."""
    if run.is_running():
        return "running"
    if summary is not None:
        return summary.status
    # A full disk prevents a summary. The attempt's line then has its status, unless a later attempt was killed.
    if attempts and isinstance(last, int | float) and attempts[-1].ended >= last:
        return attempts[-1].status
    return "killed"


def _checkpoints(run: RunDirectory, left_out: dict[str, str]) -> dict[int, Path]:
    if not is_within(run.checkpoints, run.path):
        left_out[run.checkpoints.name] = "it leads out of the run's folder"
        return {}
    try:
        return {version: path for version, path in by_version(run.checkpoints).items() if is_within(path, run.path)}
    except OSError as error:
        left_out[run.checkpoints.name] = f"cannot be read: {reason_of(error)}"
        return {}


def names_in(folder: Path, within: Path, left_out: dict[str, str]) -> list[str]:
    """List a folder of the run; if it is outside the run or unreadable, return [] and put the reason in `left_out`."""
    if not is_within(folder, within):
        left_out[folder.name] = "it leads out of the run's folder"
        return []
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        left_out[folder.name] = f"cannot be read: {reason_of(error)}"
        return []


def is_there(path: Path, within: Path, left_out: dict[str, str]) -> bool:
    """Return whether a file of the run can be read; if its path holds anything else, `left_out` gets the reason."""
    try:
        require_file(path, within)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        _leave_out(left_out, path.name, f"cannot be read: {reason_of(error)}")
        return False
    return True


def _leave_out(left_out: dict[str, str], name: str, why: str) -> None:
    if len(left_out) < _MOST_LEFT_OUT:
        left_out[name] = why


def _tile(number: int, row: dict[str, Any], folder: Path, left_out: dict[str, str]) -> Tile:
    def media(name: str) -> Path | None:
        value = row.get(name)
        # Only the file name counts, and links are refused: a table that was edited cannot lead elsewhere.
        path = folder / Path(value).name if isinstance(value, str) else None
        if path is None or path.suffix not in _MEDIA or not is_there(path, folder, left_out):
            return None
        return path

    target, text = row.get("target"), row.get("text")
    return Tile(
        number=number,
        prompt=str(row.get("prompt", ""))[:_LONGEST_TEXT],
        target=None if target is None else str(target)[:_LONGEST_TEXT],
        image=media("image"),
        video=media("video"),
        audio=media("audio"),
        text=text[:_LONGEST_TEXT] if isinstance(text, str) else None,
        question=media("question"),
        row=row,
    )

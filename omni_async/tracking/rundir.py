"""Manages the folder of a run, `<run.dir>/<name>-<date>-<time>[-n]/`: its paths and its line files."""

from __future__ import annotations

import contextlib
import fcntl
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from omni_async.aio.clock import Clock
from omni_async.config.reading import open_file
from omni_async.config.redact import redact
from omni_async.config.schema import Config
from omni_async.config.yaml_text import to_yaml
from omni_async.tracking.attempts import read_attempts
from omni_async.tracking.files import read_lines, write_atomic
from omni_async.tracking.forks import keep_from_children

_LOCK = ".lock"
_NAME = re.compile(r"(?P<name>.*)-(?P<second>\d{8}-\d{6})(-(?P<number>\d+))?", re.DOTALL)


class RunDirectoryError(OSError):
    """A run folder that can't be made or written: says where and why."""


class RunDirectory:
    """Paths inside one run's folder; its name is the run id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: Config, clock: Clock) -> RunDirectory:
        """Makes the folder (a new one, even if other runs start in the same second) and writes the resolved
        `config.yaml`.

        Credentials in the configuration are masked there: give them again, in the environment, to run from that file.
        """
        parent = Path(config.run.dir).absolute()
        stem = f"{config.run.name}-{datetime.fromtimestamp(clock.now()).astimezone():%Y%m%d-%H%M%S}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            run = cls(_make_new(parent, stem))
            run._claim()
            for folder in (run.samples, run.checkpoints):
                folder.mkdir()
            content = to_yaml(redact(msgspec.to_builtins(config)))
            write_atomic(run.config_yaml, content.encode())
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunDirectoryError(
                f"run.dir: cannot make a run folder in {parent}: {reason} ({error.filename or parent})"
            ) from error
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Reopens the folder of a run that stopped, to go on in it. Nothing in it changes before `take_over`. Raises
        RunDirectoryError if another process has it, or a file that is needed of it cannot be read."""
        run = cls(path)
        try:
            run._claim()
            for lines in (run.metrics, run.attempts):
                if lines.exists():
                    open_file(lines).close()
        except RunDirectoryError:
            raise
        except OSError as error:
            raise RunDirectoryError(
                f"checkpoint.resume: cannot go on in {path}: {error.strerror or error} ({error.filename or path})"
            ) from error
        return run

    def take_over(self, config: Config, version: int, validated: int | None) -> None:
        """Prepares the reopened folder for this attempt's records: voids the metrics after `version` (`void_metrics`),
        puts the summary of the attempts before aside until there is another, and writes this attempt's
        `config.yaml`."""
        try:
            write_atomic(self.config_yaml, to_yaml(redact(msgspec.to_builtins(config))).encode())
            self.void_metrics(version, validated)
            if self.summary.exists():
                self.summary.replace(self.former_summary)
        except OSError as error:
            raise RunDirectoryError(f"cannot go on in {self.path}: {error.strerror or error}") from error

    def _claim(self) -> None:
        """Locks the folder until `release`, or until this process ends; its children do not hold the lock. Raises
        RunDirectoryError if another process does."""
        self._lock = keep_from_children((self.path / _LOCK).open("wb", buffering=0))
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryError(f"{self.path} is running: another process has it") from None

    def release(self) -> None:
        """Unlocks the folder when the run is over, so that another process may go on in it."""
        if not self._lock.closed:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # something else may have the handle
            self._lock.close()

    def is_running(self) -> bool:
        """Tells whether a process has locked the folder."""
        try:
            with (self.path / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def is_of(self, name: str) -> bool:
        """Tells whether a run of that name made the folder."""
        return (made := _NAME.fullmatch(self.path.name)) is not None and made["name"] == name

    @property
    def began(self) -> tuple[str, int]:
        """Returns when the run began, by the folder's name: the second, and the number among the runs that began in it.
        For a folder that a run made."""
        made = _NAME.fullmatch(self.path.name)
        return (made["second"], int(made["number"] or 1)) if made else ("", 0)

    def void_metrics(self, version: int, validated: int | None) -> None:
        """Moves the lines after `version`, and after the last round `validated`, to `metrics.jsonl.void`."""
        valid: list[bytes] = []
        void: list[bytes] = []
        for line in read_lines(self.metrics):
            (valid if _record(line, version, validated) is not None else void).append(line)
        if void:
            with self.metrics.with_name(f"{self.metrics.name}.void").open("ab") as file:
                file.writelines(void)
            write_atomic(self.metrics, b"".join(valid))

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config_yaml(self) -> Path:
        return self.path / "config.yaml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def faults(self) -> Path:
        return self.path / "faults.jsonl"

    @property
    def control(self) -> Path:
        """Returns the path of the socket at which a running run answers."""
        return self.path / "control.sock"

    @property
    def spans(self) -> Path:
        """Returns the path of the spans that become the timeline."""
        return self.path / "spans.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def former_summary(self) -> Path:
        """Returns the path of the summary of the attempts before the one that is under way."""
        return self.path / "summary.json.void"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts.jsonl"

    @property
    def profile(self) -> Path:
        return self.path / "profile.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """Returns the folder of published versions, with `weights.transport: disk`."""
        return self.path / "weights"

    def read_metrics(self, version: float = math.inf, validated: float | None = math.inf) -> list[dict[str, Any]]:
        """Reads all lines, or those that count for a run that goes on from `version`, as `void_metrics` would leave
        them."""
        return [
            record for line in read_lines(self.metrics) if (record := _record(line, version, validated)) is not None
        ]

    def metrics_gaps(self, updates: Sequence[int], rounds: Sequence[int]) -> str | None:
        """Reports which of these updates and validation rounds `metrics.jsonl` does not have exactly one line of; None
        if it has one of each."""
        if not updates and not rounds:
            return None
        found: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        for line in read_lines(self.metrics):
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # it counts as missing
                record = msgspec.json.decode(line, type=dict[str, Any])
                found["finished" in record][record["update"]] += 1
        gaps = []
        for kind, wanted, counts in (("update", updates, found[True]), ("validation of version", rounds, found[False])):
            missing, repeated = [one for one in wanted if not counts[one]], [one for one in wanted if counts[one] > 1]
            if missing:
                gaps.append(f"no line of {kind} {_few(missing)}")
            if repeated:
                gaps.append(f"more than one line of {kind} {_few(repeated)}")
        return f"has {' and '.join(gaps)}" if gaps else None

    def wall_s(self, version: int) -> float:
        """Returns the seconds that the run's attempts have taken up to `version`, from the metrics of that update or
        from an attempt that ended there; 0 if there is neither."""
        lines = [line for line in self.read_metrics(version, None) if line["update"] == version]
        made = max(_numbers(line.get("finished") for line in lines), default=-math.inf)
        # An attempt that had ended by then came to another update of that number, which is void.
        attempts = [one for one in read_attempts(self.attempts) if one.to_update == version and one.ended >= made]
        return max([*_numbers(line.get("wall_s") for line in lines), *(one.wall_s for one in attempts)], default=0.0)

    def append_metrics(self, update: int, metrics: dict[str, Any]) -> None:
        """Appends a line `{"update": ..., <metric>: ...}`; numbers that are not finite become null."""
        append_jsonl(self.metrics, {"update": update, **metrics})


def _record(line: bytes, version: float, validated: float | None) -> dict[str, Any] | None:
    """Decodes a line; None if it was cut off, or is of an update or a validation round that is void."""
    try:
        record = msgspec.json.decode(line, type=dict[str, Any])
        counts = record["update"] <= (version if "finished" in record else -1 if validated is None else validated)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if counts else None


def append_jsonl(path: Path, record: Any) -> None:
    """Appends one line, handed to the operating system before this returns. Raises RunDirectoryError if it can't be
    written; then no part of it is in the file."""
    line = msgspec.json.encode(record) + b"\n"
    try:
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise RunDirectoryError(f"cannot append to {path}: {error.strerror or error}") from error


def _numbers(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float)]


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")


def _make_new(parent: Path, stem: str) -> Path:
    for n in count(1):
        path = parent / (stem if n == 1 else f"{stem}-{n}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")

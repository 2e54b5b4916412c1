"""Manages the folder of a run, `<run.dir>/<name>-<date>-<time>[-n]/`: its paths and its line files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from omni_async.aio.clock import Clock
from omni_async.checkpoint.statement import Change
from omni_async.config import Config, resolved_yaml
from omni_async.config.decoding import decode_json
from omni_async.config.reading import open_file
from omni_async.config.writing import append, open_lock, write_atomic
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.files import decode_line, keep_from_children, lines_of, read_records
from omni_async.types import Count, finite

_LOCK = ".lock"
_LONGEST_STATEMENT = 1000  # bytes
_METRICS = msgspec.json.Decoder(dict[str, Any])
_NAME = re.compile(r"(?P<name>.*)-(?P<second>\d{8}-\d{6})(-(?P<number>\d+))?", re.DOTALL)


class RunDirectoryError(OSError):
    """A run folder that can't be made or written, with the place and the reason."""


@contextlib.contextmanager
def refusing(what: str, folder: Path | None = None) -> Iterator[None]:
    """Turn an OSError into a RunDirectoryError with the text `what` and the path, if a `folder` is given."""
    try:
        yield
    except RunDirectoryError:
        raise
    except OSError as error:
        where = "" if folder is None else f" ({error.filename or folder})"
        raise RunDirectoryError(f"{what}: {error.strerror or error}{where}") from error


class Resumption(msgspec.Struct, frozen=True):
    """The point that a running attempt continues from. Its first update makes everything after that point void.

    `update`: the last update that counts. `validated`: the last version whose validation round counts; None: no round.
    `groups`: the number of the ledger's lines that count."""

    update: Count
    validated: Count | None
    groups: Count

    def counts(self, line: Mapping[str, Any]) -> bool:
        """Return whether a line of metrics, which has a valid `update`, counts."""
        return _stays(line, self.update, self.validated)


class RunDirectory:
    """Paths inside one run's folder; its name is the run id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = os.fsencode(path.name).decode("utf-8", "replace")  # pages and trackers need valid text
        self.config_yaml = path / "config.yaml"
        self.ledger = path / "ledger.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.attempts = path / "attempts.jsonl"
        self.faults = path / "faults.jsonl"
        self.changes = path / "changes.jsonl"  # of the recipe, from attempts that resumed with another
        self.spans = path / "spans.jsonl"  # converted into the timeline at the end
        self.trace = path / "trace.json"
        self.summary = path / "summary.json"
        self.former_summary = path / "summary.json.void"  # of the attempts before the current one
        self.profile = path / "profile.json"
        self.samples = path / "samples"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"  # of the console and the workers
        self.weights = path / "weights"  # published versions, with `weights.transport: disk`
        self.control = path / "control.sock"  # a running run listens there

    @property
    def parts(self) -> list[Path]:
        """Return the paths of a run's parts, which need not exist; a report is not a part."""
        return [part for part in vars(self).values() if isinstance(part, Path) and part != self.path]

    @classmethod
    def create(cls, config: Config, clock: Clock) -> RunDirectory:
        """Make a new folder, even if other runs start in the same second, and write the resolved `config.yaml`.

        Credentials in the configuration are masked there: to run from that file, set them again in the environment.
        """
        parent = Path(config.run.dir).absolute()
        stem = f"{config.run.name}-{datetime.fromtimestamp(clock.now()).astimezone():%Y%m%d-%H%M%S}"
        with refusing(f"run.dir: cannot make a run folder in {parent}", parent):
            parent.mkdir(parents=True, exist_ok=True)
            run = cls(_make_new(parent, stem))
            run._claim()
            for folder in (run.samples, run.checkpoints):
                folder.mkdir()
            write_atomic(run.config_yaml, resolved_yaml(config).encode())
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunDirectory:
        """Reopen the folder of a run that stopped, in order to resume it.

        Nothing in it changes before `take_over`. Raises RunDirectoryError if another process holds it, or a required
        file cannot be read."""
        run = cls(path)
        with refusing(f"checkpoint.resume: cannot resume in {path}", path):
            if (problem := run.problem()) is not None:
                raise OSError(errno.EINVAL, problem)
            run._claim()
            for lines in (run.metrics, run.attempts):
                if lines.exists():
                    open_file(lines, within=path).close()
        return run

    def problem(self) -> str | None:
        """Report a subfolder that a run cannot write into; None if all are fine. A link may lead anywhere."""
        for folder in (self.samples, self.checkpoints, self.weights, self.logs):
            if folder.is_symlink():
                return f"{folder} is a link; the whole run folder may be one instead"
            if folder.exists() and not folder.is_dir():
                return f"{folder} is not a folder"
        return None

    def take_over(self, config: Config, version: int, validated: int | None) -> None:
        """Prepare the reopened folder for this attempt's records.

        Moves the summary of earlier attempts aside until this attempt writes one.

        Args:
            config: this attempt's, for `config.yaml`.
            version: the update that the run resumes from; later metrics are void (`void_metrics`).
            validated: the last version whose validation round has begun (None: no round); later rounds are void."""
        with refusing(f"cannot resume in {self.path}"):
            write_atomic(self.config_yaml, resolved_yaml(config).encode())
            self.void_metrics(version, validated)
            if self.summary.exists():
                self.summary.replace(self.former_summary)
            self._state(b"")

    def append_changes(self, version: int, changes: Iterable[Change]) -> None:
        """Append a line per change of the recipe, with the update after which it holds.

        Raises RunDirectoryError if the changes cannot be written."""
        for one in changes:
            append_jsonl(self.changes, {"update": version, "key": one.key, "before": one.before, "now": one.now})

    def _claim(self) -> None:
        """Lock the folder until `release`, or until this process ends; its children do not hold the lock.

        Raises RunDirectoryError if another process holds it."""
        try:
            self._lock = keep_from_children(open_lock(self.path / _LOCK))
        except BlockingIOError:
            raise RunDirectoryError(f"{self.path} is running: another process has it") from None
        self._state(b"")

    def state_resumption(self, update: int, validated: int | None, groups: int) -> None:
        """State where this attempt continues, for readers, until `take_over` or `release`.

        The statement is in the lock, so it is void if this process is killed. The arguments are a `Resumption`'s."""
        self._state(msgspec.json.encode(Resumption(update, validated, groups)))

    def _state(self, content: bytes) -> None:
        with contextlib.suppress(OSError):  # on a full disk, readers count the lines of earlier attempts too
            os.ftruncate(self._lock.fileno(), 0)
            os.pwrite(self._lock.fileno(), content, 0)

    def release(self) -> None:
        """Unlock the folder when the run is over, so that another process may resume it."""
        if not self._lock.closed:
            self._state(b"")
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # another holder of the handle may keep it open
            self._lock.close()

    def is_running(self) -> bool:
        """Return whether a process has locked the folder."""
        return self._stated() is not None

    def resumption(self) -> Resumption | None:
        """Return where the running attempt continues, while the folder has lines that its first update makes void."""
        try:
            found: Resumption | None = decode_json(self._stated() or b"null", Resumption | None)
        except (ValueError, RecursionError):  # it was edited
            return None
        return found

    def _stated(self) -> bytes | None:
        """Return the content of the lock that a process holds; None if no process holds it."""
        try:
            with open_file(self.path / _LOCK, within=self.path) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return lock.read(_LONGEST_STATEMENT)
        except OSError:
            return None
        return None

    def is_of(self, name: str) -> bool:
        """Return whether a run of that name made the folder."""
        return (made := _NAME.fullmatch(self.path.name)) is not None and made["name"] == name

    @property
    def began(self) -> tuple[str, int]:
        """When the run began, by the folder's name: the second, and the run's number within that second.

        Only defined for a folder that a run made."""
        made = _NAME.fullmatch(self.path.name)
        return (made["second"], int(made["number"] or 1)) if made else ("", 0)

    def void_metrics(self, version: int, validated: int | None) -> None:
        """Move the lines after `version`, and after the last round `validated`, to `metrics.jsonl.void`."""
        valid, void = list[bytes](), list[bytes]()
        with refusing(f"{self.metrics} cannot be read"):
            for line in lines_of(self.metrics, self.path):
                (valid if _record(line, version, validated) is not None else void).append(line)
        if void:
            append(self.metrics.with_name(f"{self.metrics.name}.void"), b"".join(void))
            write_atomic(self.metrics, b"".join(valid))

    def read_metrics(self, version: float | None = None, validated: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the lines that `void_metrics` would keep for a run that continues from `version`.

        Without a version, yield the lines that count. Raises RunDirectoryError if the file cannot be read."""
        if version is None:
            found = self.resumption()
            version, validated = (math.inf, math.inf) if found is None else (found.update, found.validated)
        with refusing(f"{self.metrics} cannot be read"):
            for line in lines_of(self.metrics, self.path):
                if (record := _record(line, version, validated)) is not None:
                    yield record

    def metrics_gaps(self, updates: Sequence[int], rounds: Sequence[int]) -> str | None:
        """Report which of these updates and rounds do not have exactly one line in `metrics.jsonl`; None if all do."""
        if not updates and not rounds:
            return None
        found: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
        try:
            for line in lines_of(self.metrics, self.path):
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # it counts as missing
                    record = decode_line(line, _METRICS)
                    found["finished" in record][record["update"]] += 1
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        gaps = []
        for kind, wanted, counts in (("update", updates, found[True]), ("validation of version", rounds, found[False])):
            missing, repeated = [one for one in wanted if not counts[one]], [one for one in wanted if counts[one] > 1]
            gaps += [f"no line of {kind} {_few(missing)}"] if missing else []
            gaps += [f"more than one line of {kind} {_few(repeated)}"] if repeated else []
        return f"has {' and '.join(gaps)}" if gaps else None

    def wall_s(self, version: int) -> float:
        """Return the seconds that the run's attempts have taken up to `version`; 0 if they are not recorded.

        They are recorded by the metrics of that update, or by an attempt that ended there. Raises RunDirectoryError if
        a file cannot be read."""
        lines = [line for line in self.read_metrics(version, None) if line["update"] == version]
        made = max(_numbers(line.get("finished") for line in lines), default=-math.inf)
        # An attempt that ended earlier reached another update of that number, which is void.
        with refusing(f"{self.attempts} cannot be read"):
            attempts = [
                one
                for one in read_records(self.attempts, Attempt, self.path)
                if one.to_update == version and one.ended >= made
            ]
        return max([*_numbers(line.get("wall_s") for line in lines), *(one.wall_s for one in attempts)], default=0.0)

    def append_metrics(self, update: int, metrics: dict[str, Any]) -> None:
        """Append a line `{"update": ..., <metric>: ...}`; numbers that are not finite become null."""
        append_jsonl(self.metrics, {"update": update, **metrics})


def _record(line: bytes, version: float, validated: float | None) -> dict[str, Any] | None:
    """Decode a line; None if it is incomplete, or of a void update or validation round."""
    try:
        record = decode_line(line, _METRICS)
        counts = _stays(record, version, validated)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if counts else None


def _stays(record: Mapping[str, Any], version: float, validated: float | None) -> bool:
    last = version if "finished" in record else -1 if validated is None else validated
    return bool(record["update"] <= last)


def append_jsonl(path: Path, record: Any) -> None:
    """Append one line, passed to the operating system before this returns.

    Raises RunDirectoryError if it can't be written; then no part of it is in the file."""
    with refusing(f"cannot append to {path}"):
        append(path, msgspec.json.encode(record) + b"\n")


def _numbers(values: Iterable[Any]) -> list[float]:
    return [number for value in values if (number := finite(value)) is not None]


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

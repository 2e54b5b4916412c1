"""The folder a run leaves behind: `<run.dir>/<name>-<date>-<time>[-n]/`. Owns its paths and its line files."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config.load import to_yaml
from omni_async.config.schema import Config
from omni_async.control.clock import Clock
from omni_async.tracking.files import write_atomic
from omni_async.tracking.redact import redact
from omni_async.types import LedgerEntry


class RunDirectoryError(OSError):
    """The run folder can't be made or written: says where and why."""


class RunDirectory:
    """Paths inside one run's folder; its name is the run id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: Config, clock: Clock) -> RunDirectory:
        """Make the folder (a new one, whoever else starts in the same second) and write the resolved `config.yaml`.

        Credentials in the configuration are masked there: give them again, in the environment, to run from that file.
        """
        parent = Path(config.run.dir).absolute()
        stem = f"{config.run.name}-{datetime.fromtimestamp(clock.now()).astimezone():%Y%m%d-%H%M%S}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            run = cls(_make_new(parent, stem))
            for folder in (run.samples, run.checkpoints):
                folder.mkdir()
            content = to_yaml(redact(msgspec.to_builtins(config)))
            write_atomic(run.config_yaml, content.encode())
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunDirectoryError(f"run.dir: cannot make a run folder in {parent}: {reason} ({error.filename or parent})") from error
        return run

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
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

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
        """Published versions, with `weights.transport: disk`."""
        return self.path / "weights"

    def append_ledger(self, entry: LedgerEntry) -> None:
        append_jsonl(self.ledger, entry)

    def append_metrics(self, update: int, metrics: dict[str, Any]) -> None:
        """A line `{"update": ..., <metric>: ...}`; numbers that are not finite become null."""
        append_jsonl(self.metrics, {"update": update, **metrics})


def append_jsonl(path: Path, record: Any) -> None:
    """Add one line, handed to the operating system before this returns."""
    line = msgspec.json.encode(record) + b"\n"
    try:
        with path.open("ab", buffering=0) as file:
            file.write(line)
    except OSError as error:
        raise RunDirectoryError(f"cannot append to {path}: {error.strerror or error}") from error


def _make_new(parent: Path, stem: str) -> Path:
    for n in count(1):
        path = parent / (stem if n == 1 else f"{stem}-{n}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")

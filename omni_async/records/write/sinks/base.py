"""Defines the data that a tracker gets about a run, and the methods it has to implement."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from omni_async.records.write.rundir import RunDirectory

if TYPE_CHECKING:
    from PIL.Image import Image

Ended = Literal["done", "interrupted", "failed"]


class SinkUnusableError(RuntimeError):
    """A section of `tracking` that cannot be used; names it (credentials masked), the reason, and the remedy.

    `down`: the tracker does not answer, so it may become usable later."""

    def __init__(self, message: str, *, down: bool = False) -> None:
        super().__init__(message)
        self.down = down


@dataclass(frozen=True)
class About:
    """The description of a run for trackers.

    `params` is the configuration with credentials masked, `changed` its part that differs from the defaults. `family`
    is the model's. `goes_on`: this run was started earlier; the tracker must not change it until `Sink.begin`."""

    run: RunDirectory
    params: dict[str, Any]
    changed: dict[str, Any]
    family: str
    goes_on: bool = False

    @property
    def tags(self) -> dict[str, str]:
        """The tags that trackers filter and compare runs by."""
        algorithm, staleness = self.params["algorithm"]["name"], self.params["staleness"]["max_updates"]
        return {"family": self.family, "algorithm": algorithm, "S": str(staleness)}

    @property
    def description(self) -> str:
        """A few lines of Markdown: the run's settings, its folder, and commands for it."""
        tags, path = self.tags, self.run.path
        schedule = "the synchronous loop" if tags["S"] == "0" else f"samples are at most {tags['S']} updates old"
        return (
            f"**{tags['algorithm']}** on **{tags['family']}** ({self.params['model']['path']}),"
            f" {self.params['trainer']['updates']} updates, S = {tags['S']}: {schedule}.\n\n"
            f"Everything is in `{path}`; its `config.yaml` is the whole recipe.\n\n"
            f"```\nomni-async report {path}\nomni-async sample {path}\nomni-async export {path} --out exported\n"
            f"omni-async train {path / 'config.yaml'}\n```\n"
        )


class Numbers(NamedTuple):
    """The numbers of an update or a validation round, under their names in metrics.jsonl.

    `step`: the version they belong to. `seconds`: their time, since the epoch."""

    numbers: dict[str, float]
    step: int
    seconds: float


class Sink:
    """One run in one tracker.

    It is opened before the run begins: the constructor raises SinkUnusableError. After that one thread makes all calls,
    `finish` last. A call that raises is repeated, unless the sink `refuses` the error. A sink omits data that its
    tracker cannot represent."""

    label = ""

    def begin(self, version: int) -> None:
        """Mark the run as running from `version`: data of later updates is void."""

    def metrics(self, rows: Sequence[Numbers]) -> None:
        """Record the numbers of updates and validation rounds, in their order."""

    def image(self, image: Image, kind: str, step: int) -> None:
        """Record a grid of samples.

        Args:
            image: must not be changed.
            kind: `train` or `validation`.
            step: the version."""

    def media(self, path: Path, kind: str, step: int) -> None:
        """Record a file with the video or sound of a sample; other arguments as in `image`."""

    def remark(self, name: str, text: str, step: int) -> None:
        """Record a text about an update or a round; it replaces an earlier text of that name."""

    def artifact(self, path: Path) -> None:
        """Record a file of the run folder."""

    def finish(self, status: Ended | None) -> None:
        """End the run. None: the run never began here and must not be changed."""

    def refuses(self, error: Exception) -> bool:
        """Return whether the same call would raise this error again; other errors mean that the tracker is down."""
        local = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
        return isinstance(error, local) or not isinstance(error, OSError)  # time-outs and lost connections are OSErrors

    @property
    def gathers_s(self) -> float:
        """How long metrics wait for more, in seconds. At 0 every call of `metrics` has one row."""
        return 0.0

    @property
    def live(self) -> str:
        """The console's line when the run begins, or an empty text."""
        return ""

    @property
    def where(self) -> str:
        """How to look at the run, for the console's last lines; empty if there is nothing to see."""
        return ""


def command_of(program: str) -> str:
    """Return a command of this environment, activated or not, as short as it can be typed from the current folder."""
    command = Path(sys.executable).with_name(program)
    if not command.exists():
        return program
    return shlex.quote(os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command))

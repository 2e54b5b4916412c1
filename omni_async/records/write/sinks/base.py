"""Defines what a tracker is told of a run, and what it has to implement."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omni_async.records.write.rundir import RunDirectory

if TYPE_CHECKING:
    from PIL.Image import Image

Ended = Literal["done", "interrupted", "failed"]


class SinkUnusableError(RuntimeError):
    """A section of `tracking` that cannot be used; names it (credentials masked), the reason, and what to change.

    `down`: the tracker does not answer, so it may be usable later."""

    def __init__(self, message: str, *, down: bool = False) -> None:
        super().__init__(message)
        self.down = down


@dataclass(frozen=True)
class About:
    """What a run is.

    `params` is the configuration with credentials masked and `changed` what of it is not the default, `family` the
    model's, `goes_on` whether this run was begun earlier and stays as it is until `Sink.begin`."""

    run: RunDirectory
    params: dict[str, Any]
    changed: dict[str, Any]
    family: str
    goes_on: bool = False

    @property
    def tags(self) -> dict[str, str]:
        """What runs are filtered and compared by."""
        algorithm, staleness = self.params["algorithm"]["name"], self.params["staleness"]["max_updates"]
        return {"family": self.family, "algorithm": algorithm, "S": str(staleness)}

    @property
    def description(self) -> str:
        """A few lines of Markdown: what it is, where it is, and the commands for it."""
        tags, path = self.tags, self.run.path
        schedule = "the synchronous loop" if tags["S"] == "0" else f"samples are at most {tags['S']} updates old"
        return (
            f"**{tags['algorithm']}** on **{tags['family']}** ({self.params['model']['path']}),"
            f" {self.params['trainer']['updates']} updates, S = {tags['S']}: {schedule}.\n\n"
            f"Everything is in `{path}`; its `config.yaml` is the whole recipe.\n\n"
            f"```\nomni-async report {path}\nomni-async sample {path}\nomni-async export {path} --out exported\n"
            f"omni-async train {path / 'config.yaml'}\n```\n"
        )


class Sink:
    """One run in one tracker.

    It is opened before the run begins: the constructor raises SinkUnusableError. After that one thread calls it,
    `finish` last. A call that raises is made again, unless the sink `refuses` the error. A sink leaves out what its
    tracker has no place for."""

    label = ""

    def begin(self, version: int) -> None:
        """Set the run going from `version`: what was told of later updates is void."""

    def metrics(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        """Record numbers by their names in metrics.jsonl.

        Args:
            numbers: of an update or a validation round.
            step: the version it belongs to.
            seconds: when, since the epoch."""

    def image(self, image: Image, kind: str, step: int) -> None:
        """Record a grid of samples.

        Args:
            image: not to be changed.
            kind: `train` or `validation`.
            step: the version."""

    def media(self, path: Path, kind: str, step: int) -> None:
        """Record the video or sound of a sample, a file; the rest as of `image`."""

    def remark(self, name: str, text: str, step: int) -> None:
        """Record a text about an update or a round, which takes the place of an earlier one of that name."""

    def artifact(self, path: Path) -> None:
        """Record a file of the run folder."""

    def finish(self, status: Ended | None) -> None:
        """End the run. None: it never began here and stays as it is."""

    def refuses(self, error: Exception) -> bool:
        """Return whether the same call would raise this error again; all others are of a tracker that is down."""
        local = FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError
        return isinstance(error, local) or not isinstance(error, OSError)  # of which time-outs and lost connections are

    @property
    def live(self) -> str:
        """What the console says when the run begins; an empty text if that is nothing."""
        return ""

    @property
    def where(self) -> str:
        """How to look at the run, for the console's last lines; an empty text if there is nothing to see."""
        return ""


def command_of(program: str) -> str:
    """Return a command of this environment, which need not be activated, as short as it can be typed from here."""
    command = Path(sys.executable).with_name(program)
    if not command.exists():
        return program
    return shlex.quote(os.path.relpath(command) if command.is_relative_to(Path.cwd()) else str(command))

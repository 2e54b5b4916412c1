"""Defines what every role of a run is built from: a configuration that was checked, and what was read of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omni_async.checkpoint.statement import Change
from omni_async.config import Config
from omni_async.control.control_state import ControlState
from omni_async.performance.profile import Profile
from omni_async.plugins.families import PipelineFamily
from omni_async.types import Prompt


@dataclass(frozen=True)
class RunInputs:
    """A configuration that was checked against its files.

    `start` is the control state of the checkpoint to resume from; `run` the folder of the run that goes on, if it does
    so in its own, and `untouched` says that nothing has been changed in there yet: nothing is before there is an update
    to record.

    `profile`, with times and payloads scaled, is what emulated devices replay; with None the devices are real. `notes`
    are for the console. `contents` are digests of the files that the configuration names, `changes` its
    differences from the checkpoint's recipe."""

    config: Config
    family: PipelineFamily
    prompts: tuple[Prompt, ...]
    validation_prompts: tuple[Prompt, ...]
    start: ControlState = field(default_factory=ControlState)
    run: Path | None = None
    untouched: bool = False
    profile: Profile | None = None
    notes: tuple[str, ...] = ()
    contents: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()

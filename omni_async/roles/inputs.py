"""Defines the inputs of every role of a run: a checked configuration, and the data read from its files."""

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
    """A configuration that was checked against its files, and their data.

    `start` is the control state of the checkpoint to resume from. `run` is the run's folder if the run resumes in its
    own folder. `untouched`: nothing in that folder has been changed yet; it stays so until there is an update to
    record.

    `profile`, with times and payloads scaled, is replayed by emulated devices; None: the devices are real. `notes` are
    for the console. `contents` are digests of the files that the configuration names. `changes` are its differences
    from the checkpoint's recipe. `passed` are pickles of the rewards that Python code passed, by name, for workers in
    other processes."""

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
    passed: Mapping[str, bytes] = field(default_factory=dict)

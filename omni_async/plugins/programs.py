"""Finds rollout programs: what happens between the calls of a sample that takes several. Imports no torch.

A sample of `rollout.calls` = 1 is drawn once. With more, a program asks the engine for one call after the other: it
draws, has what was drawn judged, and edits it, say. The calls are one sample: one reward, one line of the ledger, and
trained steps of every call, each with the version that took it (`omni_async.rollout.calls`). A package registers a
`RolloutProgram` in the entry-point group `omni_async.programs`; a recipe names it as `rollout.program`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from omni_async.plugins.entry_points import find_registered, load_named, registered_names

GROUP = "omni_async.programs"


def _no_problems(config: Any, family: Any) -> Iterator[str]:
    return iter(())


def _no_check(config: Any) -> None:
    return None


@dataclass(frozen=True)
class RolloutProgram:
    """A rollout program that a package brings.

    build: `module:function`; (Config) -> `omni_async.rollout.calls.Program`, called in every producer's process.
    settings: the section that `rollout.program.settings` is; a `Section`, whose every field has a `doc`.
    problems: (Config, PipelineFamily) -> what of a recipe cannot work with it, one message each, before anything
        starts.
    prompt_check: (Config) -> a function that returns what a `Prompt` lacks for it, or None; None where it takes any."""

    build: str
    settings: type[msgspec.Struct] | None = None
    problems: Callable[[Any, Any], Iterator[str]] = _no_problems
    prompt_check: Callable[[Any], Callable[[Any], str | None] | None] = _no_check

    def load(self) -> Callable[[Any], Any]:
        """Load the function that builds it, with all that it imports."""
        function: Callable[[Any], Any] = load_named(self.build)
        return function


def program_names() -> tuple[str, ...]:
    """Return the names of all installed programs, sorted."""
    return registered_names(GROUP)


def find_program(name: str) -> RolloutProgram:
    """Return the program registered as `name`.

    ValueError lists the installed ones, or says why its package, which is foreign code, gives none."""
    return find_registered(name, GROUP, RolloutProgram, "rollout.program.name")

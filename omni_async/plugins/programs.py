"""Finds rollout programs, which connect the calls of a sample that takes several. Imports no torch.

A sample of `rollout.calls` = 1 is generated in one call. With more calls, a program requests them from the engine one
after another; for example, it draws an image, has it judged, and edits it. The calls are one sample: one reward, one
line of the ledger, and trained steps of every call, each with its weight version (`omni_async.rollout.calls`). A
package registers a `RolloutProgram` in the entry-point group `omni_async.programs`; a recipe names it as
`rollout.program`.
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
    """A rollout program of a package.

    build: `module:function`; (Config) -> `omni_async.rollout.calls.Program`, called in every producer's process.
    settings: the section for `rollout.program.settings`; a `Section` whose fields all have a `doc`.
    problems: (Config, PipelineFamily) -> the recipe's conflicts with the program, one message each, before anything
        starts.
    prompt_check: (Config) -> a function that returns what a `Prompt` lacks for the program, or None; the check itself
        is None if the program accepts any prompt."""

    build: str
    settings: type[msgspec.Struct] | None = None
    problems: Callable[[Any, Any], Iterator[str]] = _no_problems
    prompt_check: Callable[[Any], Callable[[Any], str | None] | None] = _no_check

    def load(self) -> Callable[[Any], Any]:
        """Load the function that builds it, with all its imports."""
        function: Callable[[Any], Any] = load_named(self.build)
        return function


def program_names() -> tuple[str, ...]:
    """Return the names of all installed programs, sorted."""
    return registered_names(GROUP)


def find_program(name: str) -> RolloutProgram:
    """Return the program registered as `name`.

    Raises ValueError that lists the installed programs, or explains why the package, which is foreign code, failed."""
    return find_registered(name, GROUP, RolloutProgram, "rollout.program.name")

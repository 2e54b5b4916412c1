"""Reads and writes `state.json`: everything of a run that is not a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from omni_async.checkpoint.errors import CheckpointError, read_json
from omni_async.control.control_state import ControlState

FILE = "state.json"
FORMAT = 5
_LARGEST = 2**30
_MOST = 10**12  # updates, groups, images: no run has more


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `state.json`.

    `control`: the control plane, without references to trajectories. `engine`: what the trainer's ranks count. `rule`:
    what the update rule remembers. `pipeline` and `algorithm` say what the tensors are of, `samples` what the ready
    groups were made with."""

    control: ControlState
    pipeline: str | None
    algorithm: str
    engine: dict[str, Any] = {}
    rule: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    format: int = FORMAT

    @property
    def version(self) -> int:
        return self.control.version


def write_state(folder: Path, state: State) -> None:
    (folder / FILE).write_bytes(msgspec.json.encode(state))


def read_state(folder: Path) -> State:
    """Read a checkpoint's state. Raises CheckpointError, one line, where there is none or it is another version's."""
    try:
        state = read_json(folder / FILE, State, FORMAT, _LARGEST)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint folder: it has no {FILE}") from None
    if problem := _impossible(state):
        raise CheckpointError(f"{folder / FILE} is of no run: {problem}")
    return state


def _impossible(state: State) -> str | None:
    """Return what no run can have come to, None if there is nothing. The types are right already."""
    control = state.control
    for what, number in _counts(control):
        if not 0 <= number <= _MOST:
            return f"{what} is {number if abs(number) < 2**63 else 'a number of ' + str(number.bit_length()) + ' bits'}"
    if any(not group.samples for group in control.ready):
        return "a group that waits for the trainer has no samples"
    if len(control.rewards) > control.version:
        return f"it has rewards of {len(control.rewards)} updates, and is at update {control.version}"
    groups = [*(one.group for one in control.unfinished), *(one.group for one in control.ready)]
    if len(set(groups)) != len(groups):
        return "a group stands there twice"
    return next(
        (f"{what}.{problem}" for what in ("engine", "rule") if (problem := _too_large(getattr(state, what)))), None
    )


def _counts(control: ControlState) -> Iterator[tuple[str, int]]:
    ledger = control.ledger
    yield from (
        ("version", control.version),
        ("next_group", control.next_group),
        ("images", control.images),
        ("admitted", ledger.admitted),
    )
    yield "ledger.size", ledger.size
    # A run whose first round is under way has validated the version below its first.
    yield from (
        ("validated", 0 if control.validated in (None, -1) else control.validated),
        *ledger.events.items(),
        *ledger.reasons.items(),
    )
    yield from (("staleness", number) for pair in ledger.staleness.items() for number in pair)
    yield from (("a validation round", one.version) for one in control.rounds)
    for one in control.unfinished:
        yield from (("an unfinished group", one.group), ("attempts", one.attempts))
    for group in control.ready:
        yield from (
            ("a ready group", group.group),
            ("admitted_version", group.admitted_version),
            ("prompt", group.prompt.index),
        )
        for versions in (sample.step_versions for sample in group.samples):
            yield from (("step_versions", version) for version, _ in versions.spans)
            yield "the number of step_versions", versions.num_steps


def _too_large(value: Any) -> str | None:
    """Return the path of a number that no machine counts to, None if there is none."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if found := _too_large(item):
                return f"{str(key)[:80]}: {found}" if not found.startswith("is") else f"{str(key)[:80]} {found}"
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"is a number of {value.bit_length()} bits"
    return None

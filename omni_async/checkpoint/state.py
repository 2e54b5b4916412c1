"""Reads and writes `state.json`: the whole state of a run except tensors.

It also records the settings that the checkpoint's groups were generated with. Groups that wait for the trainer are
only useful to a run that would generate the same ones; any other run generates them again, from the same prompts and
seeds.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from omni_async.algorithms.kinds import trajectory_fields
from omni_async.algorithms.registry import find_objective
from omni_async.checkpoint.statement import AGAIN, Statement, changes_since, plain, value_at
from omni_async.config import Config
from omni_async.config.decoding import decode_json, num_values
from omni_async.config.reading import TooLargeError, read_file
from omni_async.config.redact import one_line
from omni_async.config.writing import write_new
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.control.seeds import NOISE

FILE = "state.json"
FORMAT = 5
_LARGEST = 2**27
_MOST_VALUES = 3_000_000
_LONGEST = 2000  # characters of an error
_MOST = 10**12  # updates, groups, images: no run has more
_LARGEST_MEASURE = 1e100  # the bound of `rewards/base.py` on a score's parts; statistics square them
# How this version generates samples, in addition to the recipe. Groups of an earlier version are generated again: their
# log-probs are float32, and their noise differs.
_DRAWN = {"log-prob dtype": "float64", "noise": NOISE}
S = TypeVar("S", bound=msgspec.Struct)


class CheckpointError(ValueError):
    """Raised with one line: which checkpoint is bad, and why."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST))


class _Format(msgspec.Struct):
    format: int = 1


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `state.json`.

    `control`: the control plane, without references to trajectories. `engine`: counters of the trainer's ranks. `rule`:
    the update rule's memory. `pipeline` and `algorithm`: what the tensors belong to. `samples`: settings that the ready
    groups were generated with. `statement`: everything that the numbers depend on (None: written by an earlier
    version)."""

    control: ControlState
    pipeline: str | None
    algorithm: str
    engine: dict[str, Any] = {}
    rule: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    statement: Statement | None = None
    format: int = FORMAT

    @property
    def version(self) -> int:
        return self.control.version


def write_state(folder: Path, state: State) -> None:
    """Write a checkpoint's state. Raises OSError, also if it exceeds what readers accept."""
    content = msgspec.json.encode(state)
    if len(content) > _LARGEST:
        raise OSError(errno.EFBIG, f"{FILE} has {len(content)} bytes, and {_LARGEST} can be read")
    if (values := num_values(content)) > _MOST_VALUES:
        raise OSError(errno.EFBIG, f"{FILE} has {values} values, and {_MOST_VALUES} can be read")
    write_new(folder / FILE, content)


def read_state(folder: Path) -> State:
    """Read a checkpoint's state. Raises CheckpointError, one line, if it is missing or of another version."""
    try:
        state = read_json(folder / FILE, State, FORMAT, _LARGEST, _MOST_VALUES)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint folder: it has no {FILE}") from None
    if problem := _impossible(state):
        raise CheckpointError(f"{folder / FILE} is of no run: {problem}")
    return state


def made_with(config: Config) -> dict[str, Any]:
    """Return the settings that determine samples and their scores, by name; without secrets."""
    tree, fields = plain(config), trajectory_fields(find_objective(config.algorithm.name), config)
    encoded = [_encoding(config.encoded_for(spec)) for spec in config.rollout.specs]
    derived = {"trajectory fields": list(fields), "encoding of prompts": encoded}
    return {**{name: value_at(tree, name) for name in AGAIN}, **_DRAWN, **derived}


def _encoding(spec: Any) -> list[Any]:
    """Return the values of a spec that decide how prompts are encoded, in addition to the size."""
    return [getattr(spec, key, None) for key in ("guided", *getattr(spec, "encoding_keys", ()))]


def fitting(state: State, config: Config, contents: Mapping[str, str]) -> tuple[State, list[str]]:
    """Return `state`, without ready groups if this recipe would generate others, and the settings that differ.

    contents: of the recipe's files, as returned by `contents_of`."""
    control, before, now = state.control, state.samples, made_with(config)
    changed = [name for name in before | _DRAWN if before.get(name) != now.get(name)]
    if state.statement is not None:  # more exact, and covers files
        since = changes_since(state.statement, config, contents, tracked=False)
        changed = [name for name in changed if name not in AGAIN] + [one.key for one in since if one.again]
    if not (changed and control.ready):
        return state, []
    again = tuple(Unfinished(group.group) for group in control.ready)
    return replace(state, control=replace(control, ready=(), unfinished=(*control.unfinished, *again))), changed


def read_json(path: Path, cls: type[S], form: int, largest: int, most: int) -> S:
    """Read a JSON file of an untrusted checkpoint.

    Args:
        path: the file.
        cls: the type of its content.
        form: the expected format version.
        largest: maximum size in bytes.
        most: maximum number of values.

    Raises:
        FileNotFoundError: the file is missing.
        CheckpointError: the file is too large, of another format, or invalid."""
    try:
        content = read_file(path, largest, within=path.parent)
        found = msgspec.json.decode(content, type=_Format).format
        if found != form:
            raise CheckpointError(f"{path} has format {found}, this version reads {form}")
        return cast(S, decode_json(content, cls, most))
    except FileNotFoundError:
        raise
    except TooLargeError as error:
        raise CheckpointError(f"{path} is {error.strerror}") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:500]}") from None


def _impossible(state: State) -> str | None:
    """Return the first value that no run can reach, or None. The types are already checked."""
    control = state.control
    for what, number in _counts(control):
        if not 0 <= number <= _MOST:
            return f"{what} is {number if abs(number) < 2**63 else 'a number of ' + str(number.bit_length()) + ' bits'}"
    for what, measure in _measures(control):
        if not abs(measure or 0.0) <= _LARGEST_MEASURE:
            return f"{what} is {measure:g}, which no scorer returns"
    if any(not group.samples for group in control.ready):
        return "a group that waits for the trainer has no samples"
    if len(control.rewards) > control.version:
        return f"it has rewards of {len(control.rewards)} updates, and is at update {control.version}"
    for round_ in control.rounds:
        if any(len(column) != round_.asked for column in round_.scores.values()):
            return f"the validation round of version {round_.version} has not a score for each of its samples"
    groups = [*(one.group for one in control.unfinished), *(one.group for one in control.ready)]
    if len(set(groups)) != len(groups):
        return "a group stands there twice"
    return next(
        (f"{what}.{problem}" for what in ("engine", "rule") if (problem := _too_large(getattr(state, what)))), None
    )


def _counts(control: ControlState) -> Iterator[tuple[str, int]]:
    ledger = control.ledger
    yield from (("version", control.version), ("next_group", control.next_group), ("images", control.images))
    yield from (("admitted", ledger.admitted), ("ledger.size", ledger.size))
    # While the first round runs, `validated` is the version below its first.
    yield "validated", 0 if control.validated in (None, -1) else control.validated
    yield from (*ledger.events.items(), *ledger.reasons.items(), *ledger.drop_reasons.items())
    yield from (("staleness", number) for pair in ledger.staleness.items() for number in pair)
    for round_ in control.rounds:
        counts = (round_.version, round_.scored or 0, round_.asked or 0, *round_.reasons.values())
        yield from (("a validation round", number) for number in counts)
    for one in control.unfinished:
        yield from (("an unfinished group", one.group), ("attempts", one.attempts))
    for group in control.ready:
        yield from (("a ready group", group.group), ("admitted_version", group.admitted_version))
        yield "prompt", group.prompt.index
        for versions in (sample.step_versions for sample in group.samples):
            yield from (("step_versions", version) for version, _ in versions.spans)
            yield "the number of step_versions", versions.num_steps


def _measures(control: ControlState) -> Iterator[tuple[str, float | None]]:
    yield from (("a mean reward", number) for number in control.rewards)
    for round_ in control.rounds:
        means = (round_.reward, *round_.parts.values())
        for number in (*means, *(score for column in round_.scores.values() for score in column)):
            yield f"a score of the validation round of version {round_.version}", number
    for score in (sample.score for group in control.ready for sample in group.samples):
        yield from (("a ready group's score", number) for number in (score.value, *score.parts.values()))


def _too_large(value: Any) -> str | None:
    """Return the path of a number that does not fit into 64 bits, None if all fit."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if found := _too_large(item):
                return f"{str(key)[:80]}: {found}" if not found.startswith("is") else f"{str(key)[:80]} {found}"
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"is a number of {value.bit_length()} bits"
    return None

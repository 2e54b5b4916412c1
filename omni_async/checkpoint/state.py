"""`state.json`: everything of a run that is not a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from omni_async.checkpoint.errors import CheckpointError
from omni_async.control.continuation import Continuation

FILE = "state.json"
FORMAT = 2
_LARGEST = 2**30


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`control`: the control plane, without references to trajectories. `engine`: what the trainer's ranks count. `rule`: what the update rule
    remembers. `pipeline` and `algorithm` say what the tensors are of."""

    control: Continuation
    pipeline: str
    algorithm: str
    engine: dict[str, Any] = {}
    rule: dict[str, Any] = {}
    format: int = FORMAT

    @property
    def version(self) -> int:
        return self.control.version


class _Format(msgspec.Struct):
    format: int = 1


def write_state(folder: Path, state: State) -> None:
    (folder / FILE).write_bytes(msgspec.json.encode(state))


def read_state(folder: Path) -> State:
    """CheckpointError, one line, where there is none or it is another version's."""
    path = folder / FILE
    try:
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} is larger than {_LARGEST} bytes")
        content = path.read_bytes()
        found = msgspec.json.decode(content, type=_Format).format
        if found != FORMAT:
            raise CheckpointError(f"{path} has format {found}, this version reads {FORMAT}")
        return msgspec.json.decode(content, type=State)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint folder: it has no {FILE}") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None

"""Computes a digest of what a run's numbers depend on beside its configuration: the code and the files it names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

import omni_async
from omni_async.runtime.inputs import RunInputs
from omni_async.tracking.files import write_atomic

_FILE = "fingerprint"


def fingerprint(inputs: RunInputs) -> str:
    """Return a hexadecimal digest.

    Of a model's files their names, sizes and times of change count, of everything else the content."""
    found = hashlib.sha256(_code().encode())
    for part in (inputs.profile, inputs.prompts, inputs.validation_prompts):
        found.update(msgspec.json.encode(part) + b"\n")
    if inputs.profile is None:
        for line in _model_files(Path(inputs.config.model.path)):
            found.update(line.encode() + b"\n")
    return found.hexdigest()


def stamp(run: Path, inputs: RunInputs) -> None:
    """Write the fingerprint into the folder of a run that was made just now."""
    write_atomic(run / _FILE, fingerprint(inputs).encode())


def stamped(run: Path) -> str | None:
    try:
        return (run / _FILE).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


@cache
def _code() -> str:
    root = Path(omni_async.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _model_files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            yield f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}"

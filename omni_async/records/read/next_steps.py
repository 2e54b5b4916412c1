"""Suggests commands for a finished run, with the run's paths, to be typed as they are printed."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from omni_async.checkpoint.folders import newest_first
from omni_async.config.draws import export_loader
from omni_async.records.read.record import engine_of
from omni_async.records.write.rundir import RunDirectory

_PROGRAM = "omni-async"


def next_steps(run: RunDirectory) -> list[str]:
    """Return the lines: commands that show the run if it made an update, and that use the weights if it kept some.

    Checkpoints of emulated devices contain no weights, and a run that ended before its first checkpoint has none."""
    if not run.metrics.exists() or run.metrics.stat().st_size == 0:
        return []
    here = Path.cwd()
    folder = shlex.quote(str(run.path.relative_to(here) if run.path.is_relative_to(here) else run.path))
    steps = {f"report {folder}": "a page about it"}
    newest = next(iter(newest_first(run.checkpoints)), None)
    if newest is not None and (newest / "tensors").is_dir():
        drawn, exported = (shlex.quote(str(Path(kind) / run.run_id)) for kind in ("drawn", "exported"))
        steps |= {
            f"sample {folder} --out {drawn}": "what its model draws now",
            f"export {folder} --out {exported}": f"a model that {export_loader(engine_of(run))} loads",
        }
    program = shlex.quote(program_as_typed())
    width = max(map(len, steps)) + 2
    return ["next:", *(f"  {program} {step:<{width}}# {gives}" for step, gives in steps.items())]


def program_as_typed() -> str:
    """Return how to start this process's `omni-async` from here: by its path if the shell finds another."""
    started, found = Path(sys.argv[0]), shutil.which(_PROGRAM)
    if started.name != _PROGRAM or (found is not None and Path(found).samefile(started)):
        return _PROGRAM
    return str(started)

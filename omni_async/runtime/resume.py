"""Where a run goes on: what `checkpoint.resume` leads to, looked at before anything heavy starts. Imports no torch.

null     a new run
auto     the newest run of this name in run.dir that was neither done nor is running, in its own folder; a new run if there is none
RUN      that run, in its own folder
FOLDER   a checkpoint: a new run that starts from it

Of a run's checkpoints the newest that is whole counts; one that is cut off, changed or of another model is passed over, and that is said. So is
one whose run's ledger has lost lines, and groups that wait for the trainer are made again if the recipe would make others now.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omni_async.checkpoint.errors import CheckpointError
from omni_async.checkpoint.folders import newest_first, require_whole
from omni_async.checkpoint.samples import fitting
from omni_async.checkpoint.state import State, read_state
from omni_async.config import Config, ConfigError
from omni_async.control.ledger_prefix import LedgerDamaged, require_prefix
from omni_async.tracking.rundir import RunDirectory
from omni_async.tracking.summary import read_summary


@dataclass(frozen=True)
class ResumePoint:
    """`run`: the folder that is gone on with; None: the run gets one of its own. `notes` are for the console."""

    folder: Path
    state: State
    run: Path | None = None
    notes: tuple[str, ...] = ()


def find_resume_point(config: Config) -> ResumePoint | None:
    """ConfigError, one line, where there should be a checkpoint and none can be used."""
    resume = config.checkpoint.resume
    if resume is None:
        return None
    if resume == "auto":
        run = _newest_unfinished(config)
        return None if run is None else _of_run(config, run)
    folder = Path(resume)
    if (folder / "checkpoints").is_dir():
        if RunDirectory(folder).is_running():
            raise ConfigError(f"checkpoint.resume: {folder} is running; wait for its end, or stop it")
        return _of_run(config, folder)
    try:
        state = _usable(config, folder)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume: {error}") from None
    if state.version >= config.trainer.updates:
        raise ConfigError(
            f"checkpoint.resume: the checkpoint is at update {state.version} already, trainer.updates is {config.trainer.updates}"
        )
    state, notes = _with_fitting_groups(config, state)
    return ResumePoint(folder, state, notes=(*notes, f"from {folder}, at update {state.version}"))


def _newest_unfinished(config: Config) -> Path | None:
    """By the time in its name."""
    for path in sorted(Path(config.run.dir).glob(f"{config.run.name}-*/"), reverse=True):
        run = RunDirectory(path)
        if not run.is_of(config.run.name) or run.is_running():
            continue
        return path if _unfinished(run) and any(newest_first(run.checkpoints)) else None
    return None


def _unfinished(run: RunDirectory) -> bool:
    try:
        return read_summary(run.summary).status != "done"
    except (OSError, ValueError, RecursionError):
        return True


def newest_of_run(config: Config, run: Path, refused: list[str] | None = None) -> ResumePoint | None:
    """The newest checkpoint of a run that can be used; why others could not is appended to `refused`."""
    refused = [] if refused is None else refused
    for folder in newest_first(run / "checkpoints"):
        try:
            state = _usable(config, folder)
            _require_ledger(run, state)
        except CheckpointError as error:
            refused.append(f"warning: not resumed from {folder.name}: {error}")
            continue
        state, notes = _with_fitting_groups(config, state)
        return ResumePoint(folder, state, run, (*refused, *notes, f"going on with {run.name} from update {state.version}"))
    return None


def _of_run(config: Config, run: Path) -> ResumePoint:
    refused: list[str] = []
    if (point := newest_of_run(config, run, refused)) is not None:
        return point
    why = "; ".join(line.removeprefix("warning: ") for line in refused) or "it has none"
    raise ConfigError(f"checkpoint.resume: {run} has no checkpoint to go on from ({why}); checkpoint.resume=null starts a new run")


def _usable(config: Config, folder: Path) -> State:
    require_whole(folder)
    state = read_state(folder)
    for what, found, wanted in (
        ("model.pipeline", state.pipeline, config.model.pipeline),
        ("algorithm.name", state.algorithm, config.algorithm.name),
    ):
        if found != wanted:
            raise CheckpointError(f"{folder} is of another job: its {what} is {found!r}, the recipe's is {wanted!r}")
    steps, per_update = state.engine.get("optimizer_steps"), config.trainer.steps_per_update
    if steps is not None and steps != state.version * per_update:  # schedules count optimizer steps, and updates by them
        raise CheckpointError(
            f"{folder} is of another job: it made {steps} optimizer steps in {state.version} updates, trainer.steps_per_update is {per_update}"
        )
    return state


def _require_ledger(run: Path, state: State) -> None:
    """The machine may have gone down before all lines were on its disk, or somebody has changed them."""
    try:
        require_prefix(RunDirectory(run).ledger, state.control.ledger)
    except LedgerDamaged as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"the ledger cannot be read: {error}") from None


def _with_fitting_groups(config: Config, state: State) -> tuple[State, tuple[str, ...]]:
    kept, changed = fitting(state, config)
    if not changed:
        return state, ()
    return kept, (f"groups that waited for the trainer ({len(state.control.ready)}) are made again: {', '.join(changed)} changed",)

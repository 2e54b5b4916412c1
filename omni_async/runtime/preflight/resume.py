"""Resolves `checkpoint.resume` before anything heavy starts: finds where a run continues. Imports no torch.

null     a new run
auto     the newest run of this name in run.dir that is neither done nor running and has a usable checkpoint, in its
         own folder; without one, a new run. Runs passed over are logged
RUN      that run, in its own folder
FOLDER   a checkpoint: a new run that starts from it

A run continues from its newest complete checkpoint. Passed over, and logged, are checkpoints that
- are cut off, changed or of another model, or
- count lines with which the run's ledger does not begin.

Groups that wait for the trainer are generated again if the recipe would now generate different ones. A checkpoint
beyond trainer.updates is refused: resuming before it would make void trained updates.

The statement in a checkpoint is compared with the recipe, key by key and file by file
(`omni_async.checkpoint.statement`): each difference is refused, or becomes a note and one of the point's `changes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from omni_async.checkpoint.folders import MANIFEST_FILE, links_among, newest_first, newest_version, require_whole
from omni_async.checkpoint.state import CheckpointError, State, fitting, read_state
from omni_async.checkpoint.statement import Change, changes_since, stated
from omni_async.config import Config, ConfigError, load
from omni_async.records.write.ledger_file import LedgerDamaged, require_prefix
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import read_ending


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from.

    `run`: the folder of the continued run; None: a new run gets a new folder. `notes` are for the console. `changes`:
    the differences between the recipe and the recipe stated in the checkpoint."""

    folder: Path
    state: State
    run: Path | None = None
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class _Asked:
    """The recipe that a checkpoint has to fit, and the contents of its files."""

    config: Config
    contents: Mapping[str, str]


# Up to this many finished runs are named, the newest first; further ones are only counted.
_NAMED = 5
_UNKNOWN: Mapping[str, str] = MappingProxyType({})
_EXPECTED = "; expected 'auto', the folder of a run or that of a checkpoint"


def find_resume_point(
    config: Config, passed: list[str] | None = None, contents: Mapping[str, str] = _UNKNOWN
) -> ResumePoint | None:
    """Return the checkpoint that the run resumes from; None: a new run begins.

    Args:
        config: the recipe.
        passed: receives a line for everything that `auto` passes over, for the console.
        contents: of the recipe's files, as `contents_of` returns them; missing files are not compared.

    Raises:
        ConfigError: a checkpoint is required, and none is usable; one line."""
    resume, asked = config.checkpoint.resume, _Asked(config, contents)
    if resume is None:
        return None
    if resume == "auto":
        return _newest_unfinished(asked, [] if passed is None else passed)
    folder = Path(resume)
    if not folder.is_dir():
        problem = f"{folder} is not a folder" if folder.exists() else f"no such folder: {folder}"
        raise ConfigError(f"checkpoint.resume: {problem}{_EXPECTED}")
    if (folder / "checkpoints").is_dir() or RunDirectory(folder).config_yaml.is_file():
        if RunDirectory(folder).is_running():
            raise ConfigError(f"checkpoint.resume: {folder} is running; wait for its end, or stop it")
        return _of_run(asked, folder)
    try:
        found = _usable(asked, folder)
    except CheckpointError as error:
        expected = "" if (folder / MANIFEST_FILE).is_file() else _EXPECTED
        raise ConfigError(f"checkpoint.resume: {error}{expected}") from None
    if (version := found.state.version) >= config.trainer.updates:
        raise ConfigError(
            f"checkpoint.resume: {folder} is at update {version} already, trainer.updates is"
            f" {config.trainer.updates}; trainer.updates=N with N above {version} trains on from it"
        )
    return _with_fitting_groups(asked, found, f"from {folder}, at update {version}")


def nothing_to_do(config: Config) -> str | None:
    """Return the message for a resumed run that has made all its updates, None for any other.

    Reads only the run's summary and the names of its checkpoints."""
    resume = config.checkpoint.resume
    if resume is None or resume == "auto":
        return None
    run, updates = RunDirectory(Path(resume)), config.trainer.updates
    status, made = read_ending(run.summary)
    # Updates count from the weights that the run began with, and trainer.updates from the initial weights of the run
    # that it took them from.
    if status != "done" or max(made, newest_version(run.checkpoints)) != updates:
        return None
    return (
        f"{run.path} is done, nothing to do: it is at update {updates}, the last; trainer.updates=N, with N larger than"
        f" {updates}, continues it"
    )


def newest_of_run(
    config: Config, run: Path, refused: list[str] | None = None, contents: Mapping[str, str] = _UNKNOWN
) -> ResumePoint | None:
    """Find the newest usable checkpoint of a run, no later than trainer.updates.

    Args:
        config: the recipe that the run continues with.
        run: its folder.
        refused: receives a line for each newer checkpoint, with the reason why it is not usable.
        contents: of the recipe's files, as in `find_resume_point`."""
    refused = [] if refused is None else refused
    for point in _Search(refused).points(_Asked(config, contents), run):
        if point.state.version <= config.trainer.updates:
            return point
        refused.append(_not_from(point.folder, f"it is beyond trainer.updates = {config.trainer.updates}"))
    return None


def _newest_unfinished(asked: _Asked, passed: list[str]) -> ResumePoint | None:
    done: list[str] = []
    config, point = asked.config, None
    folder = Path(config.run.dir)
    runs = [RunDirectory(path) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    of_name = [run for run in runs if run.is_of(config.run.name)]
    # Names contain the time, and a number for runs that began in the same second.
    for run in sorted(of_name, key=lambda run: run.began, reverse=True):
        if run.is_running():
            passed.append(f"passed over {run.run_id}: it is running")
        elif (problem := run.problem()) is not None:
            passed.append(f"warning: passed over {run.run_id}: {problem}")
        elif read_ending(run.summary)[0] == "done":
            done.append(run.run_id)
        elif not any(newest_first(run.checkpoints)):
            passed.append(f"passed over {run.run_id}: it has no checkpoint")
        else:
            search = _Search()
            if (point := next(search.points(asked, run.path), None)) is not None:
                break
            passed.append(f"warning: passed over {run.run_id}: {search.why()}")
    if done:
        others = f" and {len(done) - _NAMED} more" if len(done) > _NAMED else ""
        passed.append(
            f"passed over, because done: {', '.join(done[:_NAMED])}{others} (checkpoint.resume=FOLDER and a larger"
            " trainer.updates continue such a run)"
        )
    return None if point is None else _within_updates(config, point)


def _of_run(asked: _Asked, run: Path) -> ResumePoint:
    if (problem := RunDirectory(run).problem()) is not None:
        raise ConfigError(f"checkpoint.resume: cannot resume in {run}: {problem}")
    search = _Search()
    if (point := next(search.points(asked, run), None)) is None:
        raise ConfigError(f"checkpoint.resume: {run} {search.why()}; checkpoint.resume=null starts a new run")
    return _within_updates(asked.config, point)


def _within_updates(config: Config, point: ResumePoint) -> ResumePoint:
    """Refuse a checkpoint past the last update.

    No update is left to make, and finished ones cannot be undone, so the run would wait for ever."""
    if point.state.version > config.trainer.updates:
        raise ConfigError(
            f"checkpoint.resume: {point.run} is at update {point.state.version}, beyond trainer.updates ="
            f" {config.trainer.updates}; trainer.updates=N with N above {point.state.version} resumes it,"
            " checkpoint.resume=null starts a new run"
        )
    return point


@dataclass
class _Search:
    """A search through a run's checkpoints.

    `refused`: reasons against unusable checkpoints; `orphan`: the newest complete checkpoint with a damaged ledger."""

    refused: list[str] = field(default_factory=list)
    orphan: Path | None = None

    def points(self, asked: _Asked, run: Path) -> Iterator[ResumePoint]:
        """Yield the usable checkpoints, the newest first."""
        self.refused += [f"warning: not resumed from it: {link}" for link in links_among(run / "checkpoints")]
        for folder in newest_first(run / "checkpoints"):
            found = None
            try:
                found = _usable(asked, folder)
                _require_ledger(run, found.state)
            except CheckpointError as error:
                self.refused.append(_not_from(folder, str(error)))
                if found is not None:
                    self.orphan = self.orphan or folder
                continue
            found = replace(found, run=run, notes=(*self.refused, *found.notes))
            yield _with_fitting_groups(asked, found, f"continuing {run.name} from update {found.state.version}")

    def why(self) -> str:
        """Explain why no checkpoint is usable: the reason of the newest, and the number of older ones."""
        newest, *older = [line.removeprefix("warning: ") for line in self.refused] or ["it has none"]
        reasons = newest + (f"; and {len(older)} older cannot be used either" if older else "")
        way_out = f"; checkpoint.resume={self.orphan} starts a new run from its weights" if self.orphan else ""
        return f"has no checkpoint to resume from ({reasons}){way_out}"


def _not_from(folder: Path, why: str) -> str:
    return f"warning: not resumed from {folder.name}: {why}"


def _usable(asked: _Asked, folder: Path) -> ResumePoint:
    """Return a checkpoint and its differences from the recipe. CheckpointError if the recipe cannot continue it."""
    require_whole(folder)
    config, state = asked.config, read_state(folder)
    _require_same_devices(config, folder, state)
    for what, found, wanted in (
        ("model.pipeline", state.pipeline, config.model.pipeline),
        ("algorithm.name", state.algorithm, config.algorithm.name),
    ):
        if found != wanted:
            raise CheckpointError(f"{folder} is of another job: its {what} is {found!r}, the recipe's is {wanted!r}")
    steps, per_update = state.engine.get("optimizer_steps"), config.trainer.steps_per_update
    # Schedules count optimizer steps, and derive updates from them.
    if steps is not None and steps != state.version * per_update:
        raise CheckpointError(
            f"{folder} is of another job: it made {steps} optimizer steps in {state.version} updates,"
            f" trainer.steps_per_update is {per_update}"
        )
    return _with_changes(asked, ResumePoint(folder, state))


def _with_changes(asked: _Asked, point: ResumePoint) -> ResumePoint:
    """Return the point with a note for each change of the recipe. CheckpointError lists the refused changes."""
    folder, state, notes = point.folder, point.state, list[str]()
    if (statement := state.statement) is None:
        # An earlier version wrote it. The run's config.yaml is the recipe of its newest attempt.
        file = RunDirectory(folder.absolute().parent.parent).config_yaml
        former = _recipe_of(file)
        compared = f"it is compared with {file}" if former else "nothing is compared"
        notes.append(f"warning: {folder.name} is of an earlier version and states no recipe; {compared}")
        if former is None:
            return replace(point, notes=tuple(notes))
        statement = stated(former, {})
    tracked = bool(state.rule.get("reward_history"))
    changes = changes_since(statement, asked.config, asked.contents, tracked)
    if refused := [str(one) for one in changes if one.why_not is not None]:
        raise CheckpointError("; ".join(refused))
    notes += [f"changed since {folder.name}: {one}" for one in changes]
    return replace(point, notes=tuple(notes), changes=tuple(changes))


def _recipe_of(file: Path) -> Config | None:
    try:
        return load(file, within=file.parent)
    except ConfigError:  # the file is missing, or its keys are of another version
        return None


def _require_same_devices(config: Config, folder: Path, state: State) -> None:
    """Refuse a checkpoint of emulated devices for real ones, and vice versa.

    Emulated devices train nothing: their checkpoints, without weights, would replace trained ones, and their numbers
    would replace the run's."""
    trained, emulated = "optimizer_steps" in state.engine, config.emulation is not None
    if trained == emulated:
        why = (
            "it holds trained weights, and the recipe's devices are emulated (emulation)"
            if trained
            else "it has no weights, because its devices were emulated; the recipe's are not"
        )
        raise CheckpointError(f"{folder} is of another job: {why}")


def _require_ledger(run: Path, state: State) -> None:
    """Require the ledger lines that the state counts.

    Some may be missing because the machine crashed before they were on disk, or because somebody changed them."""
    try:
        require_prefix(RunDirectory(run).ledger, state.control.ledger)
    except LedgerDamaged as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"the ledger cannot be read: {error.strerror or error}") from None


def _with_fitting_groups(asked: _Asked, point: ResumePoint, last: str) -> ResumePoint:
    """Return the point without ready groups that the recipe would now generate differently, and with a `last` note."""
    kept, changed = fitting(point.state, asked.config, asked.contents)
    ready = len(point.state.control.ready)
    again = [f"groups that waited for the trainer ({ready}) are made again: {', '.join(changed)} changed"]
    return replace(point, state=kept, notes=(*point.notes, *(again if changed else ()), last))

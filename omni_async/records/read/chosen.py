"""Finds the checkpoint that a user names: by a run and a number, the last or the best; or by a checkpoint folder.

Its recipe is the one stated in the checkpoint. The run's `config.yaml` is the newest attempt's, which may differ.
Imports no torch. `omni_async.training.trained` reads the tensors of the checkpoint found here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from omni_async import __version__
from omni_async.checkpoint.best import best_first, rounds_of
from omni_async.checkpoint.contents import another_part, model_contents
from omni_async.checkpoint.folders import MANIFEST_FILE, by_version, newest_first, require_whole, version_of
from omni_async.checkpoint.state import CheckpointError, State, read_state
from omni_async.config import Config, ConfigError, load, of_tree
from omni_async.config.load import checkpoint_class, is_checkpoint
from omni_async.config.reading import real_path
from omni_async.control.reasons import listed
from omni_async.control.rounds import NotComparable, Round, compare, ranked
from omni_async.plugins.families import PipelineFamily, find_family
from omni_async.records.read.rounds import read_rounds
from omni_async.records.write.rundir import RunDirectory


@dataclass(frozen=True)
class Chosen:
    """A whole checkpoint of trained weights, and the model that they belong to.

    folder: the checkpoint's. run: its run. config: the checkpoint's, whose `model.path` is `base`. family: the model's.
    base: the model folder that training began with. components: the trained ones, in diffusers layout folders in
    `base`. round: the validation round of this version, None if it has none with a reward. notes: one line each, for
    the console."""

    folder: Path
    run: RunDirectory
    config: Config
    state: State
    family: PipelineFamily
    base: Path
    components: tuple[str, ...]
    round: Round | None
    notes: tuple[str, ...] = ()

    @property
    def reward(self) -> float | None:
        """Mean validation reward over the scored samples, None without a reward."""
        return None if self.round is None else self.round.reward

    @property
    def shown_reward(self) -> str:
        """Format `0.9`, or `1.039 over 1 of 2 samples, not scored: no face found`; an empty text without a round."""
        return "" if self.round is None else _shown(self.round)

    @property
    def version(self) -> int:
        """Number of updates after which the weights were saved."""
        return self.state.version

    @property
    def made_by(self) -> str:
        """The version of omni_async that trained it, if the checkpoint states it; otherwise the current version."""
        return __version__ if self.state.statement is None else self.state.statement.made_by


def choose(given: Path, which: str | None = None, base: Path | None = None) -> Chosen:
    """Find the named checkpoint. Reads all of it, to compare it with its manifest.

    Args:
        given: the folder of a run, or of a checkpoint in it.
        which: for a run: `best` by validation reward, `last`, or a number of updates; None: the last.
        base: the model folder that training began with, if it has moved.

    Raises:
        ConfigError: the checkpoint is missing, damaged or foreign, or the base model is missing; one line."""
    run = _run_of(given, which)
    newest = _config_of(run)
    found = by_version(run.checkpoints)
    rounds = _rounds(run)
    measured = rounds_of(newest, found, rounds)
    notes: list[str] = []
    folder = given
    if run.path == given:
        version, notes = _select(run, [*found], measured, rounds, which or "last")
        folder = found[version]
    state = _state_of(folder, run, [path for path in found.values() if path != folder])
    config, more = _stated(folder, state, newest)
    family, model = _family_of(folder, state, config), _base_of(folder, state, (config, newest), base)
    config = replace(config, model=replace(config.model, path=str(model)))
    in_folders = family.layout == "diffusers"
    components = tuple(name for name in family.components if not in_folders or (model / name).is_dir())
    if not components:
        raise ConfigError(f"model.path: {model} has no {family.components[0]}/, which {folder} was trained from")
    done = measured.get(state.version)
    return Chosen(folder, run, config, state, family, model, components, done, (*notes, *more))


def base_recipe(run: Path) -> Config:
    """Return the recipe of a run's newest checkpoint, with the folder that training began with as `model.path`.

    Raises ConfigError, one line, if that folder is missing or now holds another model."""
    directory = RunDirectory(run)
    newest = config = _config_of(directory)
    folder, state = next(newest_first(directory.checkpoints), run), None
    with contextlib.suppress(CheckpointError):  # there is no checkpoint yet, or it is damaged
        state = read_state(folder)
        config, _ = _stated(folder, state, newest)
    base = _base_of(folder, state, (config, newest), None)
    return replace(config, model=replace(config.model, path=str(base)))


def _stated(folder: Path, state: State, newest: Config) -> tuple[Config, list[str]]:
    """Return the recipe that a checkpoint states, and notes; the run's `newest` recipe for a checkpoint without one."""
    if state.statement is None:
        run = folder.absolute().parent.parent.name
        return newest, [f"{run}: its checkpoints of an earlier version state no recipe; config.yaml is read instead"]
    return of_tree(state.statement.recipe, folder), []


def _base_of(folder: Path, state: State | None, recipes: Iterable[Config], given: Path | None) -> Path:
    """Return the folder of the model that a checkpoint was trained from, by its content.

    Args:
        folder: the checkpoint's.
        state: its state; None: the model is not known.
        recipes: they name the model; the checkpoint's is first. The model may have moved since.
        given: the folder named on the command line, if any.

    Raises:
        ConfigError: the model is at none of these paths; one line."""
    paths = [given.absolute()] if given else [*dict.fromkeys(Path(config.model.path) for config in recipes)]
    contents = {} if state is None or state.statement is None else state.statement.contents
    there = [path for path in paths if is_checkpoint(path)] or paths[:1]
    wrong: list[str] = []
    for path in there:
        checkpoint_class(path)
        if (part := another_part(contents, model_contents(path)) if contents else None) is None:
            return path
        wrong.append(f"{path / part}: it is another base model than {folder.name} was trained from")
    raise ConfigError(f"model.path: {wrong[0]}; put that one there, or name its folder (`export --base DIR`)")


def _run_of(given: Path, which: str | None) -> RunDirectory:
    """Return the given run, or the run of the given checkpoint."""
    if not given.is_dir():
        raise ConfigError(f"{given}: {'is not a folder' if given.exists() else 'there is no such folder'}")
    if RunDirectory(given).config_yaml.is_file():
        return RunDirectory(given)
    if version_of(given) is None and not (given / MANIFEST_FILE).exists():
        raise ConfigError(f"{given}: neither a run folder (no config.yaml) nor a checkpoint (no {MANIFEST_FILE})")
    if which is not None:
        raise ConfigError(f"--which {which}: {given} is one checkpoint; name its run, or leave --which out")
    run = RunDirectory(real_path(given).parent.parent)
    if not run.config_yaml.is_file():
        raise ConfigError(
            f"{given}: {run.config_yaml} is missing, which describes the checkpoint; it belongs into the folder"
            " of its run, as RUN/checkpoints/update-N"
        )
    return run


def _config_of(run: RunDirectory) -> Config:
    try:
        config = load(run.config_yaml, within=run.path)
    except ConfigError as error:
        raise ConfigError(f"{run.config_yaml}: {error}") from None
    if config.emulation is not None:
        raise ConfigError(f"{run.path}: its devices were emulated, so it has no trained weights")
    return config


def _select(
    run: RunDirectory, versions: list[int], measured: Mapping[int, Round], rounds: Sequence[Round], which: str
) -> tuple[int, list[str]]:
    """Return the version that `which` selects from the existing ones, which are sorted newest first; and notes."""
    if not versions:
        why = "it has no checkpoint yet"
        if run.checkpoints.is_symlink() or any(map(Path.is_symlink, run.checkpoints.glob("update-*"))):
            why = "its checkpoints are links, which may lead anywhere; move them into the run folder, which may be one"
        raise ConfigError(f"{run.path}: {why}")
    best = next(iter(best_first(measured, rounds)), None)
    match which:
        case "last":
            if best is None or best == versions[0]:
                return versions[0], []
            return versions[0], [_better(best, measured[best], measured.get(versions[0]))]
        case "best":
            if best is None:
                lacks = "a validation round with 90 % of its samples scored" if measured else "a validation reward"
                raise ConfigError(f"--which best: no checkpoint of {run.path} has {lacks}; use last")
            return best, [*_without_checkpoint(best, measured, rounds), *_barred(best, measured)]
        case _ if which.isdecimal() and len(which) < 19 and int(which) in versions:
            return int(which), []
    there = ", ".join(map(str, sorted(versions)))
    if which.isdecimal():
        raise ConfigError(f"--which {which}: {run.path} has no checkpoint of that update; it has {there}")
    raise ConfigError(f"--which: expected best, last or an update, got {which!r}; {run.path} has {there}")


def _better(best: int, its: Round, last: Round | None) -> str:
    """Compare the best checkpoint with the last one, over the samples scored in both rounds."""
    reward, own, over = _shown(its), "not measured" if last is None else _shown(last), ""
    if last is not None and last.may_be_best:
        with contextlib.suppress(NotComparable):
            change = compare(last, its)
            own, reward, over = f"{change.reward[0]:.4g}", f"{change.reward[1]:.4g}", change.over
    return f"update {best} has the best validation reward, {reward} (this one: {own}{over}): --which best"


def _without_checkpoint(best: int, measured: Mapping[int, Round], rounds: Sequence[Round]) -> Iterator[str]:
    """Yield a note if the best round of the run has no checkpoint and is above the best checkpoint's."""
    first, its = ranked(rounds)[0], measured[best]
    if first.version == its.version:
        return
    base = " (it is the base model)" if first.version == 0 else ""
    with contextlib.suppress(NotComparable):
        change = compare(its, first)
        yield (
            f"the round of update {first.version} had {change.reward[1]:.4g}, above the {change.reward[0]:.4g} of"
            f" update {best}{change.over}, and has no checkpoint{base}"
        )


def _barred(best: int, measured: Mapping[int, Round]) -> Iterator[str]:
    """Yield a note about each checkpoint with a higher mean over too few samples."""
    for version, one in sorted(measured.items()):
        if not one.may_be_best and (one.reward or 0.0) > (measured[best].reward or 0.0):
            yield f"update {version} scored too few samples to be the best: its validation reward is {_shown(one)}"


def _shown(one: Round) -> str:
    """Format a round's reward, and its number of samples if some are missing."""
    reward = "no reward" if one.reward is None else f"{one.reward:.4g}"
    if not one.is_incomplete:
        return reward
    why = f", not scored: {listed(one.reasons)}" if one.reasons else ""
    return f"{reward} over {one.scored} of {one.asked} samples{why}"


def _rounds(run: RunDirectory) -> list[Round]:
    """Return the finished validation rounds by version."""
    try:
        return read_rounds(run.read_metrics())
    except OSError as error:
        raise ConfigError(f"{run.metrics} cannot be read: {error.strerror or error}") from None


def _state_of(folder: Path, run: RunDirectory, others: list[Path]) -> State:
    try:
        require_whole(folder)
        state = read_state(folder)
    except CheckpointError as error:
        way_out = f"; {run.path} has others: {', '.join(one.name for one in others[:3])}" if others else ""
        raise ConfigError(f"{error}{way_out}") from None
    if "optimizer_steps" not in state.engine:
        raise ConfigError(f"{folder}: it has no trained weights, because its devices were emulated")
    return state


def _family_of(folder: Path, state: State, config: Config) -> PipelineFamily:
    if state.pipeline is None or state.pipeline != config.model.pipeline:
        raise ConfigError(
            f"{folder} is of another run: its model.pipeline is {state.pipeline!r}, config.yaml's is"
            f" {config.model.pipeline!r}"
        )
    try:
        return find_family(state.pipeline)
    except ValueError as error:
        raise ConfigError(str(error)) from None

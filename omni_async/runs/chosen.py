"""Finds the checkpoint that a user names: that of a run, by number, the last or the best, or a checkpoint folder.

Its recipe is the one that the checkpoint states. The run's `config.yaml` is the newest attempt's, which may differ.
Imports no torch. `omni_async.training.trained` reads the tensors of what is found here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from omni_async.checkpoint.best import best_first, rewards_of
from omni_async.checkpoint.contents import another_part, model_contents
from omni_async.checkpoint.folders import MANIFEST_FILE, by_version, newest_first, require_whole, version_of
from omni_async.checkpoint.state import CheckpointError, State, read_state
from omni_async.config import Config, ConfigError, load, of_tree
from omni_async.config.load import INDEX, read_model_index
from omni_async.families import PipelineFamily, find_family
from omni_async.tracking.rundir import RunDirectory
from omni_async.version import __version__


@dataclass(frozen=True)
class Chosen:
    """A whole checkpoint of trained weights, and what they are trained weights of.

    folder: the checkpoint's. run: its run. config: the checkpoint's, whose `model.path` is `base`. family: the model's.
    base: the model folder that training began with. components: the folders in `base` that were trained. reward: that
    of the validation round of this version, None if there was none. notes: one line each, for the console."""

    folder: Path
    run: RunDirectory
    config: Config
    state: State
    family: PipelineFamily
    base: Path
    components: tuple[str, ...]
    reward: float | None
    notes: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        """Number of updates that made the weights."""
        return self.state.version

    @property
    def made_by(self) -> str:
        """The version of omni_async that trained it, where the checkpoint states it, else this one."""
        return __version__ if self.state.statement is None else self.state.statement.made_by


def choose(given: Path, which: str | None = None, base: Path | None = None) -> Chosen:
    """Find the checkpoint that is meant. Reads all of it, to compare it with its manifest.

    Args:
        given: the folder of a run, or that of a checkpoint in it.
        which: of a run: `best` by validation reward, `last`, or a number of updates; None: the last.
        base: the model folder that training began with, if it is elsewhere now.

    Raises:
        ConfigError: there is none, it is damaged or foreign, or the base model is missing; one line."""
    run = _run_of(given, which)
    newest = _config_of(run)
    found = by_version(run.checkpoints)
    rounds = [*_rounds(run)]
    rewards = rewards_of(newest, found, rounds)
    notes: list[str] = []
    folder = given
    if run.path == given:
        version, notes = _select(run, [*found], rewards, rounds, which or "last")
        folder = found[version]
    state = _state_of(folder, run, [path for path in found.values() if path != folder])
    config, more = _stated(folder, state, newest)
    family, model = _family_of(folder, state, config), _base_of(folder, state, (config, newest), base)
    config = replace(config, model=replace(config.model, path=str(model)))
    components = tuple(name for name in family.components if (model / name).is_dir())
    if not components:
        raise ConfigError(f"model.path: {model} has no {family.components[0]}/, which {folder} was trained from")
    reward = rewards.get(state.version)
    return Chosen(folder, run, config, state, family, model, components, reward, (*notes, *more))


def base_recipe(run: Path) -> Config:
    """Return the recipe of a run's newest checkpoint, whose `model.path` is the folder that training began with.

    Raises ConfigError, one line, if that is missing or holds another model now."""
    directory = RunDirectory(run)
    newest = config = _config_of(directory)
    folder, state = next(newest_first(directory.checkpoints), run), None
    with contextlib.suppress(CheckpointError):  # there is none yet, or it is damaged
        state = read_state(folder)
        config, _ = _stated(folder, state, newest)
    base = _base_of(folder, state, (config, newest), None)
    return replace(config, model=replace(config.model, path=str(base)))


def _stated(folder: Path, state: State, newest: Config) -> tuple[Config, list[str]]:
    """Return the recipe that a checkpoint states, and notes; the run's `newest` if an earlier version wrote it."""
    if state.statement is None:
        run = folder.absolute().parent.parent.name
        return newest, [f"{run}: its checkpoints of an earlier version state no recipe; config.yaml is read instead"]
    return of_tree(state.statement.recipe, folder), []


def _base_of(folder: Path, state: State | None, recipes: Iterable[Config], given: Path | None) -> Path:
    """Return the folder of the model that a checkpoint was trained from, by its content.

    Args:
        folder: the checkpoint's.
        state: its state; None: nothing is known of the model.
        recipes: name the model; the checkpoint's is first. It may have moved since.
        given: where it is by the command line, None if that does not say.

    Raises:
        ConfigError: it is at none of these paths; one line."""
    paths = [given.absolute()] if given else [*dict.fromkeys(Path(config.model.path) for config in recipes)]
    contents = {} if state is None or state.statement is None else state.statement.contents
    there = [path for path in paths if (path / INDEX).is_file()] or paths[:1]
    wrong: list[str] = []
    for path in there:
        read_model_index(path)
        if (part := another_part(contents, model_contents(path)) if contents else None) is None:
            return path
        wrong.append(f"{path / part}: it is another base model than {folder.name} was trained from")
    raise ConfigError(f"model.path: {wrong[0]}; put that one there, or name its folder (`export --base DIR`)")


def _run_of(given: Path, which: str | None) -> RunDirectory:
    """Return the run that is given, or that the given checkpoint lies in."""
    if not given.is_dir():
        raise ConfigError(f"{given}: {'is not a folder' if given.exists() else 'there is no such folder'}")
    if RunDirectory(given).config_yaml.is_file():
        return RunDirectory(given)
    if version_of(given) is None and not (given / MANIFEST_FILE).exists():
        raise ConfigError(f"{given}: neither a run folder (no config.yaml) nor a checkpoint (no {MANIFEST_FILE})")
    if which is not None:
        raise ConfigError(f"--which {which}: {given} is one checkpoint; name its run, or leave --which out")
    run = RunDirectory(given.resolve().parent.parent)
    if not run.config_yaml.is_file():
        raise ConfigError(
            f"{given}: {run.config_yaml} is missing, which says what the checkpoint is of; it belongs into the folder"
            " of its run, as RUN/checkpoints/update-N"
        )
    return run


def _config_of(run: RunDirectory) -> Config:
    try:
        config = load(run.config_yaml)
    except ConfigError as error:
        raise ConfigError(f"{run.config_yaml}: {error}") from None
    if config.emulation is not None:
        raise ConfigError(f"{run.path}: its devices were emulated, so it has no trained weights")
    return config


def _select(
    run: RunDirectory,
    versions: list[int],
    rewards: Mapping[int, float],
    rounds: Iterable[tuple[int, float | None]],
    which: str,
) -> tuple[int, list[str]]:
    """Return the version that `which` means, of those that are there, the newest first; and notes."""
    if not versions:
        raise ConfigError(f"{run.path}: it has no checkpoint yet")
    best = next(iter(best_first(rewards)), None)
    match which:
        case "last":
            if best is None or best == versions[0]:
                return versions[0], []
            own = f"{rewards[versions[0]]:.4g}" if versions[0] in rewards else "not measured"
            return versions[0], [
                f"update {best} has the best validation reward, {rewards[best]:.4g} (this one: {own}): --which best"
            ]
        case "best":
            if best is None:
                raise ConfigError(f"--which best: no checkpoint of {run.path} has a validation reward; use last")
            others = {version: reward for version, reward in rounds if reward is not None and version not in rewards}
            higher = [version for version in best_first(others) if others[version] > rewards[best]][:1]
            return best, [
                f"the round of update {version} had {others[version]:.4g}, above the {rewards[best]:.4g} of update"
                f" {best}, and has no checkpoint{' (it is the base model)' if version == 0 else ''}"
                for version in higher
            ]
        case _ if which.isdecimal() and len(which) < 19 and int(which) in versions:
            return int(which), []
    there = ", ".join(map(str, sorted(versions)))
    if which.isdecimal():
        raise ConfigError(f"--which {which}: {run.path} has no checkpoint of that update; it has {there}")
    raise ConfigError(f"--which: expected best, last or an update, got {which!r}; {run.path} has {there}")


def _rounds(run: RunDirectory) -> Iterator[tuple[int, float | None]]:
    """Yield the finished validation rounds: the version that each began with, and its mean reward."""
    try:
        lines = run.read_metrics()
    except OSError as error:
        raise ConfigError(f"{run.metrics} cannot be read: {error.strerror or error}") from None
    for line in lines:
        reward: Any = line.get("validation/reward")
        if "finished" not in line and isinstance(line["update"], int) and isinstance(reward, int | float):
            yield line["update"], reward


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

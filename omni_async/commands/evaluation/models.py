"""Finds the models that a user names: a model's folder, an export, the folder of a run, or a checkpoint in it.

Imports no torch and reads no weights, except to compare a checkpoint with its manifest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import xxhash

from omni_async.checkpoint.contents import model_contents, path_contents
from omni_async.checkpoint.folders import MANIFEST_FILE, by_version, folder_name
from omni_async.checkpoint.statement import plain
from omni_async.config import Config, ConfigError, load, of_tree
from omni_async.config.hub import downloaded, how_to_get
from omni_async.config.load import INDEX, is_checkpoint
from omni_async.config.reading import read_file, real_path
from omni_async.records.read.chosen import Chosen, base_recipe, choose

Policy = Literal["drawing", "trained", "old", "ema"]
DRAWING: Policy = "drawing"
BASE = "base"
ADAPTERS = "pytorch_lora_weights.safetensors"
PEFT_ADAPTERS = "adapter_model.safetensors"  # of models in transformers layout
EXPORTED_RECIPE = "recipe.yaml"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Model:
    """A model to draw with.

    label: its name in results and folders.
    base: the folder of the whole model.
    trained: the checkpoint whose weights replace the base's; None: no replacement.
    adapter: the export whose adapters are added to the base; None: no adapters.
    run: the run's folder; None for a folder outside a run.
    notes: one line each, for the console.
    policy: the checkpoint's policy, as for `TrainedWeights`.
    config: the recipe of the checkpoint, or of a run's newest checkpoint for the run's base; None for a folder outside
        a run."""

    label: str
    base: Path
    trained: Chosen | None = None
    adapter: Path | None = None
    run: Path | None = None
    notes: tuple[str, ...] = ()
    policy: Policy = DRAWING
    config: Config | None = None

    @property
    def version(self) -> int | None:
        """Number of updates behind the weights; 0 for a run's base, None without a known run."""
        if self.trained is not None:
            return self.trained.version
        return None if self.run is None else 0

    @property
    def weights(self) -> Path:
        """The folder that distinguishes the model: the checkpoint's, the export's or the base's."""
        return self.adapter or (self.base if self.trained is None else self.trained.folder)

    def recipe(self, overrides: Sequence[str]) -> Config | None:
        """Return the recipe of the model's training, if known. Raises ConfigError, one line.

        overrides: as `load` takes them."""
        if self.config is not None:
            return of_tree(plain(self.config), self.weights, overrides)
        exported = self.weights / EXPORTED_RECIPE
        return load(exported, overrides) if exported.is_file() else None

    def identity(self) -> str:
        """Return a digest of the content of all files, which changes with the weights but not with their location.

        Raises OSError, or ConfigError if a file cannot be read."""
        found = xxhash.xxh3_128(repr(sorted(model_contents(self.base).items())).encode())
        for component, file in ({} if self.adapter is None else adapter_files(self.adapter)).items():
            found.update(f"{component} {sorted(path_contents('adapter', file).items())};".encode())
        if self.trained is not None:
            found.update(
                read_file(self.trained.folder / MANIFEST_FILE, within=self.trained.folder) + self.policy.encode()
            )
        return found.hexdigest()


def find_models(given: Sequence[str], which: Sequence[str]) -> list[Model]:
    """Return the models to compare, each once: for a run its base and all its checkpoints, the oldest first.

    Args:
        given: folders, or a hub's `owner/name`.
        which: of a run, only these: `base`, `best`, `last` or numbers of updates; empty: all.

    Raises:
        ConfigError: a model does not exist; one line."""
    found: list[Model] = []
    for text in given:
        folder = _folder(text)
        if not is_run(folder):
            found.append(find_model(text))
            continue
        wanted = [*which] or [BASE, *(str(version) for version in _versions(folder))]
        found += [_of_run(folder, None if one == BASE else one) for one in wanted]
    return named_apart(found)


def find_model(given: str, which: str | None = None) -> Model:
    """Return one model; for a run the checkpoint `which`, by default the last. Raises ConfigError, one line."""
    folder = _folder(given)
    if is_checkpoint(folder):
        if which is not None:
            raise ConfigError(f"--which {which}: {given} is no run, but one model; leave --which out")
        return Model(_label(folder), folder)
    if adapter_files(folder):
        return Model(_label(folder), _base_of_adapter(folder), adapter=folder)
    if is_run(folder):
        return _of_run(folder, which or "last")
    if not (folder / MANIFEST_FILE).is_file():
        raise ConfigError(
            f"{given}: neither a model (no {INDEX}, and no config.json that names architectures), nor adapters (no"
            f" {ADAPTERS} or {PEFT_ADAPTERS}), nor a run (no config.yaml), nor a checkpoint (no {MANIFEST_FILE})"
        )
    return _trained(choose(folder, which))


def base_of(model: Model) -> Model:
    """Return the base of `model`'s training. ConfigError if it was not trained here."""
    if model.trained is not None:
        return _base(model.trained)
    if model.adapter is None:
        raise ConfigError(f"--against base: {model.base} is a whole model; name the model that it was trained from")
    return Model(BASE, model.base)


def with_policy(models: Sequence[Model], policy: Policy) -> list[Model]:
    """Return the models with this policy of their checkpoints; their labels then include it."""
    return [
        each
        if each.trained is None or policy == DRAWING
        else replace(each, label=f"{each.label}-{policy}", policy=policy)
        for each in models
    ]


def named_apart(models: Sequence[Model]) -> list[Model]:
    """Return the models without duplicates; labels get the run's name if runs differ, and a number if equal."""
    once: dict[tuple[Path, Path], Model] = {}
    for each in models:
        once.setdefault((real_path(each.base), real_path(each.weights)), each)
    found = [*once.values()]
    taken: dict[str, int] = {}
    several = len({each.run for each in found if each.run is not None}) > 1
    apart = []
    for each in found:
        label = f"{each.run.name}-{each.label}" if several and each.run is not None else each.label
        taken[label] = taken.get(label, 0) + 1
        apart.append(replace(each, label=label if taken[label] == 1 else f"{label}-{taken[label]}"))
    return apart


def adapter_files(folder: Path) -> dict[str, Path]:
    """Return the files of an export of adapters by component; empty if the folder is no such export."""
    for name in (ADAPTERS, PEFT_ADAPTERS):
        if (folder / name).is_file():
            return {"": folder / name, **{file.parent.name: file for file in sorted(folder.glob(f"*/{name}"))}}
    return {}


def _base_of_adapter(folder: Path) -> Path:
    """Return the base model of exported adapters, from their recipe."""
    recipe = folder / EXPORTED_RECIPE
    if not recipe.is_file():
        raise ConfigError(f"{folder}: adapters without {EXPORTED_RECIPE}, which names their model")
    return Path(load(recipe).model.path)


def _label(folder: Path) -> str:
    return _UNSAFE.sub("-", folder.name).strip("-.") or "model"


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's."""
    return (folder / "config.yaml").is_file() and not (folder / INDEX).is_file()


def _folder(given: str) -> Path:
    try:
        folder = Path(given).expanduser()
        if folder.is_dir():
            return folder.absolute()
        exists = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{given[:200]!r}: expected a folder: {getattr(error, 'strerror', None) or error}") from None
    if exists:
        raise ConfigError(f"{given}: expected a folder, got a file")
    if (hub := downloaded(given)) is not None:
        return hub
    raise ConfigError(how_to_get(folder))


def _versions(run: Path) -> list[int]:
    found = sorted(by_version(run / "checkpoints"))
    if not found:
        raise ConfigError(f"{run}: it has no checkpoint yet")
    return found


def _of_run(run: Path, which: str | None) -> Model:
    """Return a run's checkpoint, or its base if `which` is None; the base reads no checkpoint."""
    if which is not None:
        return _trained(choose(run, which))
    recipe = base_recipe(run)
    return Model(BASE, Path(recipe.model.path), run=run.absolute(), config=recipe)


def _base(chosen: Chosen) -> Model:
    return Model(BASE, chosen.base, run=chosen.run.path.absolute(), config=chosen.config)


def _trained(chosen: Chosen) -> Model:
    label, run = folder_name(chosen.version), chosen.run.path.absolute()
    return Model(label, chosen.base, chosen, run=run, notes=chosen.notes, config=chosen.config)

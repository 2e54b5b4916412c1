"""Finds the parts for a recipe: the model's family and size, its prompts, and rewards and objectives that fit.

Imports no torch; imports scorers' modules, but does not load their models.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import Objective, find_objective, objective_names
from omni_async.config import ConfigError
from omni_async.config import reward as sections
from omni_async.config.hub import downloaded
from omni_async.config.load import CONFIG, decode, family_of, read_model_json
from omni_async.config.tree import read_tree
from omni_async.data.prompts import load_prompts
from omni_async.data.split import question_of
from omni_async.data.tables import NO_COLUMNS, Columns
from omni_async.plugins.entry_points import not_one_of
from omni_async.plugins.families import PipelineFamily, SamplingSpec, find_family
from omni_async.rewards import registry
from omni_async.types import Prompt

_LONGEST_PROMPT = 2**20  # `data.max_prompt_chars` is checked with the recipe
_LINE_HEIGHT = 256  # pixels; an image of at most this height holds a line of text, which `ocr` reads
# The first of these scorers that fits the prompts and the model's media is proposed; the last ones accept any prompt.
_BY_PROMPT = ("scene_text", "object_checks", "exact_match")
_BY_MEDIA = ("motion_smoothness", "pick_score", "vlm_judge")
_PUBLISHED = 100_000_000  # bytes of weights; smaller checkpoints are made for tests, at smaller sizes
_SIDE = 16  # pixels; a side is a multiple
_EXPORTED = "recipe.yaml"  # of an export
_MOST_RECIPES = 20  # read next to a checkpoint
_FEWEST_TO_SPLIT = 20  # prompts that differ; a tenth of fewer measures nothing
_HELD_OUT = ("validation", "valid", "val", "test", "eval", "heldout")


def find_model(model: str) -> tuple[PipelineFamily, int]:
    """Return the family of the checkpoint, and the size in bytes of its trained weights, or of all its weights.

    The size is of all weights in layout `transformers`, whose files hold every component. ConfigError, one line, if
    there is no checkpoint, no family, or more than one family."""
    folder = Path(model).expanduser()
    if not folder.exists():
        folder = downloaded(model) or folder
    try:
        family = find_family(family_of(folder))
    except ValueError as error:
        raise ConfigError(f"--model: {str(error).removeprefix('model.path: ')}") from None
    parts = family.components if family.layout == "diffusers" else ("",)
    return family, sum(file.stat().st_size for name in parts for file in (folder / name).glob("*.safetensors"))


@dataclass(frozen=True)
class Size:
    """The proposed keys of `rollout.sampling`, where they are from, and a warning if they may not fit the checkpoint.

    `source` and `warning` are empty if there is none."""

    sampling: dict[str, Any]
    source: str = ""
    warning: str = ""


def propose_size(model: str, family: PipelineFamily, weight_bytes: int) -> Size:
    """Return the size of samples for a checkpoint: of a recipe that comes with it, else what its configuration has.

    Without either it is the family's default."""
    folder = Path(model).expanduser()
    folder = (folder if folder.exists() else downloaded(model) or folder).resolve()
    default = msgspec.structs.asdict(family.sampling())
    for recipe in [folder / _EXPORTED, *sorted(folder.parent.glob("*.yaml"))[:_MOST_RECIPES]]:
        with contextlib.suppress(ConfigError, OSError, AttributeError):  # a file next to a model may be no recipe
            tree = read_tree(recipe, ())
            named, own = tree.get("model") or {}, (tree.get("rollout") or {}).get("sampling")
            fitting = recipe.parent == folder or named.get("path") == str(folder)
            if fitting and (named.get("pipeline") or family.name) == family.name and isinstance(own, dict):
                spec = decode(own, family.sampling)
                return Size(msgspec.structs.asdict(spec), f"as in {recipe.name}, which comes with the model")
    if not {"height", "width"} <= default.keys():
        return Size(default)
    sides = f"{default['width']}x{default['height']}"
    if (side := _trained_side(folder)) is not None:
        if side >= min(default["height"], default["width"]):
            return Size(default)
        return Size({**default, "height": side, "width": side}, "the size that the model's configuration has")
    if weight_bytes >= _PUBLISHED:
        return Size(default)
    return Size(
        default,
        warning=f"warning: {model} is small, and its files do not give the size that it was trained at; {sides} is the"
        " family's default; rollout.sampling.height=N and rollout.sampling.width=N set another",
    )


def _trained_side(folder: Path) -> int | None:
    """Return the side in pixels of the images that a checkpoint was trained on, by its `sample_size`; None without."""
    try:
        latent = read_model_json(folder / "transformer" / CONFIG)["sample_size"]
        side = latent * 2 ** (len(read_model_json(folder / "vae" / CONFIG)["block_out_channels"]) - 1)
    except (ConfigError, KeyError, TypeError):
        return None
    return side if isinstance(side, int) and side >= _SIDE and side % _SIDE == 0 else None


def read_prompts(
    path: str, family: PipelineFamily, flag: str = "--prompts", columns: Columns = NO_COLUMNS
) -> list[Prompt]:
    """Return the prompts of a table, a file or a folder, or of a data set in the hub's cache.

    ConfigError, one line that begins with `flag`, for an invalid row or missing images for the family."""
    there = os.path.exists(path)  # noqa: PTH110 - pathlib raises for a long text
    table = path if there else downloaded(path, "dataset") or Path(path).expanduser()
    prompts = load_prompts(str(table), flag, _LONGEST_PROMPT, columns=columns)
    if family.needs_images and (without := [prompt for prompt in prompts if not prompt.images]):
        raise ConfigError(
            f"{flag}: {path}: {len(without)} of {len(prompts)} prompts have no `image`, which {family.name} begins with"
        )
    return prompts


def propose_validation(path: str, prompts: Sequence[Prompt]) -> str:
    """Return a held-out file next to the prompts; `split` without one, `none` if there are too few to split."""
    differing = {*map(question_of, prompts)}
    return _held_out_beside(path) or ("split" if len(differing) >= _FEWEST_TO_SPLIT else "none")


def _held_out_beside(path: str) -> str | None:
    """Return a file next to the prompts with a held-out name (`test.txt` for `train.txt`), or None."""
    given = Path(path)
    for word in _HELD_OUT:
        name = re.sub(r"train(ing)?", word, given.stem) if "train" in given.stem else f"{given.stem}_{word}"
        if (found := given.with_name(f"{name}{given.suffix}")).is_file():
            return str(found)
    return None


def propose_reward(prompts: Sequence[Prompt], spec: SamplingSpec) -> tuple[str, str]:
    """Return the name of a scorer that fits the prompts and the samples, and why."""
    for name in _BY_PROMPT:
        scorer = sections.Scorer(name=name, params=dict.fromkeys(registry.required_params(name), ""))
        check = registry.prompt_check(scorer)
        if check is not None and fits(name, spec) and not any(map(check, prompts)):
            if name == "scene_text":
                height = next((shape.shape[-2] for shape in spec.media() if shape.part != "audio"), 0)
                name = "ocr" if height <= _LINE_HEIGHT else name
            return name, f"every prompt says what {name} looks for"
    return next(name for name in _BY_MEDIA if fits(name, spec)), "it takes any prompt"


def fits(name: str, spec: SamplingSpec) -> bool:
    """Return whether the scorer accepts the samples' media."""
    try:
        takes = registry.media_of(name)
    except ValueError:
        return False
    return bool(takes & {shape.part for shape in spec.media()})


def objectives_for(family: PipelineFamily) -> list[str]:
    """Return the names of the objectives on what the family draws, sorted; a broken one is left out."""
    found = []
    for name in objective_names():
        with contextlib.suppress(ValueError):
            if find_kind(find_objective(name).kind).draws == family.draws:
                found.append(name)
    return found


def read_objective(name: str, family: PipelineFamily) -> Objective:
    """Return the objective. Raises ConfigError, one line, if it is unknown, or the family draws something else."""
    fitting = objectives_for(family)
    try:
        if name not in objective_names():
            raise ValueError(not_one_of(name, fitting))
        objective = find_objective(name)
        kind = find_kind(objective.kind)
    except ValueError as error:
        raise ConfigError(f"--algorithm: {str(error).removeprefix('algorithm.name: ')}") from None
    if name not in fitting:
        why = f"{name} {kind.summary}, and {family.name} draws {family.draws}"
        raise ConfigError(f"--algorithm: {why}; expected one of {fitting}")
    return objective


def engine_for(family: PipelineFamily, devices: int) -> str:
    """Return the engine for the family here: vLLM-Omni, or vLLM for tokens, if it is installed and supports the family.

    Without a device for engines alone, tokens are drawn by transformers: vLLM takes nearly all memory of a device."""
    if family.draws == "tokens":
        return "vllm" if devices > 1 and family.on_vllm and find_spec("vllm") else "transformers"
    return "vllm_omni" if family.vllm_pipeline and find_spec("vllm_omni") else "diffusers"

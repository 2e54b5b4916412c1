"""Writes the model card of an export: README.md for model hubs, a plot of the run, and images of its samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_async.commands.command_line import as_markdown
from omni_async.commands.export.base import CARD
from omni_async.commands.export.curves import plot_curves
from omni_async.commands.export.how_to_load import Loading, base_name
from omni_async.commands.export.recipe import portable_recipe
from omni_async.config import ConfigError
from omni_async.config.reading import read_file
from omni_async.config.writing import write_atomic
from omni_async.config.yaml_text import parse_yaml
from omni_async.control.rounds import NotComparable, compare, first_and_last
from omni_async.records.read.chosen import Chosen
from omni_async.records.read.record import Run, ended_groups, read_run
from omni_async.records.write.console import groups_left_out

_LICENCE = ("license", "license_name", "license_link")
_LARGEST_CARD, _LARGEST_GRID = 2**24, 2**28  # bytes
_UNKNOWN = (
    "**The licence is not known**: the base model's folder has no card that names one. It is that of the base model;"
    " fill in `license` above before you share this."
)
_MOST_ROUNDS = 3  # listed rounds with unscored samples
_CURVES, _RECIPE, _SAMPLES = "curves.png", "recipe.yaml", "samples"


def write_card(folder: Path, chosen: Chosen, policy: str, loading: Loading) -> None:
    """Write README.md, and the files that it shows, into an export.

    Args:
        folder: the unfinished export.
        chosen: the checkpoint.
        policy: the exported policy of the checkpoint.
        loading: how to load it."""
    run = read_run(chosen.run.path)
    write_atomic(folder / _RECIPE, portable_recipe(chosen.config).encode())
    has_curves = plot_curves(folder / _CURVES, run.updates, run.rounds, chosen.version)
    pictures = [*_copy_samples(folder / _SAMPLES, run)]
    base, front = base_name(chosen.base), _front_matter(chosen, loading.relation)
    by, run_id = as_markdown(chosen.made_by), _code(chosen.run.run_id)
    made_by = f"{chosen.version} updates with omni_async {by}, run `{run_id}`"
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {chosen.config.run.name}: {chosen.family.model_index_class} trained with {chosen.config.algorithm.name}",
        f"{loading.what.capitalize()} of the model `{_code(base)}` after {made_by}.",
        *([] if front["license"] != "unknown" else [_UNKNOWN]),
        "## Load it",
        f"```python\n{loading.code}\n```",
        *loading.notes,
        "## How it was trained",
        _table({**_facts(chosen, policy, base), **_measured(run)}),
        f"`{_RECIPE}` is the whole recipe.",
        *([f"![Mean reward by update]({_CURVES})"] if has_curves else []),
        *(["## Samples"] if pictures else []),
        *(f"{title}:\n\n![{title}]({_SAMPLES}/{name})" for title, name in pictures),
    ]
    write_atomic(folder / CARD, ("\n\n".join(sections) + "\n").encode("utf-8", "backslashreplace"))


def _facts(chosen: Chosen, policy: str, base: str) -> dict[str, Any]:
    config = chosen.config
    lora, tokens = config.model.lora, chosen.family.draws == "tokens"
    validation = None if tokens else config.validation
    trained = "all weights" if lora is None else f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}"
    sampling = {name: getattr(config.rollout.sampling, name) for name in config.rollout.sampling.__struct_fields__}
    return {
        "base model": base,
        "trained": f"{', '.join(chosen.components)}: {trained}",
        "algorithm": config.algorithm.name,
        "reward": ", ".join(f"{scorer.weight:g} x {scorer.name}" for scorer in config.reward.scorers)
        or ("preferences" if config.data.preferences is not None else "none"),
        "validation reward of this checkpoint": chosen.shown_reward or "not measured",
        "policy": {"old": "the old policy, which drew the samples", "ema": "moving average of the weights"}.get(policy),
        "updates": chosen.version,
        "prompts per update x samples": f"{config.trainer.groups_per_update} x {config.rollout.group_size}",
        "staleness budget": config.staleness.max_updates,
        "denoising steps in training": None if tokens else config.rollout.num_inference_steps,
        "denoising steps in validation": validation and validation.num_inference_steps,
        **{f"sampling: {name}": value for name, value in sampling.items()},
        "seed": config.run.seed,
    }


def _measured(run: Run) -> dict[str, str]:
    """Return the change of validation over the run, and the omissions in validation and training."""
    counted = groups_left_out(*ended_groups(run.ledger))
    found = {"groups that were not trained": "; ".join(counted)} if counted else {}
    ends = first_and_last(run.validation)
    if ends is not None:
        name = f"validation reward, update {ends[0].version} -> {ends[1].version}"
        try:
            change = compare(*ends)
            found[name] = f"{change.reward[0]:.4g} -> {change.reward[1]:.4g}{change.over}"
        except NotComparable as error:
            found[name] = f"not comparable: {error}"
    incomplete = [(one.version, one.left_out) for one in run.validation]
    said = [f"update {version}: {text}" for version, text in incomplete if text]
    if said:
        more = f"; and {len(said) - _MOST_ROUNDS} earlier rounds" if len(said) > _MOST_ROUNDS else ""
        found["validation samples without a score"] = "; ".join(said[-_MOST_ROUNDS:]) + more
    return found


def _table(facts: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {as_markdown(value)} |" for name, value in facts.items() if value is not None]
    return "\n".join(["| | |", "|---|---|", *rows])


def _code(value: str) -> str:
    """Return a text of one line for use between two backticks, which have no escape."""
    return " ".join(value.split()).replace("`", "'")


def _copy_samples(folder: Path, run: Run) -> Iterable[tuple[str, str]]:
    """Copy the grids of the first and the last validation round, or of updates, and yield their titles and names."""
    grids = [grid for grid in run.grids if grid.kind == "validation"] or run.grids
    for grid in dict.fromkeys((grids[0].image, grids[-1].image)) if grids else ():
        try:
            content = read_file(grid, _LARGEST_GRID, within=run.path)
        except OSError:
            continue
        else:
            folder.mkdir(exist_ok=True)
            write_atomic(folder / grid.name, content)
            what, _, version = grid.stem.partition("-")
            samples = "Validation samples" if what == "validation" else "Training samples"
            yield f"{samples}, update {int(version)}", grid.name


def _front_matter(chosen: Chosen, relation: str) -> dict[str, Any]:
    licence = {key: value for key, value in card_of(chosen.base).items() if key in _LICENCE and _is_licence(value)}
    name = base_name(chosen.base)
    return {
        "license": "unknown",
        **licence,
        **({"base_model": name, "base_model_relation": relation} if "/" in name else {}),
        "library_name": chosen.family.layout,
        "pipeline_tag": _task(chosen),
        "tags": ["omni_async", "reinforcement-learning", chosen.config.algorithm.name]
        + (["lora"] if relation == "adapter" else []),
    }


def _task(chosen: Chosen) -> str:
    media = chosen.config.rollout.sampling.media()
    if any(one.part == "text" for one in media):
        return "image-text-to-text" if chosen.family.prompt_images else "text-generation"
    made = "video" if any(one.part == "video" for one in media) else "image"
    return f"{'image' if chosen.family.needs_images else 'text'}-to-{made}"


def _is_licence(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) for text in texts)


def card_of(folder: Path) -> dict[str, Any]:
    """Return the front matter of a model's card; empty if it has none."""
    try:
        text = read_file(folder / CARD, _LARGEST_CARD).decode("utf-8-sig").replace("\r\n", "\n")
        before, fence, rest = text.partition("---\n")
        found = parse_yaml(rest.partition("\n---")[0], CARD) if fence and not before.strip() else None
    except (OSError, UnicodeDecodeError, ConfigError):
        return {}
    return found if isinstance(found, dict) else {}

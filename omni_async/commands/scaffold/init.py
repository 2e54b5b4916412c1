"""Writes a commented recipe for a model, prompts and a reward, after prompting for missing options."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_async.accelerator import most_accelerators
from omni_async.algorithms.registry import Objective, find_objective, objective_names
from omni_async.commands.scaffold.asking import Asking, build_asking
from omni_async.commands.scaffold.commented import commented_yaml
from omni_async.commands.scaffold.proposals import (
    engine_for,
    find_model,
    fits,
    held_out_beside,
    propose_reward,
    read_prompts,
)
from omni_async.commands.scaffold.recipe import Answers, Draft, Reward, compose
from omni_async.config import ConfigError, load, schema
from omni_async.config.load import decode
from omni_async.config.section import size_text
from omni_async.config.tree import path_params, set_override
from omni_async.config.yaml_text import parse_yaml
from omni_async.plugins.families import SamplingSpec
from omni_async.rewards import registry
from omni_async.runtime.preflight.check import preflight
from omni_async.types import Prompt

_JUDGE = "judge"
# Default parameters of a scorer: with `dense`, partly readable text counts, so that fewer groups tie.
_PARAMS: dict[str, dict[str, Any]] = {"ocr": {"dense": True}}
_MOST_DEVICES = 10_000


def init(options: argparse.Namespace) -> int:
    """Write the recipe and print the next commands. Raises ConfigError, one line, for any error."""
    recipe: Path = options.recipe
    if recipe.exists():
        raise ConfigError(f"{recipe}: is there already; name another file, or remove it")
    answers, prompts = _answers(options, build_asking(options.ask))
    try:
        draft = compose(answers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for override in options.overrides:
        draft.reasons.pop(set_override(draft.tree, override), None)
    _rebase(draft, recipe.parent)
    text = commented_yaml(_head(recipe, answers, prompts), draft.tree, draft.reasons, answers.family.sampling)
    _write_checked(recipe, text, answers.devices)
    made = f"wrote {recipe}: {answers.objective.name} on {answers.family.name}, {len(prompts)} prompts, reward"
    sys.stdout.write(f"{made} {answers.reward.name}\nnext:\n")
    sys.stdout.writelines(f"  omni-async {command} {shlex.quote(str(recipe))}\n" for command in ("check", "train"))
    return 0


def _answers(options: argparse.Namespace, asking: Asking) -> tuple[Answers, list[Prompt]]:
    model, (family, size) = asking.answer(
        "--model", options.model, "Checkpoint folder in diffusers layout", None, lambda path: (path, find_model(path))
    )
    spec = _spec(family.sampling, options.overrides)
    made = " and ".join(dict.fromkeys(shape.part for shape in spec.media()))
    asking.say(f"{family.name}, {size_text(size)} of weights to train; it makes {made}")
    path, prompts = asking.answer(
        "--prompts",
        options.prompts,
        "Prompts to train on (.txt or .jsonl)",
        None,
        lambda p: (p, read_prompts(p, family)),
    )
    beside = held_out_beside(path)
    validation = asking.answer(
        "--validation",
        options.validation,
        "Prompts never trained on, to validate with (none: no validation)",
        beside or "none",
        lambda given: None if given == "none" else (read_prompts(given, family, "--validation"), given)[1],
    )
    reward = _reward(options, asking, prompts, spec)
    asking.say(f"algorithms: {', '.join(objective_names())} (docs/choose.md)")
    objective = asking.answer("--algorithm", options.algorithm, "Algorithm", "flow_grpo", _objective)
    found = most_accelerators()
    devices = asking.answer(
        "--devices",
        options.devices,
        "Accelerators to share out (0: none)",
        None if found is None else str(found[0]),
        _devices,
        "how many accelerators there are, which only their driver knows",
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.recipe.stem).lstrip(".-")[:80] or "run"
    answers = Answers(name, family, model, size, path, validation, reward, objective, devices, engine_for(family))
    return answers, prompts


def _spec(sampling: type[SamplingSpec], overrides: Sequence[str]) -> SamplingSpec:
    """Return the family's sample with the overrides, or its defaults if they are invalid: `load` reports the error."""
    tree: dict[str, Any] = {}
    for override in overrides:
        set_override(tree, override)
    section = tree.get("rollout")
    given = section.get("sampling", {}) if isinstance(section, dict) else {}
    try:
        return decode(given, sampling)
    except ConfigError:
        return sampling()


def _reward(options: argparse.Namespace, asking: Asking, prompts: Sequence[Prompt], spec: SamplingSpec) -> Reward:
    proposed, why = propose_reward(prompts, spec)
    needs = ", ".join(registry.required_params(proposed))
    asking.say(f"{proposed} fits: {why}" + (f"; it needs {needs}" if needs else ""))
    others = ", ".join(name for name in registry.names() if fits(name, spec) and name != proposed)
    asking.say(f"others: {others}, or module:Class of yours (docs/rewards/index.md)")
    name = asking.answer("--reward", options.reward, "Reward", proposed, _scorer)
    params = dict(map(_param, options.param)) or dict(_PARAMS.get(name, {}))
    for need in registry.required_params(name):
        if need not in params:
            asked, hint = f"{name}: its parameter {need}", f"{name} needs it; or name another scorer with --reward"
            params[need] = asking.answer(f"--param {need}=VALUE", None, asked, None, lambda value: value, hint)
    cost = registry.cost_of(schema.Scorer(name=name))
    judged = registry.takes_param(name, "server") and not params.keys() & {"server", "urls"}
    if judged:
        return Reward(name, {**params, "server": _JUDGE, "model": _JUDGE}, cost, judge=str(params["model"]))
    return Reward(name, params, cost)


def _scorer(name: str) -> str:
    try:
        registry.media_of(name)
    except ValueError as error:
        raise ConfigError(f"--reward: {error}") from None
    return name


def _param(given: str) -> tuple[str, Any]:
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise ConfigError(f"--param: expected KEY=VALUE, got {given!r}")
    return key, parse_yaml(value, f"--param {key}")


def _objective(name: str) -> Objective:
    try:
        return find_objective(name)
    except ValueError as error:
        raise ConfigError(f"--algorithm: {str(error).removeprefix('algorithm.name: ')}") from None


def _devices(given: str) -> int:
    if not given.isdecimal() or not (number := int(given[:6])) <= _MOST_DEVICES:
        raise ConfigError(f"--devices: expected a number from 0 to {_MOST_DEVICES}, got {given!r}")
    return number


def _head(recipe: Path, answers: Answers, prompts: Sequence[Prompt]) -> str:
    """Return the opening text of the recipe."""
    devices = f"{answers.devices} device{'s' * (answers.devices != 1)}" if answers.devices else "no accelerator"
    return "\n".join(
        [
            f"{answers.objective.name} on {answers.family.name}: {len(prompts)} prompts, reward {answers.reward.name},"
            f" {devices}. Written by `omni-async init`.",
            "",
            *(f"  omni-async {command} {shlex.quote(str(recipe))}" for command in ("check", "train")),
            "",
            "Above every key stands what it is; `Here` is why it has this value. What is left out has its default"
            " (docs/configuration.md).",
        ]
    )


def _rebase(draft: Draft, folder: Path) -> None:
    """Turn paths relative to the working directory into paths relative to the recipe's folder, as a recipe requires.

    A hub's `owner/name` stays unchanged."""
    for section, key in (("model", "path"), ("data", "prompts"), ("validation", "prompts")):
        _rebase_key(draft.tree.get(section), key, folder)
    for server in _entries(draft.tree.get("reward"), "servers"):
        _rebase_key(server, "model", folder)
    for scorer in _entries(draft.tree.get("reward"), "scorers"):
        for key in path_params(str(scorer.get("name"))):
            _rebase_key(scorer.get("params"), key, folder)


def _entries(section: Any, key: str) -> list[dict[str, Any]]:
    """Return the entries of a list in a section; skip invalid values from overrides, which `load` reports."""
    given = section.get(key) if isinstance(section, dict) else None
    return [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []


def _rebase_key(section: Any, key: str, folder: Path) -> None:
    given = section.get(key) if isinstance(section, dict) else None
    if isinstance(given, str) and not Path(given).is_absolute() and Path(given).exists():
        section[key] = os.path.relpath(given, folder)


def _write_checked(recipe: Path, text: str, devices: int) -> None:
    """Write the recipe if `omni-async check` would accept it, apart from this machine's accelerators."""
    try:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        file = recipe.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except OSError:  # no space left
            recipe.unlink()
            raise
    except OSError as error:
        raise ConfigError(f"{recipe}: cannot be written: {error.strerror or error}") from None
    try:
        preflight(load(recipe), elsewhere=devices > 0)
    except BaseException as error:
        recipe.unlink()
        if isinstance(error, ConfigError):
            raise ConfigError(f"{error} (nothing is written; key.path=value changes a value)") from None
        raise

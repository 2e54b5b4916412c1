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
from omni_async.commands.command_line import print_error, print_line
from omni_async.commands.scaffold.asking import Questions
from omni_async.commands.scaffold.commented import commented_yaml
from omni_async.commands.scaffold.proposals import (
    Size,
    engine_for,
    find_model,
    fits,
    objectives_for,
    propose_reward,
    propose_size,
    propose_validation,
    read_objective,
    read_prompts,
)
from omni_async.commands.scaffold.recipe import HELD_OUT_SHARE, REASONS, TOKEN_REASONS, Answers, Reward, Tree, compose
from omni_async.commands.scaffold.shipped import copy_recipes
from omni_async.config import Config, ConfigError, load
from omni_async.config import reward as sections
from omni_async.config.load import decode
from omni_async.config.schema import Data, Validation
from omni_async.config.section import size_text
from omni_async.config.tree import PATHS, errors_of, file_of, path_params, set_override
from omni_async.config.yaml_text import parse_yaml
from omni_async.data.tables import SUFFIXES, Columns
from omni_async.plugins.families import PipelineFamily, SamplingSpec
from omni_async.rewards import registry
from omni_async.runtime.preflight.check import preflight
from omni_async.types import Prompt

_JUDGE = "judge"
# Default parameters of a scorer: with `dense`, partly readable text counts, so that fewer groups tie.
_PARAMS: dict[str, Tree] = {"ocr": {"dense": True}}
_MOST_DEVICES = 10_000


def init(options: argparse.Namespace) -> int:
    """Write the recipe and print the next commands. Raises ConfigError, one line, for any error."""
    if options.source is not None:
        if options.recipe is not None or options.overrides:
            raise ConfigError(
                f"--from {options.source}: copies recipes as they are; leave out RECIPE and key.path=value"
            )
        return print_line(copy_recipes(options.source))
    recipe: Path = options.recipe or Path("recipe.yaml")
    options.recipe = recipe
    if recipe.exists():
        raise ConfigError(f"{recipe}: is there already; name another file, or remove it")
    answers, prompts, size = _answers(options, Questions(options.ask))
    tree = compose(answers)
    overridden = {set_override(tree, override) for override in options.overrides}
    with errors_of(recipe):
        decode(tree, Config)
    _rebase(tree, recipe.parent)
    reasons = REASONS | {"algorithm.name": answers.objective.summary}
    reasons |= TOKEN_REASONS if answers.family.draws == "tokens" else {}
    if size.source:
        reasons |= dict.fromkeys(("rollout.sampling.height", "rollout.sampling.width"), size.source)
    reasons = {path: reason for path, reason in reasons.items() if path not in overridden}
    made = f"{answers.objective.name} on {answers.family.name}, {prompts} prompts, reward {answers.reward.name}"
    commands = [f"  omni-async {command} {shlex.quote(str(recipe))}" for command in ("check", "train")]
    head = [
        f"{made}, devices: {answers.devices}. Written by `omni-async init`.",
        *("", *commands, ""),
        "The comment above a key is its meaning; `Here` gives the reason for its value. Omitted keys have their"
        " defaults (docs/configuration.md).",
    ]
    text = commented_yaml("\n".join(head), tree, reasons, answers.family.sampling)
    _write_checked(recipe, text, answers.devices)
    sys.stdout.write("\n".join([f"wrote {recipe}: {made}", "next:", *commands, ""]))
    if size.warning and not any(path.startswith("rollout.sampling") for path in overridden):
        print_error(size.warning)
    return 0


def _answers(options: argparse.Namespace, questions: Questions) -> tuple[Answers, int, Size]:
    """Return the answers, the number of prompts, and the proposed size of samples."""
    question = "Checkpoint folder, as diffusers or transformers loads it"
    model, (family, size) = questions.answer(
        "--model", options.model, question, None, lambda path: (path, find_model(path))
    )
    proposed = propose_size(model, family, size)
    spec = _spec(family.sampling, proposed.sampling, options.overrides)
    made = " and ".join(dict.fromkeys(shape.part for shape in spec.media()))
    questions.say(f"{family.name}, {size_text(size)} of weights; it makes {made}")
    with errors_of(options.recipe):
        data = decode(_section(options.overrides, "data"), Data, "data")
    flag = "--prompts" if data.prompts is None else "data.prompts"
    path, prompts = questions.answer(
        flag,
        data.prompts or options.prompts,
        f"Prompts to train on (a folder, {', '.join(SUFFIXES)})",
        None,
        lambda path: (path, read_prompts(path, family, flag, data.columns)),
    )
    validation = questions.answer(
        "--validation",
        _overridden_validation(options) or options.validation,
        "Prompts never trained on, to validate with (a file; split: a tenth of the prompts; none: no validation)",
        propose_validation(path, prompts),
        lambda given: _validation(given, family, data.columns),
    )
    reward = _reward(options, questions, prompts, spec)
    questions.say(f"algorithms: {', '.join(objectives_for(family))} (docs/choose.md)")
    objective = questions.answer(
        "--algorithm",
        options.algorithm,
        "Algorithm",
        "flow_grpo" if family.draws == "latents" else "token_grpo",
        lambda name: read_objective(name, family),
    )
    found = most_accelerators()
    devices = questions.answer(
        "--devices",
        options.devices,
        "Accelerators to share out (0: none)",
        None if found is None else str(found[0]),
        _devices,
        "how many accelerators there are, which only their driver knows",
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", options.recipe.stem).lstrip(".-")[:80] or "run"
    answers = Answers(
        *(name, family, model, size, path, validation, reward, objective, devices, engine_for(family, devices)),
        sampling=proposed.sampling,
    )
    return answers, len(prompts), proposed


def _overridden_validation(options: argparse.Namespace) -> str | None:
    """Return the answer about validation that the overrides give, or None."""
    section = _section(options.overrides, "validation")
    if section is None:
        return "none"
    with errors_of(options.recipe):
        validation = decode(section, Validation, "validation")
    return validation.prompts or (None if validation.split is None else "split")


def _validation(given: str, family: PipelineFamily, columns: Columns) -> Tree | None:
    """Return the source of validation prompts, as keys of `validation`; None for no validation."""
    if given == "none":
        return None
    if given == "split":
        return {"split": HELD_OUT_SHARE}
    read_prompts(given, family, "--validation", columns)
    return {"prompts": given}


def _section(overrides: Sequence[str], name: str) -> Any:
    """Return a section of the recipe with the values of the overrides alone."""
    tree: Tree = {name: {}}
    for override in overrides:
        set_override(tree, override)
    return tree[name]


def _spec(sampling: type[SamplingSpec], proposed: Tree, overrides: Sequence[str]) -> SamplingSpec:
    """Return the proposed sample with the overrides, without them if they are invalid: `load` reports the error."""
    try:
        return decode(proposed | _section(overrides, "rollout")["sampling"], sampling)
    except (ConfigError, KeyError, TypeError):
        return decode(proposed, sampling)


def _reward(options: argparse.Namespace, questions: Questions, prompts: Sequence[Prompt], spec: SamplingSpec) -> Reward:
    proposed, why = propose_reward(prompts, spec)
    needs = ", ".join(registry.required_params(proposed))
    questions.say(f"{proposed} fits: {why}" + (f"; it needs {needs}" if needs else ""))
    others = ", ".join(name for name in registry.names() if fits(name, spec) and name != proposed)
    questions.say(f"others: {others}, or module:Class of yours (docs/rewards/index.md)")
    name = questions.answer("--reward", options.reward, "Reward", proposed, _scorer)
    params = dict(map(_param, options.param)) or dict(_PARAMS.get(name, {}))
    for need in registry.required_params(name):
        if need not in params:
            asked, hint = f"{name}: its parameter {need}", f"{name} needs it; or name another scorer with --reward"
            params[need] = questions.answer(f"--param {need}=VALUE", None, asked, None, lambda value: value, hint)
    cost = registry.cost_of(sections.Scorer(name=name))
    if registry.takes_param(name, "server") and not params.keys() & {"server", "urls"}:
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


def _devices(given: str) -> int:
    if not given.isdecimal() or not (number := int(given[:6])) <= _MOST_DEVICES:
        raise ConfigError(f"--devices: expected a number from 0 to {_MOST_DEVICES}, got {given!r}")
    return number


def _rebase(tree: Tree, folder: Path) -> None:
    """Turn paths relative to the working directory into paths relative to the recipe's folder, as a recipe requires.

    A hub's `owner/name` stays unchanged, and so does `run.dir`, which is relative to the working directory of a run."""
    reward = tree["reward"]
    places = [(server, "model") for server in reward.get("servers", ())]
    for path in set(PATHS) - {"run.dir", "emulation.profile"}:
        *names, key = path.split(".")
        section = tree
        for name in names:
            section = section.get(name) or {}
        places.append((section, key))
    for scorer in reward.get("scorers", ()):
        if (file := file_of(scorer["name"])) is not None and not Path(file).is_absolute():
            scorer["name"] = os.path.relpath(file, folder) + scorer["name"][len(file) :]
        places += [(scorer.get("params", {}), key) for key in path_params(scorer["name"])]
    for section, key in places:
        given = section.get(key)
        made = section is reward.get("cache")  # by the run, so it need not exist yet
        if isinstance(given, str) and not Path(given).expanduser().is_absolute() and (made or Path(given).exists()):
            section[key] = os.path.relpath(given, folder)


def _write_checked(recipe: Path, text: str, devices: int) -> None:
    """Write the recipe if `omni-async check` would accept it, apart from this machine's accelerators."""
    try:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        file = recipe.open("x", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{recipe}: cannot be written: {error.strerror or error}") from None
    try:
        with file:
            file.write(text)
        preflight(load(recipe), elsewhere=devices > 0)
    except BaseException as error:
        recipe.unlink()
        if isinstance(error, ConfigError):
            raise ConfigError(f"{error} (nothing is written; key.path=value changes a value)") from None
        if isinstance(error, OSError):
            raise ConfigError(f"{recipe}: cannot be written: {error.strerror or error}") from None
        raise

"""Decides how samples are drawn: sizes, steps, prompts and seeds.

They come from a recipe (`--recipe`, or the recipe of the first model that has one) or from the family's defaults, and
then from the command line. The factory of a run's validation requests creates the requests, so a validation prompt has
the same noise here as in the run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from omni_async.commands.evaluation.models import Model
from omni_async.config import Config, ConfigError, load, of_model
from omni_async.config.load import decode, family_of
from omni_async.config.redact import redact
from omni_async.config.schema import Validation
from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import NOISE
from omni_async.data.prompts import PromptCheck, load_prompts
from omni_async.plugins.families import PipelineFamily, find_family
from omni_async.runtime.preflight.check import inputs_check, load_validation
from omni_async.runtime.preflight.model_files import check_checkpoint
from omni_async.runtime.preflight.prompt_limits import PromptLimits
from omni_async.types import Prompt, SampleRequest

_GUIDANCE = ("guidance_scale", "true_cfg_scale")  # the families' names for it; the first existing one is used


@dataclass(frozen=True)
class Settings:
    """How every model draws.

    config: with `validation` as used here.
    device: None is the accelerator if there is one, otherwise the CPU.
    notes: for the console."""

    config: Config
    family: PipelineFamily
    prompts: tuple[Prompt, ...]
    device: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def validation(self) -> Validation:
        assert self.config.validation is not None
        return self.config.validation

    def requests(self) -> list[SampleRequest]:
        """Return the requests for every model, prompt by prompt."""
        return RequestFactory(self.config).validation(0, self.prompts)

    def record(self) -> dict[str, Any]:
        """Return the inputs of samples, besides the model, as plain values without credentials."""
        program = self.config.rollout.program
        return {
            "steps": self.validation.num_inference_steps,
            "samples per prompt": self.validation.samples_per_prompt,
            "seed": self.config.run.seed,
            "noise": NOISE,
            "sampling": msgspec.to_builtins(self.config.rollout.sampling),
            "dtype": self.config.model.dtype,
            "device": self.device or "default",
            "calls": self.config.rollout.calls,
            "program": None if program is None else redact(msgspec.to_builtins(program)),
            "prompts": [[one.index, *one.content] for one in self.prompts],
        }


def settings_of(options: argparse.Namespace, models: Sequence[Model]) -> Settings:
    """Return the settings for drawing. Raises ConfigError, one line, also if a model cannot draw with them."""
    config = _config(options, models)
    try:
        family = find_family(config.model.pipeline or family_of(models[0].base))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if family.draws == "tokens" and options.steps is not None:
        raise ConfigError(f"--steps: {family.name!r} draws tokens, without denoising steps; leave it out")
    if options.guidance is not None:
        config = _guided(config, family, options.guidance)
    for model in models:
        check_checkpoint(model.base, family, {"rollout.sampling": config.rollout.sampling})
    given = config.validation
    steps = options.steps or (given or config.rollout).num_inference_steps
    if steps < 2:
        raise ConfigError(f"--steps: expected at least 2, got {steps}")
    limits = PromptLimits(models[0].base, {"rollout.sampling": config.rollout.sampling})
    limits.check_negative()
    prompts = _prompts(options, config, inputs_check(family, [config.rollout.sampling]), limits)
    tree = {"prompts": "-", "num_inference_steps": steps, "samples_per_prompt": options.seeds or _seeds(options, given)}
    config = replace(config, validation=decode(tree, Validation, "validation"))
    return Settings(config, family, prompts, options.device, tuple(limits.notes))


def _config(options: argparse.Namespace, models: Sequence[Model]) -> Config:
    """Return the recipe, the first recipe among the models, or defaults, with the command line's overrides."""
    named = [word if "." in word.partition("=")[0] else f"rollout.sampling.{word}" for word in options.overrides]
    if options.seed is not None:
        named.append(f"run.seed={options.seed}")
    if options.recipe is None:
        recipes = (model.recipe(named) for model in models)
        return next((recipe for recipe in recipes if recipe is not None), None) or of_model(models[0].base, named)
    config = load(options.recipe, named)
    if config.emulation is not None:
        raise ConfigError(f"emulation: {options.recipe} emulates its devices, and so draws nothing")
    return config


def _guided(config: Config, family: PipelineFamily, guidance: float) -> Config:
    key = next((one for one in _GUIDANCE if one in family.sampling.__struct_fields__), None)
    if key is None:
        raise ConfigError(f"--guidance: {family.name!r} has none; leave it out")
    tree = msgspec.to_builtins(config.rollout.sampling) | {key: guidance}
    spec = decode(tree, family.sampling, "rollout", "sampling")
    return replace(config, rollout=replace(config.rollout, sampling=spec))


def _seeds(options: argparse.Namespace, given: Validation | None) -> int:
    return given.samples_per_prompt if options.command == "eval" and given is not None else 1


def _prompts(
    options: argparse.Namespace, config: Config, check: PromptCheck, limits: PromptLimits
) -> tuple[Prompt, ...]:
    """Return the prompts of the command line, of its file, or of the recipe's validation; at most `--limit`."""
    longest, columns = config.data.max_prompt_chars, config.data.columns
    if options.prompt:
        prompts = _typed(options.prompt, config, check)
        for position, problem in limits.problems("--prompt", prompts).items():
            raise ConfigError(f"--prompt {prompts[position].text[:80]!r}: {problem}")
    elif options.prompts is not None:
        whole = partial(limits.problems, "--prompts")
        prompts = load_prompts(str(options.prompts), "--prompts", longest, [check], whole, columns=columns)
    elif config.validation is not None:
        prompts = load_validation(config, [check], limits.problems)
    else:
        raise ConfigError("--prompt: no prompts; give one, or --prompts FILE, or a recipe that has validation.prompts")
    return tuple(prompts[: options.limit])


def _typed(texts: Sequence[str], config: Config, check: PromptCheck) -> list[Prompt]:
    """Return the prompts with these texts; prompts of the recipe's validation keep their number, and so their noise."""
    validated: list[Prompt] = []
    if config.validation is not None and Path(config.validation.prompts or config.data.prompts or "").is_file():
        validated = load_validation(config)
    known = {prompt.text: prompt for prompt in reversed(validated)}
    found = {}
    for number, text in enumerate(texts):
        if not text.strip():
            raise ConfigError("--prompt: expected a text, got an empty one")
        prompt = known.get(text.strip(), Prompt(len(validated) + number, text.strip()))
        if (problem := check(prompt)) is not None:
            raise ConfigError(f"--prompt {text[:80]!r}: {problem}")
        found[prompt.text] = prompt
    return [*found.values()]

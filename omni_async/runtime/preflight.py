"""Everything that can be found wrong before anything heavy starts: prompt files, the checkpoint's architecture, scorers. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from omni_async.actors.plan import plan_updates
from omni_async.algorithms.validation import problems
from omni_async.config import Config, ConfigError
from omni_async.policy import PipelineFamily, find_family
from omni_async.rewards import registry as scorers
from omni_async.runtime.prompts import load_prompts
from omni_async.types import Prompt


@dataclass(frozen=True)
class RunInputs:
    """A configuration that was looked at closely. `start_version` and `start_group` come from the checkpoint to resume, else 0."""

    config: Config
    family: PipelineFamily
    prompts: tuple[Prompt, ...]
    validation_prompts: tuple[Prompt, ...]
    start_version: int = 0
    start_group: int = 0


class _ResumePoint(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=0)]
    next_group: Annotated[int, msgspec.Meta(ge=0)]


def preflight(config: Config) -> RunInputs:
    """Raises ConfigError, one line, naming the key."""
    try:
        family = find_family(config.model.pipeline)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        for problem in problems(config):
            raise ConfigError(problem)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    plan = plan_updates(config)
    if config.trainer.streaming == "on" and plan.mode == "collect":
        raise ConfigError(f"trainer.streaming: 'on' cannot be had here: {plan.why}; use 'auto'")
    for number, scorer in enumerate(config.reward.scorers):
        try:
            scorers.check(scorer)
        except ValueError as error:
            raise ConfigError(f"reward.scorers.{number}: {error}") from None
    _check_model(config, family)
    longest = config.data.max_prompt_chars
    validation = load_prompts(config.validation.prompts, "validation.prompts", longest) if config.validation else []
    version, group = _resume_point(config)
    return RunInputs(
        config=config,
        family=family,
        prompts=tuple(_prompts(config)),
        validation_prompts=tuple(validation),
        start_version=version,
        start_group=group,
    )


def _prompts(config: Config) -> list[Prompt]:
    longest = config.data.max_prompt_chars
    if config.data.preferences is not None:
        from omni_async.runtime.preferences import PreferencePairs

        return PreferencePairs(config.data.preferences).prompts(longest)
    if config.data.prompts is None:
        raise ConfigError("data.prompts: required")
    return load_prompts(config.data.prompts, "data.prompts", longest)


def _check_model(config: Config, family: PipelineFamily) -> None:
    index = Path(config.model.path) / "model_index.json"
    if not index.is_file():
        raise ConfigError(f"model.path: {config.model.path} is not a checkpoint folder in diffusers layout: it has no model_index.json")
    found = _read_json(index, "model.path").get("_class_name")
    if found != family.model_index_class:
        raise ConfigError(
            f"model.path: {config.model.path} is a {found} checkpoint, but model.pipeline {family.name!r} needs a {family.model_index_class}"
        )
    if not (Path(config.model.path) / "transformer" / "config.json").is_file():
        raise ConfigError(f"model.path: {config.model.path} has no transformer/config.json")


def _resume_point(config: Config) -> tuple[int, int]:
    if config.checkpoint.resume is None:
        return 0, 0
    state = Path(config.checkpoint.resume) / "state.json"
    if not state.is_file():
        raise ConfigError(f"checkpoint.resume: {config.checkpoint.resume} is not a checkpoint folder: it has no state.json")
    extra = _read_json(state, "checkpoint.resume").get("extra")
    try:
        point = msgspec.convert(extra, _ResumePoint)
    except msgspec.ValidationError:
        raise ConfigError(f"checkpoint.resume: {state} names no version and next group") from None
    version, group = point.version, point.next_group
    if version >= config.trainer.updates:
        raise ConfigError(f"checkpoint.resume: the checkpoint is at update {version} already, trainer.updates is {config.trainer.updates}")
    return version, group


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {path}: expected a JSON object")
    return content

"""Finds combinations of an objective with the rest of a recipe that cannot work.

Each has the reason and an alternative. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from omni_async.algorithms.correction import validation as correction
from omni_async.algorithms.kinds import Kind, find_kind
from omni_async.algorithms.registry import Objective, find_objective
from omni_async.config.algorithm import Correction
from omni_async.config.schema import Config
from omni_async.layout import layout_problems


def problems(config: Config) -> Iterator[str]:
    """Yield one message per combination that cannot work. ValueError for an unknown objective."""
    objective = find_objective(config.algorithm.name)
    kind = find_kind(objective.kind)
    yield from _window(config, objective, kind)
    yield from _ratio(config, objective, kind)
    yield from _group(config, objective, kind)
    yield from kind.problems(objective, config)
    yield from layout_problems(config.trainer.workers, config.trainer.sequence_parallel, config.trainer.shard)
    yield from _offline(config, objective, kind)
    yield from objective.problems(config)


def _window(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    if kind.noisy and config.rollout.sde is None:
        yield (f"rollout.sde: {objective.name} {kind.summary}, and null takes none; set kind, noise_level and window")
    if not kind.noisy and config.rollout.sde is not None:
        yield (
            f"rollout.sde: {objective.name} {kind.summary}, so an SDE window would be noise that nobody learns from;"
            " set rollout.sde: null"
        )


def _ratio(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    algorithm, name = config.algorithm, objective.name
    if kind.ratio:
        yield from correction.problems(algorithm.correction)
        return
    if algorithm.correction != Correction():
        yield (
            f"algorithm.correction: {name} has no ratio to the policy that made a sample, so there is nothing to"
            " correct; remove the section"
        )
    if algorithm.clip_range is not None or algorithm.clip_range_nats is not None:
        instead = "; algorithm.awm.clip_range is its own" if name == "awm" else ""
        yield f"algorithm.clip_range: {name} does not clip a ratio of denoising steps{instead}; remove it"


def _group(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    if not kind.paired and config.rollout.group_size < 2:
        yield (
            f"rollout.group_size: {objective.name} compares the samples of a prompt, so it needs at least 2, got"
            f" {config.rollout.group_size}"
        )


def _offline(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    if config.data.preferences is None:
        return
    if not kind.paired:
        yield (
            f"data.preferences: {objective.name} learns from rewards of its own samples; preference pairs are for"
            " diffusion_dpo"
        )
    if config.rollout.group_size != 2:
        yield f"rollout.group_size: a preference pair is a group of 2, got {config.rollout.group_size}"
    if config.reward.scorers:
        yield "reward.scorers: with data.preferences nothing is scored; remove them"
    if config.validation is not None:
        yield (
            "validation: with data.preferences nothing is generated, so nothing can be validated; set validation: null"
        )
    if config.data.prompts is not None:
        yield "data.prompts: with data.preferences the prompts come from the pairs; remove it"

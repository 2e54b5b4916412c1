"""Refuses settings and commands that do not fit what the model draws, latents or tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from omni_async.config.schema import Config
from omni_async.config.yaml_text import ConfigError
from omni_async.plugins.families import PipelineFamily, SamplingSpec

TOKEN_ENGINES = ("transformers", "vllm")  # the engines that draw tokens
_NOUNS = {"video": "videos", "image": "images", "audio": "sounds"}  # the first that a sample has
_NO_NOISE = "tokens are not made of noise"


def drawn(c: Config) -> Literal["latents", "tokens"] | None:
    """Return what the recipe's model draws; None if its family is not found.

    An emulated job may name no family; then its engine decides."""
    if isinstance(spec := c.rollout.sampling, SamplingSpec):
        return "latents" if spec.most_tokens is None else "tokens"
    return None if c.emulation is None else "tokens" if c.rollout.engine in TOKEN_ENGINES else "latents"


def samples_of(c: Config) -> str:
    """Return what the recipe's model makes: answers, videos, sounds, or images if its family is not found."""
    if drawn(c) == "tokens":
        return "answers"
    parts = {part.part for part in c.rollout.sampling.media()} if isinstance(c.rollout.sampling, SamplingSpec) else {}
    return next((noun for part, noun in _NOUNS.items() if part in parts), "images")


def rate_unit(engine: object) -> str:
    """Return the unit of a run's throughput, by the value of `rollout.engine`."""
    return "answers/s" if engine in TOKEN_ENGINES else "images/s"


def export_loader(engine: object) -> str:
    """Return the library that loads the export of a run, by the value of `rollout.engine`."""
    return "transformers" if engine in TOKEN_ENGINES else "diffusers"


def draws_problems(c: Config) -> Iterator[str]:
    """Yield error texts for an engine, and for keys, of models that draw something else."""
    draws, engine, family = drawn(c), c.rollout.engine, f"model.pipeline {c.model.pipeline!r}"
    if draws == "latents":
        if engine in TOKEN_ENGINES and c.emulation is None:
            yield f"rollout.engine: {engine} draws tokens, and {family} draws latents; use vllm_omni or diffusers"
        if c.weights.kv != "keep":
            yield "weights.kv: a model that draws latents keeps no keys and values; remove it"
    if draws != "tokens":
        return
    if engine not in TOKEN_ENGINES:
        yield f"rollout.engine: {engine} draws latents, and {family} draws tokens; use vllm or transformers"
    rollout, share = c.rollout, c.placement.rollout.gpus
    shared = c.placement.colocated or 0 < share < 1
    if engine == "vllm" and shared and not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & {*rollout.engine_args}:
        yield (
            "rollout.engine_args: vllm takes 0.9 of the memory of its device, which other workers share; give"
            " gpu_memory_utilization its part"
        )
    for key, given, why in (
        ("share_initial_noise", rollout.share_initial_noise, _NO_NOISE),
        ("share_prefix", rollout.share_prefix, _NO_NOISE),
        ("offload", rollout.offload, "a model that draws tokens has no text encoders"),
        ("buckets", rollout.buckets, "answers have no size, and every group is drawn with rollout.sampling"),
    ):
        if given:
            yield f"rollout.{key}: {why}; remove it"


def require_latents(drawing: Config | PipelineFamily, command: str, instead: str = "") -> None:
    """Raise ConfigError if a model draws tokens.

    Args:
        drawing: its recipe or its family.
        command: the command that knows only models that draw latents.
        instead: the remedy, if there is one."""
    draws = drawing.draws if isinstance(drawing, PipelineFamily) else drawn(drawing)
    if draws == "tokens":
        name = drawing.name if isinstance(drawing, PipelineFamily) else drawing.model.pipeline
        remedy = f"; {instead}" if instead else ""
        raise ConfigError(f"model.pipeline: {name!r} draws tokens, and {command} supports only latents so far{remedy}")

"""Generates the models' samples for the same requests, in this process, with the engine of diffusers or transformers.

Models with the same base folder share one loaded pipeline: the base draws first, then the trained weights of one
checkpoint after the other are swapped in. Waits only for the engine, which its finished batches unblock; media are
written meanwhile. Samples in the gallery are not generated again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from omni_async.aio.threads import in_daemon_thread
from omni_async.commands.evaluation.gallery import Gallery
from omni_async.commands.evaluation.models import PEFT_ADAPTERS, Model, adapter_files
from omni_async.commands.evaluation.settings import Settings
from omni_async.config import ConfigError
from omni_async.config.reading import real_path
from omni_async.config.redact import one_line
from omni_async.config.section import bytes_of
from omni_async.diffusion.policy import load_policy
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.calls import draw_calls
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.rollout.in_process import InProcessEngine
from omni_async.rollout.transformers_engine import TransformersEngine
from omni_async.tokens.policy import load_token_policy
from omni_async.training import TrainingError
from omni_async.training.trained import TrainedWeights
from omni_async.types import SampleRequest
from omni_async.weights.buckets import BucketSet
from omni_async.weights.snapshot import Snapshot

if TYPE_CHECKING:
    from omni_async.rollout.calls import Program

_BUCKET_BYTES = 256 * 2**20
_AHEAD = 2  # batches in flight, so that one is written while the next is generated

Progress = Callable[[str, int], None]
Generate = Callable[[SampleRequest], Awaitable[Trajectory]]


async def draw_all(settings: Settings, models: Sequence[Model], gallery: Gallery, progress: Progress) -> None:
    """Draw every sample that the gallery lacks.

    Args:
        settings: prompts, sizes and steps.
        models: the models to draw with.
        gallery: the store of samples.
        progress: takes a model's label and the number of existing samples, of all models.

    Raises:
        ConfigError: a model cannot be loaded, or does not accept a prompt; one line.
        EngineError: drawing failed.
        OSError: a sample could not be written; earlier samples are kept."""
    requests, program = settings.requests(), _program(settings)
    todo = {model.label: [each for each in requests if not gallery.has(model.label, each)] for model in models}
    done = len(models) * len(requests) - sum(map(len, todo.values()))
    for group in _sharing(models):
        waiting = [model for model in group if todo[model.label]]
        if not waiting:
            continue
        progress(f"{waiting[0].label}: loading", done)
        engine = await _started(settings, group[0].base)
        versions = count(1)
        try:
            generate = _generating(engine, program)
            for model in waiting:
                if model.weights != model.base:
                    await _take_weights(engine, model, settings, next(versions))

                def made(label: str = model.label) -> None:
                    nonlocal done
                    done += 1
                    progress(label, done)

                await _draw(settings, model.label, todo[model.label], generate, gallery, made)
        finally:
            await engine.close()


def _sharing(models: Sequence[Model]) -> Iterator[list[Model]]:
    """Yield the models that share an engine: the base first, because its weights cannot be restored later.

    Adapters of one run change the same layers, but adapters of two runs may not, so each run has an engine."""
    groups: dict[tuple[Path, Path | None], list[Model]] = {}
    for model in models:
        run = model.adapter or (None if model.trained is None else model.run)
        groups.setdefault((real_path(model.base), run), []).append(model)
    for (base, run), group in [*groups.items()]:
        if run is not None:
            yield [*groups.pop((base, None), []), *group]
    yield from (group for (_, run), group in groups.items() if run is None)


def _program(settings: Settings) -> Program | None:
    from omni_async.roles.builders import built_program

    try:
        return built_program(settings.config)
    except RuntimeError as error:
        raise ConfigError(one_line(str(error))) from None


def _generating(engine: InProcessEngine, program: Program | None) -> Generate:
    if program is None:
        return engine.generate
    return lambda request: draw_calls(program, request, engine.generate)


async def _started(settings: Settings, base: Path) -> InProcessEngine:
    try:
        engine = _engine(settings, str(base))
        await engine.start()
    except Exception as error:
        raise ConfigError(f"{base} cannot be loaded: {type(error).__name__}: {one_line(str(error), 500)}") from error
    return engine


def _engine(settings: Settings, base: str) -> InProcessEngine:
    rollout, family = settings.config.rollout, settings.family
    common: dict[str, Any] = {
        "dtype": getattr(torch, settings.config.model.dtype),
        "max_batch": rollout.max_batch,
        "device": settings.device,
        "conditioning_bytes": bytes_of(rollout.conditioning_cache),
    }
    if family.draws == "tokens":
        return TransformersEngine("model", load_token_policy(family, base), **common)
    return DiffusersEngine("model", load_policy(family, base), offload=rollout.offload, **common)


async def _take_weights(engine: InProcessEngine, model: Model, settings: Settings, number: int) -> None:
    """Load the weights of a checkpoint or an export into the engine as version `number`, as a run's publisher does.

    Raises ConfigError if they do not fit."""
    try:
        snapshot = await in_daemon_thread(_packed, model, settings, number)
        manifest = await in_daemon_thread(snapshot.manifest)
        await engine.stage(manifest, snapshot.buckets)
        await engine.swap(number)
    except (TrainingError, EngineError, SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{model.weights}: {one_line(str(error), 500)}") from None


def _packed(model: Model, settings: Settings, number: int) -> Snapshot:
    buckets = BucketSet(_BUCKET_BYTES)
    if model.trained is None:
        buckets.fill(_exported(model, settings.family.components[0]))
        return Snapshot(number, "lora", buckets.specs, buckets.buckets, {"scale": 1.0})  # their scale is in B
    weights, lora = TrainedWeights(model.trained.folder, model.policy), model.trained.config.model.lora
    buckets.fill(
        ((f"{part}.{name}", one) for part in weights.components for name, one in weights.stream(part)),
        None if weights.is_adapter else getattr(torch, settings.config.model.dtype),
    )
    if not weights.is_adapter:
        return Snapshot(number, "full", buckets.specs, buckets.buckets)
    if lora is None:
        raise TrainingError("it has adapters, but its recipe has no model.lora")
    return Snapshot(number, "lora", buckets.specs, buckets.buckets, {"rank": lora.rank, "alpha": lora.alpha})


def _exported(model: Model, first: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of an export; diffusers calls every component `transformer` in them, PEFT `base_model`."""
    assert model.adapter is not None
    for component, file in adapter_files(model.adapter).items():
        for name, tensor in load_file(file).items():
            own = name.removeprefix("base_model.model.") if file.name == PEFT_ADAPTERS else name.partition(".")[2]
            yield f"{component or first}.{own}", tensor


async def _draw(
    settings: Settings,
    label: str,
    requests: Sequence[SampleRequest],
    generate: Generate,
    gallery: Gallery,
    made: Callable[[], None],
) -> None:
    room, writing = asyncio.Semaphore(_AHEAD * settings.config.rollout.max_batch), asyncio.Lock()

    async def one(request: SampleRequest) -> None:
        async with room:
            try:
                trajectory = await generate(request)
            except ValueError as error:
                text = one_line(request.prompt.text)[:80]
                raise ConfigError(f"prompt {text!r} cannot be drawn: {one_line(str(error), 500)}") from None
            async with writing:
                await in_daemon_thread(gallery.add, label, request, trajectory.media.numpy())
            made()

    try:
        async with asyncio.TaskGroup() as tasks:
            for request in requests:
                tasks.create_task(one(request))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None

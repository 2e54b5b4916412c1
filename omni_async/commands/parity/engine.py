"""Compares a rollout engine with the trainer's arithmetic: samples, log-probs, and accepted or refused weights.

The policy recomputes every trained step of the engine's samples, with the weight version of that step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from omni_async.commands.parity.case import STEPS
from omni_async.commands.parity.model import DRAWN, ROUNDING, Subject, difference, media_difference, target_layers
from omni_async.commands.parity.table import Found, Row, failed
from omni_async.diffusion.components import named_parameters
from omni_async.diffusion.sde.noise import initial_noise
from omni_async.diffusion.sde.transitions import log_prob, nats_per_log_prob, transition
from omni_async.rollout.base import EngineError, RolloutEngine, Trajectory
from omni_async.types import SampleRequest, SdeWindow, WeightManifest
from omni_async.weights.buckets import BucketSet
from omni_async.weights.digest import Bucket, digest
from omni_async.weights.lora import merged_weights

T = TypeVar("T")
Models = Mapping[int, Mapping[str, nn.Module]]
_RANK, _ALPHA = 2, 4.0
_LONG = 60  # denoising steps, so that a push arrives during sampling
_SHARES = (0.5, 0.3, 0.7, 0.1, 0.5)  # fractions of the sampling time after which weights are pushed
_BUCKET_BYTES = 64 * 2**20


async def check_engine(subject: Subject, engine: RolloutEngine) -> AsyncIterator[Row]:
    """Yield a row for every check of a started engine, as it completes.

    Its denoisers must be in float32. It has the checkpoint's weights again afterwards."""
    checks: dict[str, Callable[[Subject, RolloutEngine], Coroutine[Any, Any, Found]]] = {
        "noise-free samples": _noise_free,
        "log-probs of a mixed batch": _log_probs,
        "alone as in a batch": _alone,
        "same seed, same bits": _seeds,
        "weights in mid-trajectory": _pushed,
        "old weights come back": _restored,
        "adapters": _adapters,
        "wrong weights are refused": _refused,
    }
    for name, check in checks.items():
        try:
            found = await check(subject, engine)
        except Exception as error:  # noqa: BLE001 (foreign code; the next checks may say more)
            yield failed(engine.name, name, error)
        else:
            yield Row(engine.name, name, float(found.value), found.bound, found.note)


# ---- samples ---------------------------------------------------------------------------------------------------------


async def _generate(engine: RolloutEngine, requests: Iterable[SampleRequest]) -> list[Trajectory]:
    return list(await asyncio.gather(*[engine.generate(request) for request in requests]))


def _mixed(subject: Subject) -> list[SampleRequest]:
    """Make requests of different specs, windows, prompts, kinds and numbers of steps."""
    first, second, make = subject.case.specs[0], subject.case.specs[-1], subject.case.request
    return [
        *(make(spec, number) for number, spec in enumerate([first, second, first, second])),
        make(first, 4, sde_kind="cps", noise_level=0.9),
        make(second, 5, num_inference_steps=5, window=SdeWindow(0, 3)),
        make(second, 6, window=SdeWindow(0, STEPS - 1)),  # over the boundary of two experts
    ]


async def _noise_free(subject: Subject, engine: RolloutEngine) -> Found:
    noise_free: dict[str, Any] = {"window": None, "noise_level": 0.0}
    specs = subject.case.specs
    requests = [subject.case.request(spec, number, **noise_free) for spec in specs for number in range(2)]
    off, levels = 0.0, 0.0
    for request, made in zip(requests, await _generate(engine, requests), strict=True):
        if not torch.equal(made.tensors["sigmas"], subject.policy.sigmas(STEPS, request.spec)):
            return Found(float("inf"), DRAWN, "another schedule")
        noise = initial_noise(request.seed, subject.policy.latent_shape(request.spec))[None]
        # The trainer's own conditioning, not the engine's: the engine's encoders must read the prompt in the same way.
        conditioning = subject.policy.stack_conditioning([subject.codec.encode(request.prompt, request.spec)])
        off = max(off, difference(made.tensors["final"][None], subject.draw(noise, conditioning, request.spec)))
        [media] = subject.codec.decode(made.tensors["final"][None], request.spec)
        for part in media.parts:
            wanted, got = (torch.as_tensor(getattr(one, part)) for one in (media, made.media))
            levels = max(levels, media_difference(part, got, wanted))
    return Found(off if levels <= 1 else float("inf"), DRAWN, f"media off by {levels:g} levels")


async def _log_probs(subject: Subject, engine: RolloutEngine) -> Found:
    requests = _mixed(subject)
    made = await _generate(engine, requests)
    return _against_trainer(subject, {0: subject.model}, requests, made)


async def _alone(subject: Subject, engine: RolloutEngine) -> Found:
    requests = _mixed(subject)
    off = 0.0
    for request, one in zip(requests, await _generate(engine, requests), strict=True):
        [alone] = await _generate(engine, [request])
        off = max(off, *_differences(one, alone).values())
    return Found(off, ROUNDING, f"{len(requests)} samples")


async def _seeds(subject: Subject, engine: RolloutEngine) -> Found:
    request = subject.case.request(subject.case.specs[0])
    [one], [again] = [await _generate(engine, [request]) for _ in range(2)]
    [other] = await _generate(engine, [subject.case.request(subject.case.specs[0], seed=5)])
    if difference(one.tensors["final"], other.tensors["final"]) == 0:
        return Found(float("inf"), 0, "another seed makes the same sample")
    return Found(max(_differences(one, again).values()), 0)


# ---- weights ---------------------------------------------------------------------------------------------------------


async def _pushed(subject: Subject, engine: RolloutEngine) -> Found:
    """Switch to other weights during the sampling of long samples; the moment must be guessed, so retry."""
    weights = _changed(subject)
    window = SdeWindow(2, _LONG - 10)
    requests = [
        subject.case.request(subject.case.specs[-1], number, num_inference_steps=_LONG, window=window)
        for number in range(3)
    ]
    for share in _SHARES:
        started = time.perf_counter()
        await _generate(engine, requests)
        seconds = time.perf_counter() - started
        await engine.stage(*publish(1, weights))
        running = asyncio.create_task(_generate(engine, requests))
        await asyncio.sleep(share * seconds)
        await engine.swap(1)
        made = await running
        await _restore(subject, engine)
        # Both must have taken trained steps: no other step is compared.
        trained = slice(window.steps.start, window.steps.stop)
        if {version for one in made for version in [*one.versions][trained]} == {0, 1}:
            return _against_trainer(subject, {0: subject.model, 1: _with_weights(subject, weights)}, requests, made)
    return Found(float("inf"), ROUNDING, "no push met a sample under way: versions change between samples alone")


async def _restored(subject: Subject, engine: RolloutEngine) -> Found:
    request = subject.case.request(subject.case.specs[-1])
    [before] = await _generate(engine, [request])
    await engine.stage(*publish(2, _changed(subject)))
    await engine.swap(2)
    [changed] = await _generate(engine, [request])
    await _restore(subject, engine)
    [after] = await _generate(engine, [request])
    if difference(before.tensors["final"], changed.tensors["final"]) == 0:
        return Found(float("inf"), 0, "the engine drew with its old weights after a push")
    return Found(max(_differences(before, after).values()), 0)


async def _adapters(subject: Subject, engine: RolloutEngine) -> Found:
    layers = target_layers(subject)
    generator = torch.Generator().manual_seed(1)
    adapters = {}
    for component, names in layers.items():
        for name in names:
            weight: Any = subject.model[component].get_submodule(name).weight
            for matrix, shape in (("A", (_RANK, weight.shape[1])), ("B", (weight.shape[0], _RANK))):
                adapters[f"{component}.{name}.lora_{matrix}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    if not adapters:
        return Found(float("inf"), ROUNDING, f"no layer is called as one of {list(subject.case.targets)}")
    weights = {name: parameter.detach() for name, parameter in named_parameters(subject.model)}
    merged = dict(merged_weights(weights, adapters, _ALPHA / _RANK))
    request = subject.case.request(subject.case.specs[-1])
    [before] = await _generate(engine, [request])
    await engine.stage(*publish(3, adapters, {"rank": _RANK, "alpha": _ALPHA}))
    await engine.swap(3)
    [made] = await _generate(engine, [request])
    await _restore(subject, engine)
    if difference(before.tensors["final"], made.tensors["final"]) == 0:
        return Found(float("inf"), ROUNDING, "adapters change nothing")
    found = _against_trainer(subject, {3: _with_weights(subject, merged)}, [request], [made])
    return found._replace(note=f"{len(adapters) // 2} layers; {found.note}")


async def _refused(subject: Subject, engine: RolloutEngine) -> Found:
    """Count the wrong versions that are accepted; check that samples are bit-identical to earlier ones.

    Wrong versions carry other weights, so a partially applied version changes the samples."""
    weights = _changed(subject)
    first, *others = weights
    manifest, buckets = publish(4, weights)
    damaged = [bucket.copy() for bucket in buckets]
    damaged[0][5] ^= 1
    nowhere = publish(4, {f"{first}.nowhere.lora_{m}.weight": torch.ones(2, 2) for m in "AB"}, {"scale": 1.0})
    wrong = {
        "a damaged payload": (manifest, damaged),
        "a parameter that the model lacks": publish(4, weights | {f"{first}.nowhere": weights[first]}),
        "a version without one parameter": publish(4, {name: weights[name] for name in others}),
        "adapters of a layer that the model lacks": nowhere,
    }
    request = subject.case.request(subject.case.specs[0])
    [before] = await _generate(engine, [request])
    taken = []
    for what, published in wrong.items():
        try:
            await engine.stage(*published)
            await engine.swap(4)
            taken.append(what)
        except EngineError:
            pass
    [after] = await _generate(engine, [request])
    if not taken and (off := max(_differences(before, after).values())) > 0:
        taken.append(f"a refused version changed the samples by {off:.1e}")
    return Found(len(taken), 0, "; ".join(taken) or f"{len(wrong)} kinds")


def publish(
    version: int, tensors: Mapping[str, Tensor], lora: dict[str, Any] | None = None
) -> tuple[WeightManifest, list[Bucket]]:
    """Pack tensors as a published version: full weights or, with `lora`, adapters."""
    packed = BucketSet(_BUCKET_BYTES)
    packed.fill(tensors.items())
    payload: Literal["full", "lora"] = "lora" if lora else "full"
    return WeightManifest(version, payload, digest(packed.specs, packed.buckets), packed.specs, lora), packed.buckets


async def _restore(subject: Subject, engine: RolloutEngine) -> None:
    await engine.stage(*publish(0, {name: p.detach() for name, p in named_parameters(subject.model)}))
    await engine.swap(0)


def _changed(subject: Subject) -> dict[str, Tensor]:
    """Return the checkpoint's weights with noise on every one."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: p.detach() + 0.02 * torch.randn(p.shape, generator=generator)
        for name, p in named_parameters(subject.model)
    }


def _with_weights(subject: Subject, weights: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    model = nn.ModuleDict(subject.policy.load_components(torch.float32))
    model.load_state_dict(dict(weights), strict=False)
    return dict(model.items())


# ---- comparisons -----------------------------------------------------------------------------------------------------


def _against_trainer(subject: Subject, models: Models, requests: list[SampleRequest], made: list[Trajectory]) -> Found:
    """Recompute every trained step with its weight version; return the largest difference of means and log-probs.

    The note has it in nats of a whole sample."""
    off, nats, steps = 0.0, 0.0, 0
    for request, one in zip(requests, made, strict=True):
        tensors, versions = one.tensors, [*one.versions]
        window = request.window.steps if request.window else range(0)
        if tensors["steps"].tolist() != list(window) or len(versions) != request.num_inference_steps:
            return Found(float("inf"), ROUNDING, "other steps were trained than the request's")
        stacked = subject.policy.stack_conditioning([tensors["conditioning"]])
        for k, step in enumerate(window):
            mean, expected, per_log_prob = _step(subject, models[versions[step]], request, one, k, step, stacked)
            distance = float((expected - tensors["log_probs"][k]).abs().max())
            off = max(off, distance, difference(tensors["means"][k : k + 1], mean))
            nats = max(nats, per_log_prob * distance)
            steps += 1
    return Found(off, ROUNDING, f"{steps} steps, at most {nats:.1e} nats")


def _step(
    subject: Subject,
    model: Mapping[str, nn.Module],
    request: SampleRequest,
    made: Trajectory,
    k: int,
    step: int,
    stacked: Any,
) -> tuple[Tensor, Tensor, float]:
    tensors = made.tensors
    sigma, sigma_next = tensors["sigmas"][step : step + 1], tensors["sigmas"][step + 1 : step + 2]
    before, after = tensors["latents"][k : k + 1], tensors["latents"][k + 1 : k + 2]
    with torch.no_grad():
        v = subject.policy.velocity(model, before, sigma, stacked, request.spec)
    level = torch.tensor([request.noise_level])
    taken = transition(request.sde_kind, before, v, sigma, sigma_next, tensors["sigmas"][1:2], level)
    nats = nats_per_log_prob(request.sde_kind, taken.scale.double(), before.numel())
    return taken.mean, log_prob(request.sde_kind, after, taken.mean, taken.scale), float(nats.max())


def _differences(a: Trajectory, b: Trajectory) -> dict[str, float]:
    """Return the largest difference of every tensor of two trajectories."""
    flat_a, flat_b = (t.tensors.flatten_keys(".") for t in (a, b))
    if set(flat_a.keys()) != set(flat_b.keys()) or a.versions != b.versions:
        return {"": float("inf")}
    return {str(key): difference(flat_a[key], flat_b[key]) for key in flat_a.keys()}  # noqa: SIM118

"""Measures the differences between results of the same bfloat16 weights with different kernels.

A difference d of the means of two Gaussians of the same scale, relative to that scale, makes a log-ratio of standard
deviation |d| and mean -|d|^2 / 2 nats. Random weights give velocities of any size, so all are divided by the root mean
square of the base's. The quickstart's trained model has a root mean square of 1.1 to 1.8 at steps 0 to 4, and its nats
are larger by that factor. The relative error of the velocity depends on neither that size nor the number of latents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_probe_bench import Bench
from benchmarks.gpu_probe_machine import flash_attention_3
from benchmarks.gpu_probe_model import compile_blocks
from benchmarks.gpu_probe_run import Report, Settings
from omni_async.diffusion.components import compute_velocity
from omni_async.diffusion.sde.transitions import log_prob, transition
from omni_async.training.model import repeated_layers

_NOISE_LEVEL = 1.2  # the recipe's
_ROWS = 4


class Point(NamedTuple):
    """Rows at one denoising step: their latents x (B, T, C), the velocity of the base, and x' drawn from it."""

    scale: float
    step: int
    x: Tensor
    conditioning: TensorDict
    velocity: Tensor
    x_next: Tensor


class Way(NamedTuple):
    """A way to compute a velocity: the context of its kernels, and the number of rows at once."""

    context: Callable[[], AbstractContextManager[object]]
    rows: int = _ROWS


@torch.no_grad()
def mismatch(settings: Settings, report: Report) -> None:
    """Report relative velocity errors and log-ratios of several kernels against the default ones."""
    bench = Bench(settings, report)
    components = bench.load_denoiser()
    [transformer] = components.values()
    points = [point for scale in (1.0, 4.0) for point in _points(bench, components, scale)]
    compiled: list[bool] = []

    def compile_once() -> AbstractContextManager[object]:
        if not compiled:
            compile_blocks(bench, transformer)
            compiled.append(True)
        return nullcontext()

    ways = {
        "one row at a time": Way(nullcontext, 1),
        "autocast": Way(lambda: torch.autocast(bench.device.type, torch.bfloat16)),
        **{f"{backend.name.lower()}": Way(lambda b=backend: sdpa_kernel(b)) for backend in _backends(bench)},  # type: ignore[misc]
        **({"fa3_fwd": Way(by_flash_attention_3)} if bench.accelerated else {}),
        "float32 arithmetic": Way(lambda: in_float32(transformer)),
        "compiled": Way(compile_once),  # last, because it cannot be undone
    }
    for name, way in ways.items():
        for point in points:
            with bench.arm(f"{name}, guidance {point.scale:g}, step {point.step}"):
                velocity = _velocity(bench, components, point.x, point.conditioning, point.scale, point.step, way)
                _compare(bench, name, point, velocity)


def _backends(bench: Bench) -> list[SDPBackend]:
    if not bench.accelerated:
        return [SDPBackend.MATH]
    return [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@contextmanager
def by_flash_attention_3() -> Iterator[None]:
    """Compute attention with the library of vLLM-Omni's engines on Hopper, in place of torch's."""

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        if attn_mask is not None:
            raise RuntimeError("expected no mask: the probe's texts have no padding")
        return flash_attention_3(query, key, value)

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", attention):
        yield


@contextmanager
def in_float32(transformer: nn.Module) -> Iterator[None]:
    """Compute with the same weights in float32 arithmetic, a block at a time: 20 G of them do not fit twice."""
    blocks = repeated_layers(transformer)
    others = [child for child in transformer.children() if not isinstance(child, nn.ModuleList)]

    def before(block: nn.Module, args: Any) -> None:
        block.float()

    def after(block: nn.Module, args: Any, output: Any) -> None:
        block.bfloat16()

    hooks = [block.register_forward_pre_hook(before) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    for other in others:
        other.float()
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        transformer.bfloat16()


def _velocity(
    bench: Bench,
    components: dict[str, nn.Module],
    x: Tensor,
    conditioning: TensorDict,
    scale: float,
    step: int,
    way: Way,
) -> Tensor:
    sigma, spec = bench.sigmas[step].expand(len(x)).to(bench.device), bench.guided_by(scale)

    def of(rows: slice) -> Tensor:
        needs = [*components] * len(x[rows])
        return compute_velocity(bench.policy, components, x[rows], sigma[rows], conditioning[rows], spec, needs)

    with way.context():
        return torch.cat([of(slice(first, first + way.rows)) for first in range(0, len(x), way.rows)])


def _points(bench: Bench, components: dict[str, nn.Module], scale: float) -> Iterator[Point]:
    """Yield steps of the recipe's window under the base's own velocity, by the default kernels."""
    x, conditioning = bench.latents(_ROWS), bench.conditioning(_ROWS)
    for step in (0, 2, 4):
        found = _velocity(bench, components, x, conditioning, scale, step, Way(nullcontext))
        mean, gaussian_scale = _gaussian(bench, step, x, found / _rms(found))
        x_next = mean + gaussian_scale.view(-1, 1, 1) * bench.noise(*x.shape)
        yield Point(scale, step, x, conditioning, found, x_next)
        x = x_next


def _rms(velocity: Tensor) -> Tensor:
    return velocity.square().mean().sqrt()


def _gaussian(bench: Bench, step: int, x: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    sigma, after, first = (bench.sigmas[k].expand(len(x)).to(bench.device) for k in (step, step + 1, 1))
    level = torch.full((len(x),), _NOISE_LEVEL, dtype=torch.float64, device=bench.device)
    gaussian = transition("flow", x, velocity, sigma, after, first, level)
    return gaussian.mean, gaussian.scale


def _compare(bench: Bench, name: str, point: Point, velocity: Tensor) -> None:
    size, elements = _rms(point.velocity), point.x[0].numel()
    (base, scale), (mean, _) = (_gaussian(bench, point.step, point.x, one / size) for one in (point.velocity, velocity))
    apart = ((mean - base).double().flatten(1).norm(dim=1) / scale.double()).tolist()
    log_ratio = log_prob("flow", point.x_next, mean, scale) - log_prob("flow", point.x_next, base, scale)
    bench.note(
        f"{name}, guidance {point.scale:g}, step {point.step}",
        relative_error=float((velocity - point.velocity).norm() / point.velocity.norm()),
        std_nats=math.sqrt(sum(one**2 for one in apart) / len(apart)),
        largest_nats=float((elements * log_ratio).abs().max()),
    )

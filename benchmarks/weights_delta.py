"""Measures whether sending only what changed would be less work: bf16 weights of a recipe's model before and after an
AdamW step, compared and packed.

The step is a real one of the model's own flow-matching loss on random latents and prompts of no content, drawn anew for
every step, so that AdamW's moments are those of noisy gradients. A difference is packed in two ways: a bit per element
and the changed elements' new values, and zlib over the exclusive or. Both are compared with what they would save: a
plain copy of all bytes.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from omni_async.components import compute_velocity
from omni_async.config import Config
from omni_async.families import find_family
from omni_async.policy import Policy, load_policy
from omni_async.weights.digest import Bucket

_BATCH = 8


class DeltaRecord(msgspec.Struct, frozen=True):
    """The difference after `steps` optimizer steps at `lr`: the last step changed `changed` of the bf16 elements.
    Bytes as a fraction of all, seconds for making (`pack_s`, `zlib_s`) and for applying (`apply_s`) the difference,
    beside `copy_s` for a plain copy."""

    lr: float
    steps: int
    num_elements: int
    changed: float
    packed_bytes: float
    zlib_bytes: float
    copy_s: float
    pack_s: float
    apply_s: float
    zlib_s: float


def measure_delta(config: Config, rates: Sequence[float], steps: int, repeats: int = 5) -> list[DeltaRecord]:
    """Measures after the first and after the last of `steps` steps, for every learning rate."""
    policy = load_policy(find_family(config.model.pipeline), config.model.path)
    records = []
    for lr in rates:
        model = torch.nn.ModuleDict(policy.load_components(torch.float32)).requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=config.trainer.optimizer.weight_decay)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, steps + 1):
            before = _bf16(model)
            _loss(policy, model, config, generator).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (1, steps):
                records.append(_compare(lr, step, before, _bf16(model), repeats))
    return records


def _loss(policy: Policy, model: torch.nn.ModuleDict, config: Config, generator: torch.Generator) -> torch.Tensor:
    spec = config.rollout.sampling
    shape = (_BATCH, *policy.latent_shape(spec))
    clean, noise = (torch.randn(shape, generator=generator) for _ in range(2))
    sigma = torch.rand(_BATCH, generator=generator)
    weight = sigma.view(-1, *[1] * (len(shape) - 1))
    text = policy.stack_conditioning([policy.blank_conditioning(spec)] * _BATCH)
    noisy = (1 - weight) * clean + weight * noise
    needs = [policy.component_of(value) for value in sigma.tolist()]
    velocity = compute_velocity(policy, dict(model.items()), noisy, sigma, text, spec, needs)
    return (velocity - (noise - clean)).square().mean()


def _bf16(model: torch.nn.Module) -> np.ndarray[Any, np.dtype[np.uint16]]:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).bfloat16()
    bits: np.ndarray[Any, np.dtype[np.uint16]] = flat.view(torch.uint16).numpy()
    return bits


def _compare(
    lr: float, step: int, before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], repeats: int
) -> DeltaRecord:
    target = before.copy()
    mask, values = pack(before, after)
    if not np.array_equal(apply(before.copy(), mask, values), after):
        raise RuntimeError("a difference that was applied gave other weights")
    compressed = zlib.compress((before ^ after).data, 1)
    return DeltaRecord(
        lr=lr,
        steps=step,
        num_elements=len(after),
        changed=len(values) / len(after),
        packed_bytes=(mask.nbytes + values.nbytes) / after.nbytes,
        zlib_bytes=len(compressed) / after.nbytes,
        copy_s=_median(lambda: np.copyto(target, after), repeats),
        pack_s=_median(lambda: pack(before, after), repeats),
        apply_s=_median(lambda: apply(target, mask, values), repeats),
        zlib_s=_median(lambda: zlib.compress((before ^ after).data, 1), repeats),
    )


def pack(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> tuple[Bucket, np.ndarray[Any, Any]]:
    """Returns a bit per element, and the elements that differ."""
    different = before != after
    return np.packbits(different), after[different]


def apply(weights: np.ndarray[Any, Any], mask: Bucket, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Applies a packed difference. Returns `weights`, changed in place."""
    weights[np.unpackbits(mask, count=len(weights)).view(np.bool_)] = values
    return weights


def _median(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))

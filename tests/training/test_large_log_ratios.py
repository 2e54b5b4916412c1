"""Tests that a log-ratio in nats survives D latent elements, for a sample of Wan2.2's size on its whole way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.algorithms.correction import interpolated_log_prob
from omni_async.algorithms.tempering import effective_sample_size
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.runtime.on_ray.store import _to_arrays, _to_tensors
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.types import SdeWindow
from tests.rollout.conftest import make_request
from tests.support.fakes import TinyPolicy
from tests.training.training_world import make_config, started, step_on

SHAPE = (16, 21, 60, 104)  # 81 frames of 480 x 832
D = math.prod(SHAPE)
L = 0.136
NOISE = {"flow": 0.7, "cps": 0.7, "dance": 0.3}
STEPS, STEP = 10, 1
kinds = pytest.mark.parametrize("kind", NOISE)


class Shift(nn.Module):
    """Predicts half the latents, shifted by a trained number per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(SHAPE[0]))

    def forward(self, latents: Tensor) -> Tensor:
        return latents / 2 + self.shift[:, None, None, None]


class LargePolicy(TinyPolicy):
    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        return {"transformer": Shift()}

    def latent_shape(self, spec: Any) -> tuple[int, ...]:
        return SHAPE

    def velocity(
        self, components: Mapping[str, nn.Module], latents: Tensor, *others: Any, unconditional_gradient: bool = True
    ) -> Tensor:
        return components["transformer"](latents)

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        return TensorDict({}, batch_size=[len(rows)])


def drawn(kind: str, folder: Path, seeds: tuple[int, ...] = (0,)) -> list[TensorDict]:
    """Draws samples by the unshifted policy, and carries them through the store of Ray and a checkpoint."""
    sigmas = LargePolicy().sigmas(STEPS, None)
    samples = []
    for seed in seeds:
        request = make_request(
            seed=seed,
            num_inference_steps=STEPS,
            sde_kind=kind,
            noise_level=NOISE[kind],
            window=SdeWindow(start=STEP, size=1),
            fields=("latents", "log_probs", "conditioning"),
        )
        samples.append(InFlight(request, sigmas, SHAPE))
    for _ in range(STEP + 1):
        take_steps(samples, torch.stack([sample.latents for sample in samples]) / 2, 0)
    conditioning = TensorDict({"text": torch.zeros(1)}, [])
    tensors = [TensorDict(sample.tensors(conditioning), batch_size=[]) for sample in samples]
    write_group(folder, 0, [_to_tensors(_to_arrays(one)) for one in tensors])
    return read_group(folder, 0, len(samples))


def away(kind: str, sample: TensorDict, nats: float) -> Tensor:
    """Returns the shift (16,) of the policy whose log-ratio to the one that drew the sample is `nats`, in float64."""
    x, x_next = sample["latents"].double()
    sigma, after = sample["sigmas"][STEP].double(), sample["sigmas"][STEP + 1].double()
    h, level = sigma - after, NOISE[kind]
    if kind == "cps":
        scale, kept = after * math.sin(level * math.pi / 2), after * math.cos(level * math.pi / 2)
        of_x, of_v = (1 - after) + kept, kept * (1 - sigma) - (1 - after) * sigma
    else:
        g = level * (sigma / (1 - sigma)).sqrt() if kind == "flow" else torch.tensor(level).double()
        scale = g * h.sqrt()
        of_x, of_v = 1 - g**2 / (2 * sigma) * h, -(1 + g**2 * (1 - sigma) / (2 * sigma)) * h
    noise = ((x_next - (of_x * x + of_v * x / 2)) / scale).flatten(1).sum(dim=1)
    # With every channel's shift c scale / of_v in the direction of its noise: L = c sum |noise| - c^2 D / 2.
    most = noise.abs().sum()
    assert 2 * D * nats < most**2
    c = (most - (most**2 - 2 * D * nats).sqrt()) / D
    return (c * noise.sign() * scale / of_v).float()


def engine_at(shift: Tensor, kind: str, **changes: Any) -> TrainEngine:
    sde = {"kind": kind, "noise_level": NOISE[kind], "window": {"size": 1, "range": [STEP, STEP + 1]}}
    given = {"sde": sde, "rollout.num_inference_steps": STEPS, "clip_range": None, "algorithm.clip_range_nats": 1.0}
    engine = started(make_config(**(given | changes)), LargePolicy())
    with torch.no_grad():
        engine._model.components["transformer"].shift.copy_(shift)
    return engine


def group_of(engine: TrainEngine, samples: list[TensorDict], staleness: int = 1) -> GroupBatch:
    count = len(samples)
    ages = [[staleness]] * count
    return GroupBatch(0, engine.config.rollout.sampling, samples, [1.0] * count, [0] * count, ages, size=count)


@kinds
def test_a_log_ratio_reaches_every_loss_and_its_metrics(kind: str, tmp_path: Path) -> None:
    samples = drawn(kind, tmp_path)
    shift = away(kind, samples[0], L)
    scale = samples[0]["sigmas"][STEP + 1].item() * math.sin(NOISE["cps"] * math.pi / 2)
    for bound, clipped in ((L - 2e-3, 1.0), (L + 2e-3, 0.0)):
        engine = engine_at(shift, kind, **{"algorithm.clip_range_nats": bound})
        metrics = step_on(engine, group_of(engine, samples))
        assert metrics["log_ratio_nats/mean"] == pytest.approx(L, abs=1e-3)
        assert (metrics["clipped_high"], metrics["clipped_low"]) == (clipped, 0.0)
        assert (metrics["grad_norm"] == 0.0) == bool(clipped), "a row that is clipped has no gradient"
        per_log_prob = 1.0 if kind != "cps" else 1 / (2 * scale**2)
        assert D * per_log_prob * metrics["ratio_deviation"] == pytest.approx(L, abs=1e-3)
    for objective in ("dance_grpo", "mix_grpo", "gspo"):
        engine = engine_at(shift, kind, name=objective, **{"algorithm.clip_range_nats": L - 2e-3})
        assert step_on(engine, group_of(engine, samples))["clipped_high"] == 1.0
    for nats in (0.0, L):
        engine = engine_at(away(kind, samples[0], nats), kind)
        metrics = step_on(engine, group_of(engine, samples, staleness=0))
        assert metrics["engine_mismatch_nats"] == pytest.approx(nats, abs=1e-3 if nats else 0.0)


@kinds
def test_corrections_and_the_interpolated_policy_see_it(kind: str, tmp_path: Path) -> None:
    samples = drawn(kind, tmp_path, (0, 1))
    engine = engine_at(
        away(kind, samples[0], L), kind, correction={"mode": "decoupled", "weights": "importance", "cap": None}
    )
    group = group_of(engine, samples)
    drifts = engine.recompute_proximal(group)
    found = torch.tensor([drift.log_ratio for drift in drifts], dtype=torch.float64)
    first, second = found[:, 0].tolist()
    assert first == pytest.approx(L, abs=1e-3)
    metrics = step_on(engine, group)
    assert metrics["weight/mean"] == pytest.approx((math.exp(first) + math.exp(second)) / 2, rel=1e-9)
    assert metrics["ess"] == pytest.approx(effective_sample_size(found[:, 0]).item(), rel=1e-9)
    correction = {"mode": "interpolated", "weights": "importance", "cap": None}
    engine = engine_at(away(kind, samples[0], L), kind, correction=correction)
    metrics = step_on(engine, group_of(engine, samples[:1]))
    assert metrics["weight/mean"] == pytest.approx(math.exp(L / 2), abs=1e-3)
    behaviour = samples[0]["log_probs"]
    assert interpolated_log_prob(behaviour, behaviour + 1e-9, torch.tensor([1]), torch.ones(1)).dtype == torch.float64

"""Tests the common properties of every objective on final latents."""

from dataclasses import replace

import pytest
import torch
from forward_rows import make_rows

from omni_async.algorithms.registry import BUILT_IN, find_objective
from omni_async.config.algorithm import Algorithm, Awm, Nft

NAMES = ("velocity", "final", "noise", "sigma", "advantage", "old_velocity", "ref_velocity", "ema_velocity")
CASES = {
    "diffusion_nft": Algorithm(kl_coef=0.1, nft=Nft(beta=0.1)),
    "awm": Algorithm(kl_coef=0.1, awm=Awm(ema_coef=0.1)),
    "diffusion_dpo": Algorithm(),
}
cases = pytest.mark.parametrize("name", CASES)


def pairs(dtype):
    """Makes three pairs with common noise and sigma."""
    rows = make_rows(dtype=dtype)
    return replace(rows, noise=rows.noise[::2].repeat_interleave(2, dim=0), sigma=rows.sigma[::2].repeat_interleave(2))


def test_every_objective_on_final_latents_is_covered_here():
    assert {objective.name for objective in BUILT_IN if objective.kind != "transition"} == CASES.keys()


@cases
def test_a_pair_of_rows_does_not_depend_on_its_batch(name):
    rows, compute = pairs(torch.float32), find_objective(name).load()
    together = compute(rows, CASES[name])
    for first in range(0, 6, 2):
        own = slice(first, first + 2)
        alone = compute(replace(rows, **{field: getattr(rows, field)[own] for field in NAMES}), CASES[name])
        assert torch.equal(together.loss[own], alone.loss)
        assert all(torch.equal(together.metrics[metric][own], value) for metric, value in alone.metrics.items())


@cases
def test_half_precision_velocities_give_float32_losses_and_detached_metrics(name):
    rows, compute = pairs(torch.bfloat16), find_objective(name).load()
    out = compute(rows, CASES[name])
    assert out.loss.dtype == torch.float32
    exact = compute(replace(rows, **{field: getattr(rows, field).double() for field in NAMES}), CASES[name])
    torch.testing.assert_close(out.loss, exact.loss.float())
    assert all((m.shape, m.dtype, m.requires_grad) == ((6,), torch.float32, False) for m in out.metrics.values())

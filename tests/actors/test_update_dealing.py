"""Tests that an update deals every sample to one data rank and puts what ranks find back where it belongs, for any
number of ranks, groups and samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from actor_world import AccountingRank, make_config, make_group, run_update
from hypothesis import given
from hypothesis import strategies as st

from omni_async.types import SampleDrift

SETTINGS = {"mode": "decoupled", "weights": "importance", "normalise": True, "cap": None}


@st.composite
def updates(draw: st.DrawFn) -> dict[str, int]:
    steps = draw(st.integers(1, 2))
    return {
        "data": draw(st.integers(1, 7)),
        "sequence": draw(st.integers(1, 2)),
        "steps": steps,
        "groups": steps * draw(st.integers(1, 3)),
        "size": draw(st.integers(2, 6)),
    }


@given(updates())
def test_weights_find_their_samples_and_every_sample_is_trained_once(job: dict[str, int]) -> None:
    """Weights are exp(L) over its mean, which identifies the sample that a log-ratio L was found on."""
    groups, size, world = job["groups"], job["size"], job["data"] * job["sequence"]
    log_ratios = torch.arange(groups * size * 2, dtype=torch.float64).reshape(groups, size, 2) / (groups * size * 4)
    rewards = torch.rand(groups, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    drifts = {
        f"trajectory {g}.{i}": SampleDrift(tuple(log_ratios[g, i].tolist()), None, 24)
        for g in range(groups)
        for i in range(size)
    }
    ranks = [AccountingRank(rank=r, world=world, sequence=job["sequence"], drifts=drifts) for r in range(world)]
    settings: dict[str, Any] = {
        "trainer.workers": world,
        "trainer.sequence_parallel": job["sequence"],
        "trainer.groups_per_update": groups,
        "trainer.steps_per_update": job["steps"],
        "rollout.group_size": size,
        "algorithm.advantage": {"std": "none"},
        "algorithm.correction": SETTINGS,
        "algorithm.kl_coef": 0.1,
    }
    run_update(make_config(**settings), ranks, [make_group(g, row) for g, row in enumerate(rewards.tolist())])

    weights = log_ratios.exp() / log_ratios.exp().mean()
    advantages = (rewards - rewards.mean(1, keepdim=True))[:, :, None]
    trained = (weights * advantages).sum().item() / (groups // job["steps"] * size * 2)
    leaders = ranks[:: job["sequence"]]
    assert sum(rank.theta for rank in leaders) == pytest.approx(trained, rel=1e-9, abs=1e-12)
    for rank in ranks:
        found = torch.tensor([batch.weights for batch in rank.batches], dtype=torch.float64)
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=0)
    for g in range(groups):
        assert sorted(i for rank in leaders for i in rank.mine[g]) == list(range(size))
        assert all(rank.mine[g] == leaders[r // job["sequence"]].mine[g] for r, rank in enumerate(ranks))
    taken = [sum(map(len, rank.mine.values())) for rank in leaders]
    assert max(taken) - min(taken) <= 1

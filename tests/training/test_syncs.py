"""Counts what makes the host wait for its device, on the meta device, whose tensors have no values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from tests.support.fakes import tiny_group
from tests.training.training_world import NFT, make_config, started

aten = torch.ops.aten
META = torch.device("meta")


class Syncs(TorchDispatchMode):
    """A counter of synchronisations. Numbers that are read are true or 1, and copies count from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op is aten._local_scalar_dense.default and args[0].is_meta:
            self.found["read"] += 1
            return True if args[0].dtype == torch.bool else 1
        if op is aten._to_copy.default and "device" in kwargs:
            given, device = args[0], torch.device(kwargs["device"])
            if given.is_meta and device.type == "cpu":
                self.found["fetched"] += 1
                return torch.arange(given.numel(), dtype=given.dtype).reshape(given.shape)
            if not given.is_meta and device.type == "meta" and not kwargs.get("non_blocking"):
                self.found["sent"] += 1
        return op(*args, **kwargs)


def on_meta(**changes: Any) -> tuple[TrainEngine, list[GroupBatch]]:
    own = {"backend": "plain", "trainer.peak_tflops": 1.0, "trainer.optimizer.fused": False, "size": 4}
    config = make_config(**own, **changes)
    groups = [tiny_group(started(config).policy, config, seed) for seed in (0, 1)]
    return started(config, device=META), groups


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        # Checks of log-ratios, KL and sigmas, and the fake policy's choice of its component.
        ({}, 4),
        # Both checks again for whole samples, and the sums of the normaliser.
        ({"correction": {"mode": "decoupled", "kappa_nats": 0.2}}, 7),
        (NFT, 2),
    ],
)
def test_a_micro_batch_reads_a_few_numbers_and_a_step_two(changes, read):
    engine, groups = on_meta(**changes)
    batches = [rows for group in groups for rows, _ in engine._loss.batches(group)]
    with Syncs() as accumulating:
        for group in groups:
            engine.accumulate(group, 0.1)
    assert accumulating.found == {"read": read * len(batches)}
    with Syncs() as stepping:
        engine.step()
    assert stepping.found == {"read": 1, "fetched": 1}, "the gradient's norm, and all metrics together"


def test_a_proximal_pass_fetches_the_rows_of_a_micro_batch_together():
    engine, [group, _] = on_meta(correction={"mode": "decoupled", "weights": "importance", "normalise": True})
    with Syncs() as passing:
        engine.recompute_proximal(group)
    assert passing.found["fetched"] == 2 * 2 + 2, "log-probs and KL of two micro-batches, and the group's drifts"
    assert passing.found["sent"] == 0
    with Syncs() as accumulating:
        engine.accumulate(group, 0.1)
    assert accumulating.found["sent"] == accumulating.found["fetched"] == 0

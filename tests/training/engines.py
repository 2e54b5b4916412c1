"""Makes configurations for the tiny policy, and engines of one rank: started, moved away from the weights that made the
samples, and inspected."""

from typing import Any

import torch
from torch import Tensor

from omni_async.config import with_spec
from omni_async.config.schema import Config
from omni_async.layout import ParallelLayout
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.weights.shards import whole
from tests.configs import build
from tests.fakes import TinyPolicy

CPU = torch.device("cpu")


def make_config(**changes: Any) -> Config:
    """Returns `make_config(**{"trainer.micro_batch_size": 3})`: dotted keys over small defaults."""
    defaults = {
        "model": {"pipeline": "qwen_image", "path": "0"},
        "rollout": {"group_size": 4, "sampling": {"height": 32, "width": 48}, "num_inference_steps": 5},
        "algorithm": {"clip_range": 0.2, "correction": {"mode": "bypass"}},
        "trainer": {"optimizer": {"lr": 1e-2, "max_grad_norm": None}},
    }
    return with_spec(build(defaults, changes))


def started(config: Config, policy: TinyPolicy | None = None) -> TrainEngine:
    engine = TrainEngine(config, policy or TinyPolicy(), ParallelLayout(), device=CPU)
    engine.setup()
    return engine


def nudge(engine: TrainEngine, seed: int = 7, size: float = 0.02) -> None:
    """Moves the weights away from those that made the samples, so that ratios are not 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in engine._model.trainable.values():
            p.add_(size * torch.randn(p.shape, generator=generator))


def train(engine: TrainEngine, groups: list[GroupBatch], grad_scale: float = 1.0) -> dict[str, float]:
    """Takes one optimizer step on the mean loss over all rows of transition groups."""
    rows = sum(len(t["steps"]) for g in groups for t in g.trajectories)
    for group in groups:
        engine.accumulate(group, 1 / rows)
    return engine.step(grad_scale)


def weights(engine: TrainEngine) -> Tensor:
    return torch.cat([p.detach().flatten() for p in engine._model.trainable.values()])


def gradients(engine: TrainEngine) -> dict[str, Tensor]:
    """Returns gradients by diffusers name, of the parameters that have one."""
    return {name: p.grad.clone() for name, p in engine._model.trainable.items() if p.grad is not None}


@torch.no_grad()
def log_probs(engine: TrainEngine, group: GroupBatch) -> Tensor:
    """Returns (samples, trained steps) of this rank's samples under the engine's weights; none that do not count."""
    found: dict[tuple[int, int], Tensor] = {}
    for rows, counts in engine._loss.batches(group):  # padding is computed, too: other ranks join in its collectives
        values = engine._loss._current(rows, group.spec)[1].cpu()
        found |= dict(zip(rows.row_ids, values.unbind(), strict=True)) if counts else {}
    if not found:
        return torch.empty(0, 0)
    return torch.stack([found[row_id] for row_id in sorted(found)]).reshape(len(group.trajectories), -1)


def auxiliary_of(engine: TrainEngine, which: str) -> dict[str, Tensor]:
    """Returns a further policy's tensors, whole, by the names of the parameters."""
    found = engine._model.auxiliary.tensors().items()
    return {name.removeprefix(f"{which}."): whole(t).clone() for name, t in found if name.startswith(f"{which}.")}


def stepped(engine: TrainEngine, grad_scale: float = 1.0) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Takes an optimizer step; returns its metrics, and the gradients that the optimizer was given."""
    seen: dict[str, Tensor] = {}
    hook = engine._model.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(engine)))
    metrics = engine.step(grad_scale)
    hook.remove()
    return metrics, seen


def assert_gradients(
    got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-5, atol: float = 2e-7
) -> None:
    """Asserts equal gradients of the same parameters. `expected` may be float64."""
    assert got.keys() == expected.keys()
    assert max(grad.abs().max().item() for grad in expected.values()) > 100 * atol
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad.float(), rtol=rtol, atol=atol)

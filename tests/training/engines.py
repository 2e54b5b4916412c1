"""Makes engines of one rank for tests: started, moved away from the weights that made the samples, and inspected."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.config.schema import Config
from omni_async.layout import ParallelLayout
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from tests.fakes import TinyPolicy

CPU = torch.device("cpu")


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

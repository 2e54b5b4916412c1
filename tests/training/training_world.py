"""Makes engines of the tiny policy, on one rank or several, and computes objectives row by row in float64."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.config import with_spec
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import Policy, load_policy
from omni_async.plugins.families import find_family
from omni_async.store import LocalStore
from omni_async.training.device import init_process_group
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.trained import TrainedWeights, Which
from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket
from omni_async.weights.shards import whole
from omni_async.weights.snapshot import SharedRows, Snapshot, fetch
from tests.support import ranks
from tests.support.configs import build
from tests.support.fakes import TinyPolicy, load_model, tiny_group, tiny_pair

CPU = torch.device("cpu")
LORA = {"rank": 2, "alpha": 4.0}
NFT = {"name": "diffusion_nft", "sde": None, "clip_range": None}
backends = pytest.mark.parametrize("backend", ["plain", "fsdp2"])
loras = pytest.mark.parametrize("lora", [None, LORA])

_SECTIONS = {
    "model": "lora dtype",
    "rollout": "sampling sde buckets group_size",
    "algorithm": "name clip_range kl_coef kl_form teacher correction awm dpo nft forward settings"
    " unconditional_gradient",
    "trainer": "backend workers ema steps_per_update",
    "weights": "payload",
}
SHORT = {key: f"{section}.{key}" for section, keys in _SECTIONS.items() for key in keys.split()} | {
    "size": "trainer.micro_batch_size",
    "checkpointing": "trainer.gradient_checkpointing",
    "optimizer": "trainer.optimizer.name",
    "lr": "trainer.optimizer.lr",
    "fraction": "algorithm.timestep_fraction",
    "cfg": "rollout.sampling.true_cfg_scale",
}


def make_config(**changes: Any) -> Config:
    """Returns small defaults, changed: `make_config(size=3, **{"trainer.updates": 2})`, by `SHORT` or dotted keys."""
    defaults = {
        "model": {"pipeline": "qwen_image", "path": "0"},
        "rollout": {"group_size": 4, "sampling": {"height": 32, "width": 48}, "num_inference_steps": 5},
        "algorithm": {"clip_range": 0.2, "correction": {"mode": "bypass"}},
        "trainer": {"optimizer": {"lr": 1e-2, "max_grad_norm": None}},
    }
    return with_spec(build(defaults, {SHORT.get(key, key): value for key, value in changes.items()}))


def policy_of(config: Config) -> Policy:
    """Returns the tiny policy, or that of the family's checkpoint that the configuration names."""
    path = config.model.path
    return TinyPolicy(path) if path.isdecimal() else load_policy(find_family(config.model.pipeline), path)


def started(config: Config, policy: Policy | None = None, rank: int = 0, device: torch.device = CPU) -> TrainEngine:
    engine = TrainEngine(config, policy or policy_of(config), ParallelLayout.of(config.trainer, rank), device=device)
    engine.setup()
    return engine


def engine(**changes: Any) -> TrainEngine:
    return started(make_config(**changes))


def nudge(engine: TrainEngine, size: float = 0.02) -> None:
    """Moves the weights away from those that made the samples, so that ratios are not 1."""
    move(engine._model.trainable.values(), size)


@torch.no_grad()
def move(parameters: Iterable[Tensor], size: float) -> None:
    generator = torch.Generator().manual_seed(7)
    for p in parameters:
        p.add_(size * torch.randn(p.shape, generator=generator))


def group_of(engine: TrainEngine, seed: int = 0, window: range = range(1, 3), **options: Any) -> GroupBatch:
    """Makes a group by the weights as they were loaded; of preferences a pair."""
    if engine.config.algorithm.name == "diffusion_dpo":
        return tiny_pair(engine.policy, engine.config, seed)
    return tiny_group(engine.policy, engine.config, seed, window, **options)


def moved(by: float = 0.05, **changes: Any) -> tuple[TrainEngine, list[GroupBatch]]:
    """Returns an engine, and two groups of stale samples, which other weights than its own have made."""
    engine = started(make_config(**changes))
    groups = [group_of(engine, seed, staleness=1) for seed in (0, 1)]
    nudge(engine, by)
    return engine, groups


def step_on(engine: TrainEngine, *groups: GroupBatch, grad_scale: float = 1.0) -> dict[str, float]:
    """Takes one optimizer step on the mean loss over all rows, and returns its metrics."""
    rows = sum(len(rows.advantage) for group in groups for rows, counts in engine._loss.batches(group) if counts)
    for group in groups:
        engine.accumulate(group, 1 / rows)
    return engine.step(grad_scale)


def update(engine: TrainEngine, seed: int = 0) -> dict[str, float]:
    return step_on(engine, group_of(engine, seed))


def updated(updates: int = 2, **changes: Any) -> TrainEngine:
    made = engine(**changes)
    for seed in range(updates):
        update(made, seed)
    return made


def trained(engine: TrainEngine, *groups: GroupBatch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Takes one optimizer step; returns its metrics, and the gradients that the optimizer was given."""
    seen: dict[str, Tensor] = {}
    with engine._model.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(engine))):
        return step_on(engine, *groups), seen


def weights(engine: TrainEngine) -> Tensor:
    return torch.cat([p.detach().flatten() for p in engine._model.trainable.values()])


def trainable(engine: TrainEngine) -> dict[str, Tensor]:
    """Returns the policy's trained parameters, whole."""
    return {name: whole(p).clone() for name, p in engine._model.trainable.items()}


def gradients(engine: TrainEngine) -> dict[str, Tensor]:
    """Returns gradients, whole, by diffusers name, of the parameters that have one."""
    return {name: whole(p.grad).clone() for name, p in engine._model.trainable.items() if p.grad is not None}


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


def auxiliaries(engine: TrainEngine) -> dict[str, Tensor]:
    """Returns the tensors of all further policies, whole."""
    return {name: whole(t).clone() for name, t in engine._model.auxiliary.tensors().items()}


def auxiliary_of(engine: TrainEngine, which: str) -> dict[str, Tensor]:
    """Returns a further policy's tensors, whole, by the names of the parameters."""
    return {n.removeprefix(f"{which}."): t for n, t in auxiliaries(engine).items() if n.startswith(f"{which}.")}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0, rtol: float = 0.0) -> None:
    """Asserts equal tensors of the same names. `expected` may be float64."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name].double(), tensor.double(), rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_gradients(
    got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-5, atol: float = 2e-7
) -> None:
    assert max(grad.abs().max().item() for grad in expected.values()) > 100 * atol
    assert_close(got, expected, atol, rtol)


def export(engine: TrainEngine, version: int) -> tuple[WeightManifest, list[Bucket]] | None:
    """Returns the whole version on rank 0, None elsewhere. Collective."""
    own = engine.snapshot(version, engine.bucket_set())
    mine = None if own is None else SharedRows(own.tensors, own.buckets)
    found: list[SharedRows | None] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    if engine.layout.rank > 0 or own is None:
        return None
    joined = asyncio.run(join(own, [rows for rows in found[1:] if rows is not None]))
    return joined.manifest(), joined.buckets


async def join(own: Snapshot, others: Sequence[SharedRows]) -> Snapshot:
    """Joins rank 0's rows with those of `others`, whose references are the buckets themselves."""

    async def sharing(rows: SharedRows) -> SharedRows:
        return rows

    return await replace(own, others=partial(fetch, LocalStore(), [sharing(rows) for rows in others])).whole()


def save(engine: TrainEngine, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writing, state = engine.begin_save(folder)
    writing.result()
    if engine.layout.rank == 0:
        (folder / "engine.json").write_text(json.dumps(state))


def load(engine: TrainEngine, folder: Path) -> None:
    engine.load(folder, json.loads((folder / "engine.json").read_text()))


def read_trained(folder: Path, policy: Which = "drawing") -> dict[str, Tensor]:
    """Returns what whoever does not train reads in a checkpoint, by the names of the parameters."""
    weights = TrainedWeights(folder, policy)
    return {f"{one}.{name}": value for one in weights.components for name, value in weights.read(one).items()}


def _run(rank: int, world: int, init_method: str, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    init_process_group(rank, world, init_method, timeout=120.0, device=CPU)
    return work(rank, *args)


def on_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns what `work(rank, *args)`, a function of a module, returns on each of `world` ranks."""
    return ranks.on_ranks(world, _run, work, args)


def model_of(engine: TrainEngine, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns a separate copy of the engine's model as it is."""
    model = load_model(engine.policy)
    model.load_state_dict(engine._model.components.state_dict())
    return model.to(dtype)


def gradients_of(losses: Sequence[Tensor] | Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Returns gradients of the losses' mean, of the parameters that have one, as an engine reports them."""
    parameters = dict(model.named_parameters())
    loss = losses if isinstance(losses, Tensor) else torch.stack(list(losses)).mean()
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


def assert_trains(
    engine: TrainEngine,
    groups: Sequence[GroupBatch],
    losses: Callable[[list[Step]], Sequence[Tensor] | Tensor],
    positions: list[list[int]] | None = None,
    **tolerances: float,
) -> dict[str, float]:
    """Takes an optimizer step, and compares its gradients with those of the (mean) loss of all steps before it."""
    model = model_of(engine)
    steps = [step for group in groups for step in steps_of(model, engine.config, group, positions)]
    expected = gradients_of(losses(steps), model)
    metrics, got = trained(engine, *groups)
    assert_gradients(got, expected, **tolerances)
    return metrics


@dataclass(frozen=True)
class Step:
    """A trained denoising step under some model: its mean log-prob, with gradient, and its Gaussian."""

    sample: int
    position: int
    log_prob: Tensor
    mean: Tensor
    std: float
    scale: float
    recorded: float
    advantage: float
    staleness: int
    elements: int
    kappa: float
    """D <(mean - recorded mean)^2> / (2 scale^2), in nats."""

    @property
    def ratio(self) -> Tensor:
        """Returns the ratio of mean densities to what was recorded."""
        return (self.log_prob - self.recorded).exp()

    @property
    def nats(self) -> float:
        """Returns the log-ratio of the model to the recorded log-prob."""
        return self.elements * (self.log_prob.item() - self.recorded)


def steps_of(
    model: nn.Module, config: Config, group: GroupBatch, positions: list[list[int]] | None = None
) -> Iterator[Step]:
    """Yields Flow-GRPO's transition of every step of the samples, or of those at their `positions` of the window."""
    r = config.rollout
    dtype = next(model.parameters()).dtype
    assert r.sde is not None and r.sde.kind == "flow"
    for sample, t in enumerate(group.trajectories):
        sigmas = t["sigmas"].to(dtype)
        for k in range(len(t["steps"])) if positions is None else positions[sample]:
            i = int(t["steps"][k])
            x, x_next = t["latents"][k].to(dtype), t["latents"][k + 1].to(dtype)
            v = guided(model, config, t, x, sigmas[i])
            s, h = sigmas[i].item(), (sigmas[i] - sigmas[i + 1]).item()
            g2 = r.sde.noise_level**2 * s / (1 - (sigmas[1].item() if s == 1 else s))
            scale = math.sqrt(g2 * h)
            mean = x * (1 - g2 / (2 * s) * h) - v * (1 + g2 * (1 - s) / (2 * s)) * h
            log_prob = -(x_next - mean).square().mean() / (2 * scale**2) - math.log(scale) - 0.5 * math.log(2 * math.pi)
            yield Step(
                sample=sample,
                position=k,
                log_prob=log_prob,
                mean=mean,
                std=math.sqrt(g2),
                scale=scale,
                recorded=t["log_probs"][k].item(),
                advantage=group.advantages[sample],
                staleness=group.staleness[sample][k],
                elements=x.numel(),
                kappa=((mean.detach() - t["means"][k]).square().sum() / (2 * scale**2)).item(),
            )


def guided(model: nn.Module, config: Config, sample: TensorDict, x: Tensor, sigma: Tensor) -> Tensor:
    """Returns the velocity (T, C) of one row, with classifier-free guidance written out."""
    scale = config.rollout.sampling.true_cfg_scale
    conditioning = TinyPolicy().stack_conditioning([sample["conditioning"]])
    text, mask = conditioning["text"].to(x.dtype), conditioning["mask"]
    v = model["transformer"](x[None], sigma[None], text, mask)
    if scale > 1:
        uncond = model["transformer"](x[None], sigma[None], torch.zeros_like(text), mask)
        uncond = uncond if config.algorithm.unconditional_gradient else uncond.detach()
        v = uncond + scale * (v - uncond)
    return v[0]


def surrogate(ratio: Tensor, advantage: float, clip: float = 0.2) -> Tensor:
    """Computes PPO's clipped loss of one row."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))

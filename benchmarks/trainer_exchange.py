"""Counts the data exchanged by trainer ranks in an update, and times checkpoint copies, before and after changes."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# First of all: importing omni_async makes torchvision importable with a CPU build of torch.
import omni_async  # noqa: F401  # isort: skip
import torch
from tensordict import TensorDict
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.arguments import command_parser
from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.ranks import on_ranks
from omni_async.config import load
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import find_family
from omni_async.training.checkpoint import begin_save, build_stager
from omni_async.training.device import init_process_group
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch

_HELP = """\
Train one update of a tiny guided Qwen-Image on ranks of FSDP2 (CPU, gloo), and count the exchanges of one rank for
each layout. Then copy the state of a checkpoint four times, into new memory and into memory that stays.

  python -m benchmarks.trainer_exchange                   # two ranks: a minute
  python -m benchmarks.trainer_exchange --ranks 4

Prints per layout the micro-batches, gathers, reductions, and bytes that the rank receives in gathers. Exit codes: 0 if
all layouts have the gradient norm of the first of their kind, 1 if one has not, 2 wrong usage.
"""
_TIMEOUT_S = 600.0
_GROUPS, _SAMPLES, _WINDOW = 4, 4, 2
_LORA = ("model.lora.rank=4", "model.lora.alpha=8")
_LAYOUTS: dict[str, tuple[str, ...]] = {
    "full": (),
    "full, gather: step": ("trainer.gather=step",),
    "full, 2 groups per micro-batch": ("trainer.groups_per_micro_batch=2", "trainer.micro_batch_size=8"),
    "full, both": ("trainer.gather=step", "trainer.groups_per_micro_batch=2", "trainer.micro_batch_size=8"),
    "lora": _LORA,
    "lora, gather: step": (*_LORA, "trainer.gather=step"),
    "lora, shard: 1": (*_LORA, "trainer.shard=1"),
}


class Found(NamedTuple):
    """The work of one rank for the gradients of an update."""

    micro_batches: int
    gathers: int
    reductions: int
    gathered_bytes: int
    norm: float


class Collectives(TorchDispatchMode):
    """A counter of collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathers = self.reductions = self.gathered_bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(op)
        if name.startswith("c10d._allgather_base_"):
            self.gathers += 1
            self.gathered_bytes += args[0].nbytes - args[1].nbytes
        elif name.startswith(("c10d._reduce_scatter_base_", "c10d.allreduce_")):
            self.reductions += 1
        return op(*args, **(kwargs or {}))


def config_of(path: str, ranks: int, overrides: Sequence[str]) -> Config:
    """Return the quickstart's recipe for the checkpoint at `path`, guided and on so many ranks."""
    own = (
        *(f"model.path={path}", f"trainer.workers={ranks}", f"rollout.group_size={_SAMPLES}"),
        *(f"trainer.groups_per_update={_GROUPS}", "trainer.micro_batch_size=4", "rollout.sampling.true_cfg_scale=4"),
        *(f"rollout.sde.window.size={_WINDOW}", "trainer.optimizer.max_grad_norm=null"),
    )
    return load("recipes/quickstart/quickstart.yaml", [*own, *overrides])


def group_of(engine: TrainEngine, number: int) -> GroupBatch:
    """Return this rank's share of a random group."""
    policy, rollout = engine.policy, engine.config.rollout
    spec, generator = rollout.sampling, torch.Generator().manual_seed(number)
    shape, dealt = policy.latent_shape(spec), engine.layout.dealt(_SAMPLES, number * _SAMPLES)

    def trajectory() -> TensorDict:
        x = torch.randn(1, *shape, generator=generator)
        moved = [x + 0.3 * k * torch.randn(1, *shape, generator=generator) for k in range(_WINDOW + 1)]
        return TensorDict(
            {
                "latents": torch.cat(moved),
                "log_probs": torch.zeros(_WINDOW).double(),
                "sigmas": policy.sigmas(rollout.num_inference_steps, spec).cpu(),
                "steps": torch.arange(1, _WINDOW + 1),
                "conditioning": policy.blank_conditioning(spec),
            },
            batch_size=[],
        )

    samples = [trajectory() for _ in range(_SAMPLES)]
    advantages = [1.0, -0.5, 0.25, -0.75]
    return GroupBatch(
        group=number,
        spec=spec,
        trajectories=[samples[i] for i in dealt],
        advantages=[advantages[i] for i in dealt],
        seeds=[*dealt],
        staleness=[[0] * _WINDOW for _ in dealt],
        size=_SAMPLES,
    )


def work(rank: int, ranks: int, init_method: str, configs: dict[str, Config]) -> dict[str, Found]:
    init_process_group(rank, ranks, init_method, _TIMEOUT_S, torch.device("cpu"))
    found = {}
    for name, config in configs.items():
        policy = load_policy(find_family(config.model.pipeline), config.model.path)
        engine = TrainEngine(config, policy, ParallelLayout.of(config.trainer, rank), torch.device("cpu"))
        engine.setup()
        batches = 0
        backward = engine._model.backward

        def counted(*args: Any, backward: Any = backward) -> None:
            nonlocal batches
            batches += 1
            backward(*args)

        setattr(engine._model, "backward", counted)  # noqa: B010 - a Protocol's method
        with Collectives() as seen:
            for number in range(_GROUPS):
                engine.accumulate(group_of(engine, number), 1 / (_GROUPS * _SAMPLES * _WINDOW))
        norm = engine.step()["grad_norm"]
        found[name] = Found(batches, seen.gathers, seen.reductions, seen.gathered_bytes, norm)
    return found


def copy_checkpoints(stager: AsyncStager, parameters: dict[str, Any], optimizer: Any) -> list[tuple[float, int]]:
    """Return the seconds of four copies of a checkpoint's tensors, and the bytes of memory first touched by each."""
    laps = []
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            faults, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            saving = begin_save(Path(folder), parameters, {}, optimizer, None, stager)  # type: ignore[arg-type]
            seconds = time.perf_counter() - started
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            saving.result()
        laps.append((seconds, faults * resource.getpagesize()))
    return laps


def staging() -> None:
    parameters = {f"transformer.{i}": torch.nn.Parameter(torch.ones(4_000_000)) for i in range(10)}
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    nbytes = 3 * sum(parameter.nbytes for parameter in parameters.values())
    source = torch.ones(nbytes // 4)
    into = source.clone()
    started = time.perf_counter()
    into.copy_(source)
    rate = nbytes / (time.perf_counter() - started)
    _write(
        f"\ncopies of a checkpoint of {nbytes / 1e6:.0f} MB; a copy into memory that is there: {rate / 1e9:.1f} GB/s"
    )
    for name, stager in (
        ("new memory", BlockingAsyncStager()),
        ("memory that stays", build_stager(torch.device("cpu"))),
    ):
        laps = copy_checkpoints(stager, parameters, optimizer)[1:]
        seconds = sorted(seconds for seconds, _ in laps)[1]
        fresh = max(touched for _, touched in laps)
        own = nbytes / seconds
        _write(f"{name:18} {own / 1e9:5.1f} GB/s, {own / rate:4.0%} of it, {fresh / 1e6:.0f} MB new")


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("trainer_exchange", _HELP)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="trainer ranks (default: %(default)d)")
    options = parser.parse_args(arguments)
    if options.ranks not in (2, 4):
        parser.error(f"--ranks: expected 2 or 4, which divide a group of {_SAMPLES}, got {options.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_checkpoint("qwen_image", Path(folder) / "model")
        configs = {name: config_of(path, options.ranks, overrides) for name, overrides in _LAYOUTS.items()}
        found = on_ranks(options.ranks, work, configs)[0]
    same = True
    _write(f"{'layout':32} micro-batches  gathers  reductions  MB gathered  of the first")
    for name, its in found.items():
        first = found[name.split(",")[0]]
        same &= abs(its.norm - first.norm) <= 1e-4 * first.norm
        share = its.gathered_bytes / first.gathered_bytes
        _write(
            f"{name:32} {its.micro_batches:13} {its.gathers:8} {its.reductions:11} {its.gathered_bytes / 1e6:12.2f}"
            f" {share:13.3f}"
        )
    staging()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

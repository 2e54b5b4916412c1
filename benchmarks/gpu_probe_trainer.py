"""Measures the trainer's work at published size: a rank's `TrainEngine` with LoRA, and optimizer steps alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from benchmarks.gpu_probe_bench import STEPS, Bench
from benchmarks.gpu_probe_run import Report, Settings
from benchmarks.stage_profile import RECIPE
from omni_async.config import Config, load
from omni_async.config.layout import ParallelLayout
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch

_WINDOW = (1, 2)  # the trained steps of every sample


def trainer(settings: Settings, report: Report) -> None:
    """Report micro-batches of two sizes with their proximal pass, the optimizer's step, the export and its digest."""
    bench = Bench(settings, report)
    most = 4 if bench.small else 8
    engine = TrainEngine(_config(bench, most), bench.policy, ParallelLayout(), bench.device)
    try:
        seconds, gib = bench.once(engine.setup)
        bench.note("set-up, with the weights' digest", seconds=seconds, gib=gib)
        _micro_batch(bench, engine, most // 2)
        seconds, gib = bench.once(engine.step)
        bench.note("optimizer step of the adapters", seconds=seconds, gib=gib)
        _export(bench, engine)
        with bench.arm(f"micro-batch of {most} guided rows"):
            _micro_batch(bench, engine, most)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _export(bench: Bench, engine: TrainEngine) -> None:
    buckets = engine.bucket_set()
    engine.snapshot(1, buckets)  # the first one allocates its memory
    seconds, gib = bench.once(lambda: engine.snapshot(2, buckets))
    snapshot = engine.snapshot(3, buckets)
    assert snapshot is not None  # rank 0 has it
    gigabytes = sum(bucket.nbytes for bucket in snapshot.buckets) / 1e9
    bench.note("export of the adapters", seconds=seconds, gigabytes=gigabytes, gb_per_s=gigabytes / seconds, gib=gib)
    seconds, _ = bench.once(snapshot.manifest)
    bench.note("digest of the export", seconds=seconds, gb_per_s=gigabytes / seconds)


def _config(bench: Bench, most: int) -> Config:
    """Return the full-size recipe on one rank of FSDP2; a group of samples is one micro-batch."""
    overrides: dict[str, Any] = {
        "rollout.sampling.height": bench.spec.height,
        "rollout.sampling.width": bench.spec.width,
        "rollout.num_inference_steps": STEPS,
        "rollout.group_size": most // len(_WINDOW),
        "algorithm.correction.mode": "none",  # random log-probs would make ratios without bound
        "trainer.backend": "fsdp2",
        "trainer.workers": 1,
        "trainer.micro_batch_size": most,
    }
    return load(RECIPE, [f"{key}={value}" for key, value in overrides.items()])


def _micro_batch(bench: Bench, engine: TrainEngine, rows: int) -> None:
    group = _group(bench, engine.config, rows)
    seconds, gib = bench.time(lambda: engine.recompute_proximal(group), repeats=2)
    bench.note(f"proximal log-probs of {rows} guided rows", seconds=seconds, gib=gib)
    engine.operations()
    count = 3
    seconds, gib = bench.time(lambda: engine.accumulate(group, 1.0 / rows), repeats=count - 1)
    flops = engine.operations()["flops/sum"] / count
    bench.note(f"micro-batch of {rows} guided rows", seconds=seconds, **bench.rates(flops, seconds), gib=gib)


def _group(bench: Bench, config: Config, rows: int) -> GroupBatch:
    """Return random samples of two trained steps each, on the CPU as samples arrive."""
    samples = rows // len(_WINDOW)

    def sample() -> TensorDict:
        latents = torch.stack([bench.latents(1)[0] for _ in range(len(_WINDOW) + 1)])
        tensors = {
            "latents": latents,
            "log_probs": torch.full((len(_WINDOW),), -1.0, dtype=torch.float64),
            "sigmas": bench.sigmas,
            "steps": torch.tensor(_WINDOW),
            "conditioning": bench.conditioning(1)[0],
        }
        return TensorDict(tensors, batch_size=[]).cpu()

    return GroupBatch(
        group=0,
        spec=config.rollout.sampling,
        trajectories=[sample() for _ in range(samples)],
        advantages=[1.0 if i % 2 else -1.0 for i in range(samples)],
        seeds=range(samples),
        staleness=[[0] * len(_WINDOW)] * samples,
        size=samples,
    )


def optimizer(settings: Settings, report: Report) -> None:
    """Report an AdamW step over a rank's share of all weights (of 8 ranks), foreach and fused, and its cost.

    over_gib: additional memory of the step, beyond weights, gradients and moments."""
    bench = Bench(settings, report)
    count, shape = (4, (64, 64)) if bench.small else (68, (12288, 3072))
    for way in ("foreach", "fused"):
        with bench.arm(f"AdamW, {way}"):
            parameters = [nn.Parameter(torch.zeros(shape, device=bench.device)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1e-3)
            step = torch.optim.AdamW(parameters, lr=1e-4, **{way: True}).step  # type: ignore[arg-type]
            seconds, gib = bench.time(step)
            held = 4 * sum(parameter.nbytes for parameter in parameters) / 2**30
            bench.note(
                f"AdamW, {way}",
                billion_parameters=sum(parameter.numel() for parameter in parameters) / 1e9,
                seconds=seconds,
                gib=gib,
                over_gib=None if gib is None else gib - held,
            )
            del parameters, parameter, step

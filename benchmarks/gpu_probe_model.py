"""Measures the engine's work at published size: guided denoising steps, their launches, and decoding."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.gpu_probe_bench import Bench
from benchmarks.gpu_probe_run import Report, Settings
from omni_async.diffusion.components import compute_velocity
from omni_async.training.flops import FlopMeter
from omni_async.training.model import repeated_layers

Step = Callable[[], Tensor]


@torch.no_grad()
def steps(settings: Settings, report: Report) -> None:
    """Report guided steps of several batch sizes, eager and then compiled, and the host's time to launch one."""
    bench = Bench(settings, report)
    components = bench.load_denoiser()
    [transformer] = components.values()
    bench.note("transformer", billion_parameters=sum(p.numel() for p in transformer.parameters()) / 1e9)
    meter = FlopMeter(components, backward=0, compiled=True)
    for way in ("eager", "compiled"):
        if way == "compiled":
            compile_blocks(bench, transformer)
        for rows in bench.rows:
            with bench.arm(f"{way}, {rows} rows"):
                _step(bench, meter, f"{way}, {rows} rows", guided_step(bench, components, rows, 4.0))
        for rows in (bench.rows[0], bench.rows[-1]):
            with bench.arm(f"{way}, launch of one pass, {rows} rows"):
                _launch(bench, f"{way}, launch of one pass, {rows} rows", guided_step(bench, components, rows, 1.0))
    if bench.device.type == "cuda":
        bench.note("a guided step", host_waits=_host_waits(guided_step(bench, components, bench.rows[-1], 4.0)))


def guided_step(bench: Bench, components: dict[str, nn.Module], rows: int, scale: float) -> Step:
    """Return a function that computes the velocity of so many rows at the third sigma, as an engine does."""
    latents, conditioning = bench.latents(rows), bench.conditioning(rows)
    sigma, spec, needs = bench.sigmas[2].expand(rows).to(bench.device), bench.guided_by(scale), [*components] * rows
    return lambda: compute_velocity(bench.policy, components, latents, sigma, conditioning, spec, needs)


def compile_blocks(bench: Bench, transformer: nn.Module) -> None:
    """Compile the repeated blocks at their first call; a CPU only traces them, which saves seconds."""
    for block in repeated_layers(transformer):
        block.compile(backend="inductor" if bench.accelerated else "eager")


def _step(bench: Bench, meter: FlopMeter, name: str, step: Step) -> None:
    meter.take()
    began, graphs = time.perf_counter(), _graphs()
    step()
    bench.synchronize()
    first, flops = time.perf_counter() - began, meter.take()
    seconds, gib = bench.time(step)
    compiled = {"first_seconds": first, "graphs": _graphs() - graphs} if _graphs() else {}
    bench.note(name, seconds=seconds, **bench.rates(flops, seconds), gib=gib, **compiled)


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def _launch(bench: Bench, name: str, one_pass: Step) -> None:
    """Report the seconds until an unguided pass is launched, and until it is done: launch-bound if they are close."""
    one_pass()
    bench.synchronize()
    began = time.perf_counter()
    one_pass()
    launched = time.perf_counter() - began
    bench.synchronize()
    bench.note(name, host_seconds=launched, seconds=time.perf_counter() - began)


def _host_waits(step: Step) -> int:
    """Count how often the host waits for the device in a step."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


@torch.no_grad()
def vae(settings: Settings, report: Report) -> None:
    """Report the decoding of one image, and of as many as an engine finishes together, through the family's codec."""
    bench = Bench(settings, report)
    codec = bench.policy.load_codec(torch.bfloat16)
    for rows in sorted({1, bench.rows[0]}):
        with bench.arm(f"decode {rows}"):
            latents = bench.latents(rows)
            seconds, gib = bench.time(lambda latents=latents: codec.decode(latents, bench.spec))  # type: ignore[misc]
            bench.note(f"decode {rows}", seconds=seconds, gib=gib)

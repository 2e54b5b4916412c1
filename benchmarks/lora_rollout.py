"""Measures a real engine's speed with the base's weights, with merged adapters, and with unmerged adapters.

In the last arm every adapted layer also computes B(A(x)), as peft does. Base and merged are one engine, which receives
a full payload and a LoRA payload in turns. The unmerged arm is an engine of the same kind; peft added the same adapters
to its denoisers. All arms generate the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# First of all: importing omni_async makes torchvision importable with a CPU build of torch.
import omni_async  # noqa: F401  # isort: skip
import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.arguments import asked, benchmark_parser, write_json
from benchmarks.checkpoints import tiny_checkpoint
from omni_async.commands.bench.result import Machine, Spread, describe_machine, spread
from omni_async.config.schema import Lora
from omni_async.diffusion.components import named_parameters
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import PipelineFamily, find_family
from omni_async.rollout.base import RolloutEngine
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.training.auxiliary import add_adapters
from omni_async.types import Prompt, SampleRequest, WeightManifest
from omni_async.weights.buckets import BucketSet
from omni_async.weights.digest import digest
from omni_async.weights.lora import diffusers_name, is_injected_adapter

_HELP = """\
Denoising steps per second with merged and with unmerged adapters, of the base's, on random checkpoints of the families'
architectures, made on the spot.

  python -m benchmarks.lora_rollout                                    # every family, with diffusers: some minutes
  python -m benchmarks.lora_rollout qwen_image --engine vllm_omni      # without the unmerged arm

OUT gets results.json; the table is printed. Exit codes: 0 merged adapters draw at least 0.95 times as fast as the base
by processor seconds, and merged and unmerged samples agree; 1 they do not; 2 wrong usage.
"""
_LEAST = 0.95
_AGREE = 1e-2  # relative to the samples' largest latent
# Features of a head in the family's builder, and samples with some two hundred tokens.
_FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "qwen_image": (24, {"height": 256, "width": 256}),
    "qwen_image_edit": (24, {"height": 256, "width": 256}),
    "stable_diffusion_3": (16, {"height": 256, "width": 256}),
    "flux": (16, {"height": 256, "width": 256}),
    "z_image": (16, {"height": 256, "width": 256, "guidance_scale": 0.0}),
    "wan2_2": (12, {"height": 96, "width": 160, "num_frames": 9}),
    "hunyuan_video_15": (16, {"height": 96, "width": 160, "num_frames": 9}),
    "ltx_2": (32, {"height": 256, "width": 256, "num_frames": 17}),
}


class Record(msgspec.Struct, frozen=True):
    """One measurement of one arm. `processor_s`: of this process, with all its threads."""

    family: str
    arm: str
    repeat: int
    steps: int
    seconds: float
    processor_s: float


class Results(msgspec.Struct, frozen=True):
    """All results. `differences`: between merged and unmerged samples, by family, relative to the largest latent."""

    machine: Machine
    settings: dict[str, Any]
    differences: dict[str, float]
    records: list[Record]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    options.out.mkdir(parents=True, exist_ok=True)
    records: list[Record] = []
    differences: dict[str, float] = {}
    for name in options.families:
        console.print(f"{name}: building and starting", markup=False, highlight=False)
        with tempfile.TemporaryDirectory(prefix="lora-rollout-", dir=options.out) as folder:
            made, difference = asyncio.run(_measure(find_family(name), Path(folder), options))
        records += made
        differences |= {} if difference is None else {name: difference}
    results = Results(describe_machine(), asked(options), differences, records)
    path = write_json(options.out / "results.json", results)
    console.print(str(results.machine), markup=False, highlight=False)
    console.print(_table(records, options.families))
    console.print(f"merged against unmerged samples: {differences}; written: {path}", markup=False, highlight=False)
    ratios = [_ratio(records, family, "merged", "processor_s") for family in options.families]
    fast = all(ratio is not None and ratio.median >= _LEAST for ratio in ratios)
    return 0 if fast and all(difference <= _AGREE for difference in differences.values()) else 1


async def _measure(
    family: PipelineFamily, folder: Path, options: argparse.Namespace
) -> tuple[list[Record], float | None]:
    """Run the arms in turns; return their measurements, and the distance of merged from unmerged samples."""
    head, sampling = _FAMILIES[family.name]
    path = tiny_checkpoint(family.name, folder, layers=options.layers, heads=options.width // head)
    policy = load_policy(family, path)
    lora = Lora(rank=options.rank, alpha=2.0 * options.rank)
    base = {name: p.detach() for name, p in named_parameters(policy.load_components(torch.float32))}
    adapted = nn.ModuleDict(policy.load_components(torch.float32))
    add_adapters(adapted, lora, seed=0)
    adapters = _drawn_adapters(adapted)
    payloads = {"base": _pack("full", base.items(), None), "merged": _pack("lora", adapters.items(), lora)}
    engines = {"base": _engine(family, path, options)}
    engines["merged"] = engines["base"]
    if options.engine == "diffusers":
        of_adapted: Any = load_policy(family, path)
        of_adapted.load_components = lambda dtype: dict(adapted.items())
        engines["unmerged"] = DiffusersEngine(
            "unmerged", of_adapted, dtype=torch.float32, max_batch=options.batch, device=options.device
        )
    spec = msgspec.convert(sampling, family.sampling)
    records: list[Record] = []
    versions = 0
    difference = None
    for engine in {id(e): e for e in engines.values()}.values():
        await engine.start()
    try:
        for repeat in range(-1, options.repeats):  # the first round warms up, and its samples are compared
            first: dict[str, torch.Tensor] = {}
            turn = repeat % len(engines)
            for arm in [*engines][turn:] + [*engines][:turn]:
                if arm in payloads:
                    versions += 1
                    manifest, buckets = payloads[arm]
                    await engines[arm].stage(msgspec.structs.replace(manifest, version=versions), buckets)
                    await engines[arm].swap(versions)
                requests = [_request(f"{arm}.{repeat}.{i}", i, spec, options.steps) for i in range(options.batch)]
                started, processor = time.perf_counter(), time.process_time()
                made = await asyncio.gather(*[engines[arm].generate(request) for request in requests])
                seconds, processor = time.perf_counter() - started, time.process_time() - processor
                first[arm] = made[0].tensors["final"]
                if repeat >= 0:
                    steps = options.batch * options.steps
                    records.append(Record(family.name, arm, repeat, steps, seconds, processor))
            if repeat < 0 and "unmerged" in first:
                apart = (first["merged"] - first["unmerged"]).abs().max() / first["base"].abs().max()
                difference = apart.item()
    finally:
        for engine in {id(e): e for e in engines.values()}.values():
            await engine.close()
    return records, difference


def _engine(family: PipelineFamily, path: str, options: argparse.Namespace) -> RolloutEngine:
    if options.engine == "diffusers":
        policy = load_policy(family, path)
        return DiffusersEngine("merged", policy, dtype=torch.float32, max_batch=options.batch, device=options.device)
    from omni_async.rollout.vllm_omni_engine import VllmOmniEngine

    return VllmOmniEngine("merged", family, path=path, dtype="float32", max_batch=options.batch)


@torch.no_grad()
def _drawn_adapters(adapted: nn.Module) -> dict[str, torch.Tensor]:
    """Sample the adapters' matrices, as small as training leaves them, and return them by diffusers names."""
    torch.manual_seed(1)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in adapted.named_parameters():
        if is_injected_adapter(name):
            nn.init.normal_(parameter, std=0.01)
            found[diffusers_name(name)] = parameter
    return found


def _pack(
    payload: Any, tensors: Iterable[tuple[str, torch.Tensor]], lora: Lora | None
) -> tuple[WeightManifest, list[Any]]:
    packed = BucketSet(64 * 2**20)
    packed.fill(tensors)
    about = None if lora is None else {"rank": lora.rank, "alpha": lora.alpha}
    return WeightManifest(1, payload, digest(packed.specs, packed.buckets), packed.specs, about), packed.buckets


def _request(sample: str, seed: int, spec: Any, steps: int) -> SampleRequest:
    return SampleRequest(
        sample_id=sample,
        kind="validation",
        group=0,
        sample=seed,
        prompt=Prompt(0, "the digit 7"),
        seed=seed,
        spec=spec,
        num_inference_steps=steps,
        noise_level=0.0,
        sde_kind="flow",
        window=None,
        fields=("final",),
    )


def _ratio(records: Sequence[Record], family: str, arm: str, of: str) -> Spread | None:
    """Return the speed of an arm relative to the base, by repeat."""
    times = {(r.arm, r.repeat): getattr(r, of) for r in records if r.family == family}
    found = [times["base", repeat] / time for (one, repeat), time in times.items() if one == arm]
    return spread(found) if found else None


def _table(records: Sequence[Record], families: Sequence[str]) -> Table:
    table = Table(
        "family", "base, steps/s", "merged / base", "by processor s", "unmerged / base", "by processor s",
        title="Denoising steps of samples per second: median (quartiles) of ratios within a repeat",
    )  # fmt: skip
    for family in families:
        base = spread([r.steps / r.seconds for r in records if r.family == family and r.arm == "base"])
        cells = [
            _ratio(records, family, arm, of) for arm in ("merged", "unmerged") for of in ("seconds", "processor_s")
        ]
        table.add_row(family, f"{base.median:.3g}", *map(_text, cells))
    return table


def _text(value: Spread | None) -> str:
    return "–" if value is None else f"{value.median:.3f} ({value.low:.3f} to {value.high:.3f})"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("lora_rollout", _HELP)
    add = parser.add_argument
    add("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(_FAMILIES)} (default: all)")
    add("--engine", choices=("diffusers", "vllm_omni"), default="diffusers", help="(default: diffusers)")
    add("--device", default="cpu", help="of the diffusers engine (default: cpu)")
    add("--width", type=int, default=768, metavar="N", help="features of the denoisers (default: 768)")
    add("--layers", type=int, default=2, metavar="N", help="of the denoisers (default: 2)")
    add("--rank", type=int, default=32, metavar="N", help="of the adapters (default: 32)")
    add("--batch", type=int, default=2, metavar="N", help="samples of a draw (default: 2)")
    add("--steps", type=int, default=6, metavar="N", help="denoising steps of a sample (default: 6)")
    add("--repeats", type=int, default=5, metavar="N", help="rounds (default: 5)")
    add("--threads", type=int, default=1, metavar="N", help="of torch (default: 1)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.families if name not in _FAMILIES]:
        parser.error(f"no family is called {unknown[0]!r}; there are {', '.join(_FAMILIES)}")
    least = {"width": 96, "layers": 1, "rank": 1, "batch": 1, "steps": 2, "repeats": 1, "threads": 1}
    for name, bound in least.items():
        if getattr(options, name) < bound:
            parser.error(f"--{name}: expected at least {bound}")
    if options.width % 96:  # the heads of all families
        parser.error("--width: expected a multiple of 96")
    options.families = options.families or [*_FAMILIES]
    if options.engine == "vllm_omni" and len(options.families) > 1:
        parser.error("--engine vllm_omni: expected one family, since a process has one such engine")
    return options


if __name__ == "__main__":
    sys.exit(main())

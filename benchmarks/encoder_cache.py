"""Measures the savings of an engine that keeps encoded prompts.

A real diffusers engine generates the groups and validation rounds of a run, for several epochs of its prompts. Three
engines generate the same samples in turns:
- with the default `rollout.conditioning_cache`;
- with the smallest cache, for a single prompt, so that only consecutive samples share it;
- without a cache (built here): it encodes the prompt of every sample.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

# First of all: importing omni_async makes torchvision importable with a CPU build of torch.
import omni_async  # noqa: F401  # isort: skip
import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import asked, benchmark_parser, write_json
from benchmarks.checkpoints import tiny_checkpoint
from omni_async.commands.bench.result import Machine, describe_machine, spread
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import find_family
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.rollout.stepping import ConditioningCache
from omni_async.types import Prompt, SampleRequest

_HELP = """\
Samples per second and calls of the text encoder with and without encoded prompts that are kept, on a random Qwen-Image.

  python -m benchmarks.encoder_cache                  # 4 groups of 8 an update, 16 prompts, 3 epochs, validation
  python -m benchmarks.encoder_cache --hidden 1024    # a text encoder that takes longer than the denoiser

OUT gets results.json; the table is printed. Exit codes: 0 the default encodes every prompt once and is the fastest arm
by processor seconds; 1 it does not, or is not; 2 wrong usage.
"""
ARMS = {"kept (default)": 512 * 2**20, "one prompt stays": 1024, "nothing stays": 0}


class Forgetful(ConditioningCache):
    """A cache that keeps nothing."""

    def of(self, request: SampleRequest) -> Any:
        self.kept.clear()
        return super().of(request)


class Record(msgspec.Struct, frozen=True):
    """The samples of one arm for one update, or for one validation round. `new`: prompts not used before."""

    arm: str
    update: int
    validation: bool
    samples: int
    new: int
    calls: int
    seconds: float
    processor_s: float


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    settings: dict[str, Any]
    records: list[Record]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    torch.set_num_threads(1)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="encoder-cache-", dir=options.out) as folder:
        records = asyncio.run(_measure(Path(folder), options))
    results = Results(describe_machine(), asked(options), records)
    path = write_json(options.out / "results.json", results)
    console.print(str(results.machine), markup=False, highlight=False)
    console.print(_table(records))
    console.print(f"written: {path}", markup=False, highlight=False)
    of_arm = {arm: [r for r in records if r.arm == arm] for arm in ARMS}
    kept, *others = (sum(r.processor_s for r in found) for found in of_arm.values())
    exact = all(r.calls == r.new for r in of_arm[next(iter(ARMS))])
    return 0 if exact and kept < min(others) else 1


async def _measure(folder: Path, options: argparse.Namespace) -> list[Record]:
    """Generate every update's samples with one engine after the other."""
    policy = load_policy(find_family("qwen_image"), tiny_checkpoint("qwen_image", folder, hidden=options.hidden))
    engines = {
        arm: DiffusersEngine(
            arm, policy, dtype=torch.float32, max_batch=2 * options.group_size, device="cpu", conditioning_bytes=most
        )
        for arm, most in ARMS.items()
    }
    for engine in engines.values():
        await engine.start()
    engines["nothing stays"]._conditioning = Forgetful(engines["nothing stays"]._codec)
    records = []
    drawn: set[str] = set()
    order = [*engines]
    for number, (update, validation, requests) in enumerate(_requests(options)):
        new = {request.prompt.text for request in requests} - drawn
        drawn |= new
        for arm in order[number % 3 :] + order[: number % 3]:
            started, processor = time.perf_counter(), time.process_time()
            made = await asyncio.gather(*[engines[arm].generate(request) for request in requests])
            seconds, processor = time.perf_counter() - started, time.process_time() - processor
            calls = sum(one.encoded for one in made)
            records.append(Record(arm, update, validation, len(made), len(new), calls, seconds, processor))
    for engine in engines.values():
        await engine.close()
    return records


def _requests(options: argparse.Namespace) -> Iterator[tuple[int, bool, list[SampleRequest]]]:
    """Yield the samples of a run: the update's number, whether it is a validation round after it, and the samples."""
    spec = find_family("qwen_image").sampling(height=64, width=64)

    def request(sample: str, prompt: Prompt, seed: int) -> SampleRequest:
        return SampleRequest(
            sample_id=sample,
            kind="validation",
            group=0,
            sample=0,
            prompt=prompt,
            seed=seed,
            spec=spec,
            num_inference_steps=options.steps,
            noise_level=0.0,
            sde_kind="flow",
            window=None,
            fields=("final", "conditioning"),
        )

    validation = [Prompt(i, f"a photo of {i} circles on a white background") for i in range(options.validation)]
    update, random = 0, Random(0)
    for epoch in range(options.epochs):
        prompts = [Prompt(i, f"the digit {i} moves to the right of a square") for i in range(options.prompts)]
        random.shuffle(prompts)
        for first in range(0, len(prompts), options.groups):
            groups = prompts[first : first + options.groups]
            named = [(p, i, f"{epoch}.{p.index}.{i}") for p in groups for i in range(options.group_size)]
            yield update, False, [request(name, p, epoch * 1000 + i) for p, i, name in named]
            if update % options.every == 0 and validation:
                yield update, True, [request(f"v{update}.{p.index}", p, 0) for p in validation]
            update += 1


def _table(records: Sequence[Record]) -> Table:
    table = Table(
        "encoded prompts", "calls", "an update, first epoch", "an update, later", "a validation round, later",
        "samples/s", "of kept", "by processor s",
        title="Calls of the text encoder; ratios are medians (quartiles) over updates and rounds",
    )  # fmt: skip
    base = {(r.update, r.validation): r for r in records if r.arm == next(iter(ARMS))}
    for arm in ARMS:
        found = [r for r in records if r.arm == arm]
        updates = [(r.calls, base[r.update, False].new) for r in found if not r.validation]
        rounds = [r.calls for r in found if r.validation]
        ratios = [
            spread([getattr(base[r.update, r.validation], of) / getattr(r, of) for r in found])
            for of in ("seconds", "processor_s")
        ]
        table.add_row(
            arm,
            str(sum(r.calls for r in found)),
            _mean([calls for calls, new in updates if new]),
            _mean([calls for calls, new in updates if not new]),
            _mean(rounds[1:]),
            f"{sum(r.samples for r in found) / sum(r.seconds for r in found):.1f}",
            *(f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" for ratio in ratios),
        )
    return table


def _mean(values: Sequence[int]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else "–"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("encoder_cache", _HELP)
    add = parser.add_argument
    add("--hidden", type=int, default=64, metavar="N", help="features of the text encoder (default: 64)")
    add("--prompts", type=int, default=16, metavar="N", help="of an epoch (default: 16)")
    add("--epochs", type=int, default=3, metavar="N", help="(default: 3)")
    add("--groups", type=int, default=4, metavar="P", help="of an update (default: 4)")
    add("--group-size", type=int, default=8, metavar="G", help="samples of a group (default: 8)")
    add("--validation", type=int, default=8, metavar="N", help="prompts of a validation round (default: 8)")
    add("--every", type=int, default=4, metavar="N", help="updates between validation rounds (default: 4)")
    add("--steps", type=int, default=10, metavar="N", help="denoising steps of a sample (default: 10)")
    options = parser.parse_args(arguments)
    least = {"prompts": 1, "epochs": 1, "groups": 1, "group_size": 1, "validation": 0, "every": 1, "steps": 2}
    for name, bound in least.items():
        if getattr(options, name) < bound:
            parser.error(f"--{name.replace('_', '-')}: expected at least {bound}")
    if options.hidden < 16 or options.hidden % 16:
        parser.error("--hidden: expected a multiple of 16")
    return options


if __name__ == "__main__":
    sys.exit(main())

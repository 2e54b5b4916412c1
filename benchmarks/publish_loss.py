"""Measures the cost of weight publishes in samples: a busy vLLM-Omni engine receives versions from a real trainer rank.

The engine is kept full with samples of several sizes. Three arms of one run generate the same samples and receive the
same publishes: `swap` as the framework does, between two denoising steps; `drain` and `abort` as trainers do that pause
their engine (`publish_loss_engine`). The denoising steps are counted in the engine's worker (`publish_loss_worker`).
Steps are lost if no finished trajectory contains them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import asked, benchmark_parser, write_json
from benchmarks.checkpoints import tiny_checkpoint
from benchmarks.publish_loss_engine import BusyHost, Outcome, Way
from omni_async.commands.bench.result import Machine, describe_machine
from omni_async.config import Config, check, with_spec
from omni_async.control.requests import RequestFactory
from omni_async.plugins.families import PipelineFamily, SamplingSpec, find_family
from omni_async.types import Prompt, SampleRequest

_HELP = """\
Samples and denoising steps lost at weight publishes, on a family's tiny checkpoint, made on the spot.

  python -m benchmarks.publish_loss --family stable_diffusion_3
  python -m benchmarks.publish_loss --family qwen_image --samples 12 --sampling '[{height: 64, width: 64}]'

OUT gets results.json; the table is printed. Exit codes: 0 the framework's arm lost nothing, and versions were swapped
in mid-generation; 1 it did, or none was; 2 wrong usage.
"""
WAYS: tuple[Way, ...] = get_args(Way)
TRANSPORT = "object_store"
# Sizes that the tiny checkpoints support, with and without guidance.
_SAMPLING: dict[str, list[dict[str, Any]]] = {
    "qwen_image": [
        {"height": 256, "width": 256},
        {"height": 384, "width": 256, "true_cfg_scale": 4.0},
        {"height": 512, "width": 512},
    ],
    "stable_diffusion_3": [
        {"height": 256, "width": 256},
        {"height": 384, "width": 256, "guidance_scale": 4.5},
        {"height": 512, "width": 512},
    ],
    "wan2_2": [
        {"height": 64, "width": 112, "num_frames": 9},
        {"height": 96, "width": 160, "num_frames": 9, "guidance_scale": 4.0, "guidance_scale_2": 3.0},
        {"height": 96, "width": 160, "num_frames": 17},
    ],
}
_PROMPTS = ("the digit 7", "a photo of a red circle on a white background")


class Record(msgspec.Struct, frozen=True):
    """One arm: its outcome, the versions published meanwhile, and its seconds."""

    way: Way
    publishes: int
    seconds: float
    outcome: Outcome


class Results(msgspec.Struct, frozen=True):
    """All results. `media`: the shapes of the samples' media, by part."""

    machine: Machine
    settings: dict[str, Any]
    media: list[dict[str, tuple[int, ...]]]
    records: list[Record]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    try:
        family = find_family(options.family)
        settings = options.sampling or _SAMPLING.get(family.name, [{}])
        specs = [msgspec.convert(one, family.sampling) for one in settings]
    except ValueError as error:  # msgspec's errors are ValueErrors, too
        sys.stderr.write(f"publish_loss: {error}\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    records = measure(family, specs, options, lambda line: console.print(line, markup=False, highlight=False))
    media = [{str(shape.part): shape.shape for shape in spec.media()} for spec in specs]
    results = Results(describe_machine(), asked(options), media, records)
    path = write_json(options.out / "results.json", results)
    console.print(str(results.machine), markup=False, highlight=False)
    console.print(table(records, family.name))
    console.print(f"written: {path}", markup=False, highlight=False)
    problems = [problem for record in records if record.way == "swap" for problem in what_was_lost(record)]
    for problem in problems:
        sys.stderr.write(f"publish_loss: {problem}\n")
    return 1 if problems else 0


def measure(
    family: PipelineFamily, specs: Sequence[SamplingSpec], options: argparse.Namespace, log: Callable[[str], None]
) -> list[Record]:
    """Build the checkpoint, start trainer and engine, and run one arm after the other."""
    from benchmarks.weights_measure import hosts, ray_session

    with tempfile.TemporaryDirectory(prefix="publish-loss-", dir=options.out) as name, ray_session(0):
        checkpoint = tiny_checkpoint(family.name, Path(name) / "checkpoint")
        config = make_config(family, checkpoint, options)
        requests = make_requests(config, specs, options.samples)
        log(f"{family.name}: starting a trainer and an engine")
        counting = msgspec.structs.replace(family, vllm_extension="benchmarks.publish_loss_worker.CountingExtension")
        with hosts(config, counting, [TRANSPORT], 1, Path(name), BusyHost) as (trainer, engines):
            [engine] = engines.values()
            return asyncio.run(_take_arms(trainer, engine, requests, options.publishes, log))


async def _take_arms(
    trainer: Any, engine: Any, requests: Sequence[SampleRequest], publishes: int, log: Callable[[str], None]
) -> list[Record]:
    await engine.start()
    await trainer.start()
    await trainer.publish(TRANSPORT)
    await engine.begin("swap", requests[: len(requests) // 2])  # the first batch of every shape takes longer
    await engine.outcome()
    records = []
    for way in WAYS:
        records.append(await _take_arm(way, trainer, engine, requests, publishes))
        log(f"{way}: {records[-1].publishes} publishes, {records[-1].seconds:.1f} s")
    return records


async def _take_arm(way: Way, trainer: Any, engine: Any, requests: Sequence[SampleRequest], publishes: int) -> Record:
    """Generate the samples, and publish whenever another share of their steps has been computed."""
    steps = sum(request.num_inference_steps for request in requests)
    started = time.perf_counter()
    await engine.begin(way, requests)
    published = 0
    while published < publishes and await engine.reach((published + 1) * steps // (publishes + 1)):
        await trainer.publish(TRANSPORT)
        published += 1
    outcome = await engine.outcome()
    return Record(way, published, time.perf_counter() - started, outcome)


def make_config(family: PipelineFamily, checkpoint: str, options: argparse.Namespace) -> Config:
    raw = {
        "model": {"pipeline": family.name, "path": checkpoint},
        "data": {"prompts": "none"},
        "rollout": {
            "num_inference_steps": options.steps,
            "group_size": 1,
            "max_inflight": options.inflight,
            "max_batch": options.inflight,
            "sde": {"window": {"size": 2, "range": [0, options.steps - 1]}},
        },
        "reward": {"scorers": [{"name": "none"}]},
    }
    config = with_spec(msgspec.convert(raw, Config))
    problem = check(config)
    if problem is not None:
        raise ValueError(problem)
    return config


def make_requests(config: Config, specs: Sequence[SamplingSpec], samples: int) -> list[SampleRequest]:
    """Create training requests with everything that a trainer may request.

    Sizes take turns, and so do three step counts: samples end one by one, so that every publish finds others in flight.
    """
    factory = RequestFactory(config)
    factory.fields = ("latents", "log_probs", "final", "conditioning")
    found = []
    for number in range(samples):
        prompt = Prompt(number, _PROMPTS[number % len(_PROMPTS)])
        [request] = factory.training(number, prompt, factory.window(number))
        found.append(
            msgspec.structs.replace(
                request, spec=specs[number % len(specs)], num_inference_steps=request.num_inference_steps + number % 3
            )
        )
    return found


def what_was_lost(record: Record) -> list[str]:
    """Return a sentence for every loss of an arm, and for every problem that invalidates its measurement."""
    outcome, found = record.outcome, []
    if outcome.lost_samples or outcome.finished != outcome.asked:
        found.append(f"{outcome.lost_samples} samples were lost, {outcome.finished} of {outcome.asked} finished")
    if outcome.lost_steps:
        found.append(f"{outcome.lost_steps} denoising steps are in no trajectory")
    if not record.publishes or not outcome.mixed:
        found.append("no publish met a sample under way; draw more --samples or with more --steps")
    return found


def table(records: Sequence[Record], family: str) -> Table:
    result = Table(
        "at a publish", "publishes", "samples asked", "finished", "by two versions or more", "lost samples",
        "steps computed", "lost steps", "seconds",
        title=f"{family}: what publishes in mid-generation cost",
    )  # fmt: skip
    for record in records:
        outcome = record.outcome
        result.add_row(
            record.way,
            *map(str, (record.publishes, outcome.asked, outcome.finished, outcome.mixed, outcome.lost_samples)),
            str(outcome.computed),
            f"{outcome.lost_steps} ({outcome.lost_steps / outcome.computed:.0%})",
            f"{record.seconds:.1f}",
        )
    return result


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("publish_loss", _HELP)
    add = parser.add_argument
    add("--family", default="stable_diffusion_3", help="a family with a tiny checkpoint (default: stable_diffusion_3)")
    add(
        "--sampling",
        type=_yaml_list,
        metavar="[{key: value, ...}, ...]",
        help="the samples' rollout.sampling, in turns (default: three sizes of the family, one guided)",
    )
    add("--samples", type=int, default=36, metavar="N", help="of every arm (default: 36)")
    add("--steps", type=int, default=10, metavar="N", help="denoising steps of the shortest samples (default: 10)")
    add("--inflight", type=int, default=8, metavar="N", help="samples in the engine at a time (default: 8)")
    add("--publishes", type=int, default=6, metavar="N", help="in every arm (default: 6)")
    return parser.parse_args(arguments)


def _yaml_list(text: str) -> list[dict[str, Any]]:
    return msgspec.yaml.decode(text, type=list[dict[str, Any]])


if __name__ == "__main__":
    sys.exit(main())

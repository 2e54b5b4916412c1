"""Measures how many steps samples with the same initial noise save, and the effect on their rewards.

An engine generates groups of a recipe, each three times, in turns, and the recipe's first scorer scores them:
- with initial noise of each sample's own;
- with the group's initial noise;
- the same samples with `rollout.share_prefix`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Any

# First of all: importing omni_async makes torchvision importable with a CPU build of torch.
import omni_async  # noqa: F401  # isort: skip
import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import asked, benchmark_parser, write_json
from omni_async.commands.bench.result import Machine, describe_machine, spread
from omni_async.config import Config, ConfigError, load
from omni_async.config.section import bytes_of
from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import PromptStream
from omni_async.data.prompts import load_prompts
from omni_async.plugins.families import find_family
from omni_async.rewards import registry
from omni_async.rewards.base import shown_to
from omni_async.rollout.base import Trajectory
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.rollout.factory import build_engine
from omni_async.rollout.prefixes import Prefixes
from omni_async.types import Prompt, SampleRequest

_HELP = """\
Model passes and processor seconds of a sample without and with rollout.share_prefix, and the rewards' variance in a
group without and with rollout.share_initial_noise.

  python -m benchmarks.shared_prefix                                          # 16 groups of the quickstart
  python -m benchmarks.shared_prefix rollout.sde.window.range=[5,9]           # later windows
  python -m benchmarks.shared_prefix --engine vllm_omni

OUT gets results.json; the table is printed. Exit codes: 0 a shared prefix gives the same samples; 1 it does not;
2 wrong usage.
"""
OWN, SHARED, PREFIX = ARMS = ("own noise", "shared noise", "shared noise and prefix")
_SAME = 1e-4  # rows of batches of other sizes round differently


class Record(msgspec.Struct, frozen=True):
    """A group of one arm: the steps that its samples took on the engine, and the rewards of its samples."""

    arm: str
    group: int
    steps: int
    seconds: float
    processor_s: float
    rewards: list[float]


class Results(msgspec.Struct, frozen=True):
    """`difference`: the largest one of latents with a shared prefix from those without."""

    machine: Machine
    settings: dict[str, Any]
    difference: float
    records: list[Record]


def main(arguments: Sequence[str] | None = None) -> int:
    options, config = _parse(arguments)
    torch.set_num_threads(1)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    options.out.mkdir(parents=True, exist_ok=True)
    records, difference = asyncio.run(_measure(config, options.groups))
    results = Results(describe_machine(), asked(options), difference, records)
    path = write_json(options.out / "results.json", results)
    console.print(str(results.machine), markup=False, highlight=False)
    console.print(_table(records, config))
    console.print(f"largest difference of latents: {difference:.2g}; written: {path}", markup=False, highlight=False)
    return 0 if difference <= _SAME else 1


async def _measure(config: Config, groups: int) -> tuple[list[Record], float]:
    prompts = load_prompts(str(config.data.prompts), "data.prompts", 100_000)
    stream = PromptStream(prompts, config.run.seed, config.data.shuffle)
    factories = {shared: _factory(config, shared) for shared in (False, True)}
    engine = build_engine(config, "engine", find_family(config.model.pipeline))
    await engine.start()
    scorer = registry.build(config.reward.scorers[0])
    records, difference = [], 0.0

    async def made(arm: str, group: int) -> list[Trajectory]:
        prompt, factory = stream[group], factories[arm != OWN]
        requests = factory.training(group, prompt, factory.window(group), factory.bucket(group))
        await _share(engine, config, shared=arm == PREFIX)
        started, processor = time.perf_counter(), time.process_time()
        found = await asyncio.gather(*[engine.generate(request) for request in requests])
        seconds, processor = time.perf_counter() - started, time.process_time() - processor
        steps = sum(one.num_inference_steps for one in requests) - sum(one.shared_steps for one in found)
        records.append(Record(arm, group, steps, seconds, processor, _rewards(scorer, found, requests)))
        return found

    await made(OWN, 0)  # the first batch of an engine is slower
    records.clear()
    for group in range(groups):
        order = ARMS[group % 3 :] + ARMS[: group % 3]
        found = {arm: await made(arm, group) for arm in order}
        for one, other in zip(found[SHARED], found[PREFIX], strict=True):
            difference = max(difference, (one.tensors["latents"] - other.tensors["latents"]).abs().max().item())
    await engine.close()
    return records, difference


def _factory(config: Config, shared: bool) -> RequestFactory:
    rollout = msgspec.structs.replace(config.rollout, share_initial_noise=shared)
    factory = RequestFactory(msgspec.structs.replace(config, rollout=rollout))
    factory.fields = ("latents", "log_probs")
    return factory


async def _share(engine: Any, config: Config, *, shared: bool) -> None:
    if isinstance(engine, DiffusersEngine):
        engine._prefixes = Prefixes(shared)
    else:
        rollout = config.rollout
        await engine._call("begin", bytes_of(rollout.conditioning_cache), rollout.offload, shared)


def _rewards(scorer: Any, made: Sequence[Trajectory], requests: Sequence[SampleRequest]) -> list[float]:
    media = shown_to(scorer.name, scorer, [one.media.numpy() for one in made])
    prompts: list[Prompt] = [request.prompt for request in requests]
    return [score.value for score in scorer.score(media, prompts)]


def _table(records: Sequence[Record], config: Config) -> Table:
    table = Table(
        "samples of a group with", "steps per sample", "processor ms per sample", "of shared noise's",
        "reward", "std in a group", "variance of A", "groups without signal",
        title="Ratios are medians (quartiles) over groups. A: the reward less its group's mean, divided by the std of"
        " all rewards",
    )  # fmt: skip
    samples = config.rollout.group_size
    base = {record.group: record.processor_s for record in records if record.arm == SHARED}
    for arm in ARMS:
        found = [record for record in records if record.arm == arm]
        within = [pvariance(record.rewards) for record in found]
        everything = pvariance([reward for record in found for reward in record.rewards])
        ratio = spread([record.processor_s / base[record.group] for record in found])
        table.add_row(
            arm,
            f"{sum(record.steps for record in found) / samples / len(found):.2f}",
            f"{1000 * sum(record.processor_s for record in found) / samples / len(found):.1f}",
            f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            f"{fmean(reward for record in found for reward in record.rewards):.3f}",
            f"{fmean(variance**0.5 for variance in within):.3f}",
            f"{fmean(within) / everything:.3f}" if everything else "–",
            f"{sum(variance == 0 for variance in within)} of {len(found)}",
        )
    return table


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    parser = benchmark_parser("shared_prefix", _HELP)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="changes of the recipe")
    add("--recipe", default="recipes/quickstart/quickstart.yaml", metavar="FILE", help="(default: the quickstart's)")
    add("--engine", choices=("diffusers", "vllm_omni"), default="diffusers", help="(default: diffusers)")
    add("--groups", type=int, default=16, metavar="N", help="groups of each arm (default: 16)")
    options = parser.parse_args(arguments)
    if options.groups < 1:
        parser.error("--groups: expected at least 1")
    forced = ("rollout.share_initial_noise=true", "rollout.share_prefix=true", f"rollout.engine={options.engine}")
    try:
        return options, load(options.recipe, [*options.overrides, *forced])
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())

"""Measures what request batching gains over step-wise batching: the same samples from engines that differ in
`rollout.batching` and `rollout.max_batch` alone.

Every arm has an engine of its own, in a Ray actor with one thread; all arms take turns within a repeat, so that a busy
moment of the machine meets all. Ratios are taken within a repeat, between arms of one batch size.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import asked, benchmark_parser, write_json
from benchmarks.local_ray import WAITING_CALLS, local_ray
from omni_async.bench.machine import Machine, describe_machine
from omni_async.bench.result import Spread, spread
from omni_async.config import Config, ConfigError, load

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
_HELP = """\
Seconds of a burst of samples by step-wise and by request batching, on the quickstart's model unless --recipe names
another.

  python -m benchmarks.request_batching                          # 48 images, batches of 16 and 48; about two minutes
  python -m benchmarks.request_batching --batches 8 --samples 32

OUT gets results.json; the table is printed.
"""
Mode = Literal["step", "request"]
MODES: tuple[Mode, ...] = ("step", "request")


class Record(msgspec.Struct, frozen=True):
    """One burst: `samples` asked for at once took `seconds`, and `processor_seconds` of the engine's process, which a
    busy machine lengthens less."""

    batching: Mode
    max_batch: int
    repeat: int
    samples: int
    seconds: float
    processor_seconds: float


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    settings: dict[str, Any]
    records: list[Record]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
    try:
        configs = {
            (batch, mode): load(
                options.recipe,
                [
                    f"rollout.engine={options.engine}",
                    f"rollout.batching={mode}",
                    f"rollout.max_batch={batch}",
                    "weights.swap=request",
                ],
            )
            for batch in options.batches
            for mode in MODES
        }
    except ConfigError as error:
        sys.stderr.write(f"request_batching: {error}\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)

    def log(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    records = asyncio.run(measure(configs, options.samples, options.repeats, log))
    results = Results(describe_machine(), asked(options), records)
    path = write_json(options.out / "results.json", results)
    console.print(str(results.machine), markup=False, highlight=False)
    console.print(table(records))
    console.print(f"written: {path}", markup=False, highlight=False)
    return 0


async def measure(
    configs: dict[tuple[int, Mode], Config], samples: int, repeats: int, log: Callable[[str], None]
) -> list[Record]:
    """Measures `repeats` bursts of every arm, after one of each that is not counted."""
    records: list[Record] = []
    with _engines(configs) as engines:
        log(f"starting {len(engines)} engines")
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        for (batch, mode), engine in engines.items():
            log(f"batching {mode}, batches of {batch}: {await engine.generate(samples):.1f} s, not counted")
        for repeat in range(repeats):
            for (batch, mode), engine in engines.items():
                before = await engine.processor_seconds()
                seconds = await engine.generate(samples)
                processor_seconds = await engine.processor_seconds() - before
                records.append(Record(mode, batch, repeat, samples, seconds, processor_seconds))
            log(f"repeat {repeat + 1} of {repeats}")
    return records


@contextmanager
def _engines(configs: dict[tuple[int, Mode], Config]) -> Iterator[dict[tuple[int, Mode], Any]]:
    """Starts the actors of all engines, and kills them in the end."""
    import ray

    from benchmarks.weights_roles import EngineHost
    from omni_async.families import find_family
    from omni_async.runtime.on_ray.shell import Proxy, actor_class

    with local_ray(len(configs), 200_000_000, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1"):
        actors: list[Any] = []
        found: dict[tuple[int, Mode], Any] = {}
        for (batch, mode), config in configs.items():
            name = f"{mode}-{batch}"
            host = partial(EngineHost, name, config, find_family(config.model.pipeline), ())
            actors.append(actor_class().options(num_cpus=0).remote(host))
            found[batch, mode] = Proxy(name, actors[-1], WAITING_CALLS)
        try:
            yield found
        finally:
            for actor in actors:
                ray.kill(actor)


def table(records: Sequence[Record]) -> Table:
    """Formats a row per arm. The ratios compare the two arms of one batch size."""
    result = Table(
        "max_batch", "batching", "seconds", "samples/s", "step / request", "processor seconds", "step / request",
        title="A burst of samples: median (quartiles)",
    )  # fmt: skip
    for batch in dict.fromkeys(record.max_batch for record in records):
        arms = {mode: [r for r in records if (r.max_batch, r.batching) == (batch, mode)] for mode in MODES}
        pairs = list(zip(arms["step"], arms["request"], strict=True))
        wall = _text(spread([step.seconds / request.seconds for step, request in pairs]))
        processor = _text(spread([step.processor_seconds / request.processor_seconds for step, request in pairs]))
        for mode, arm in arms.items():
            taken = spread([record.seconds for record in arm])
            result.add_row(
                str(batch),
                mode,
                _text(taken),
                f"{arm[0].samples / taken.median:.1f}",
                wall if mode == "request" else "",
                _text(spread([record.processor_seconds for record in arm])),
                processor if mode == "request" else "",
            )
    return result


def _text(value: Spread) -> str:
    return f"{value.median:.2f} ({value.low:.2f}..{value.high:.2f})"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("request_batching", _HELP)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[16, 48], metavar="N", help="rollout.max_batch (default: 16 48)")
    add("--samples", type=int, default=48, metavar="N", help="of a burst (default: 48)")
    add("--repeats", type=int, default=9, metavar="N", help="of every arm, taken in turns (default: 9)")
    add("--engine", choices=("vllm_omni", "diffusers"), default="vllm_omni", help="(default: vllm_omni)")
    add("--recipe", type=Path, default=RECIPE, help="whose model generates (default: the quickstart)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Measures the cost of a publish: the trainer's blocked time, the delay until engines use it, and the lost generation.

Trainer and engines are Ray actors with the framework's own rank, publisher, producers and transports, on a model of
each size (`weights_model`, `weights_roles`). All transports, and plain copies of the same bytes, take turns within a
repeat (`weights_measure`). Generation is the quickstart's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.arguments import asked, benchmark_parser, write_json
from benchmarks.weights_report import Results, show
from omni_async.commands.bench.result import describe_machine
from omni_async.config import Config, ConfigError, load

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
TRANSPORTS = ("object_store", "disk", "collective")
_HELP = """\
Trainer-blocked time and publish-to-swapped latency by payload size and transport, against plain memory copies;
generation during publishes.

  python -m benchmarks.weights                                # 10 MB to 2 GB, all transports; ~10 minutes on two cores
  python -m benchmarks.weights --max-mb 100 --repeats 3       # what fits a small machine
  python -m benchmarks.weights --sizes                        # no payloads: generation during publishes alone
  python -m benchmarks.weights --engine vllm_omni --sizes 10  # generation by the production engine

OUT gets results.json; the tables are printed. A `!` marks a missed target: blocked <= 1.5 copies, generation >= 95 %
of that without publishes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    try:
        config = load(
            options.recipe, [f"rollout.engine={options.engine}", f"weights.transport={options.generation_transport}"]
        )
    except ConfigError as error:
        sys.stderr.write(f"weights: {error}\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    results = _measure(config, options, console)
    path = write_json(options.out / "results.json", results)
    show(results, console)
    console.print(f"written: {path}", markup=False, highlight=False)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("weights", _HELP)
    add = parser.add_argument
    add(
        "--sizes",
        type=_positive,
        nargs="*",
        default=[10, 100, 1000, 2000],
        metavar="MB",
        help="float32 payloads (default: 10 100 1000 2000)",
    )
    add("--max-mb", type=_positive, default=2000, metavar="MB", help="leave out larger ones (default: 2000)")
    add("--transports", choices=TRANSPORTS, nargs="+", default=TRANSPORTS, help="(default: all)")
    add("--repeats", type=int, default=5, metavar="N", help="of every arm, taken in turns (default: 5)")
    add("--engines", type=int, default=1, metavar="N", help="engines that receive (default: 1)")
    add(
        "--lora-rank",
        type=int,
        default=32,
        metavar="R",
        help="also publish adapters of this rank, for sizes from 100 MB on; 0: not (default: 32)",
    )
    add(
        "--window",
        type=_natural,
        default=10.0,
        metavar="S",
        help="seconds of a window of generation; 0: no generation (default: 10)",
    )
    add("--every", type=_positive, default=3.0, metavar="S", help="seconds between periodic publishes (default: 3)")
    add("--engine", choices=("diffusers", "vllm_omni"), default="diffusers", help="what generates (default: diffusers)")
    add(
        "--generation-transport",
        choices=TRANSPORTS,
        default="object_store",
        help="of publishes during generation (default: object_store)",
    )
    add("--recipe", type=Path, default=RECIPE, help="whose model generates (default: the quickstart)")
    return parser.parse_args(arguments)


def _measure(config: Config, options: argparse.Namespace, console: Console) -> Results:
    from benchmarks.weights_measure import measure_publishes, measure_throughput, ray_session

    def log(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    sizes, notes = _sizes(options)
    results = Results(describe_machine(), asked(options), [], [], notes)
    if sizes or options.window:
        with (
            tempfile.TemporaryDirectory(prefix="weights-", dir=options.out) as name,
            ray_session(int(3e6 * max(sizes, default=0.0))),
        ):
            folder = Path(name)
            for megabytes, rank in [(size, rank) for size in sizes for rank in _ranks(size, options.lora_rank)]:
                log(
                    f"{megabytes:g} MB{f', adapters of rank {rank}' if rank else ''}: starting a trainer and"
                    f" {options.engines} engines"
                )
                publishes = measure_publishes(
                    megabytes,
                    options.transports,
                    repeats=options.repeats,
                    engines=options.engines,
                    lora_rank=rank,
                    folder=folder,
                    log=log,
                )
                results.publishes.extend(asyncio.run(publishes))
            if options.window:
                log(f"generation: starting a trainer and a {options.engine} engine")
                throughput = measure_throughput(
                    config,
                    options.generation_transport,
                    repeats=options.repeats,
                    window_s=options.window,
                    every_s=options.every,
                    folder=folder,
                    log=log,
                )
                results.throughput.extend(asyncio.run(throughput))
    return results


def _sizes(options: argparse.Namespace) -> tuple[list[float], list[str]]:
    """Return the sizes that fit, the smallest first, and the omitted ones."""
    from benchmarks.weights_measure import needed_bytes

    available = psutil.virtual_memory().available
    fit = [size for size in sorted(options.sizes) if size <= options.max_mb and needed_bytes(size) <= available]
    notes = [
        f"left out: {size:g} MB (--max-mb is {options.max_mb:g}; it needs {needed_bytes(size) / 1e9:.1f} GB of memory,"
        f" {available / 1e9:.1f} GB are free)"
        for size in options.sizes
        if size not in fit
    ]
    return fit, notes


def _ranks(megabytes: float, lora_rank: int) -> list[int | None]:
    """Return the adapters' ranks to publish; None is the full payload."""
    return [None, lora_rank] if lora_rank and megabytes >= 100 else [None]


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _natural(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())

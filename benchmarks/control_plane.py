"""Measures a coordinator's throughput of prompt groups: the real control plane on one event loop, with minimal roles.

Every group is admitted, made ready and trained: three group events. Engines, reward workers and the trainer answer at
once, so the time is spent in the coordinator, the event loop and the messages. A second run of each repeat times only
the coordinator's own calls. The ledger is a real file. Shapes are engines x groups per update x group size.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import coroutine
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import benchmark_parser
from omni_async.commands.bench.result import Machine, describe_machine
from omni_async.config import Config, check
from omni_async.config.writing import write_atomic
from omni_async.control.coordinator import Coordinator
from omni_async.records.write.ledger_file import JsonlSink
from omni_async.types import (
    Prompt,
    ReadyGroup,
    SampleResult,
    Score,
    ScoreJob,
    ScoreResult,
    UpdateReport,
    VersionSpans,
    WeightReport,
)

_HELP = """\
Group events (admitted, ready, trained) and samples per second of one coordinator in one process.

  python -m benchmarks.control_plane                                 # one, 64 and 1,000 engines; about a minute
  python -m benchmarks.control_plane --shapes 256x64x8 --repeats 9   # engines x groups per update x group size

OUT gets results.json; the table is printed.
"""
_SHAPES = ("1x4x16", "64x32x16", "1000x256x4")
_TARGET = 2000  # group events per second
_REWARD_WORKERS = 4
_STEPS = 2  # trained steps of a sample


class Shape(msgspec.Struct, frozen=True):
    engines: int
    groups_per_update: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.engines}x{self.groups_per_update}x{self.group_size}"

    @property
    def samples_per_update(self) -> int:
        return self.groups_per_update * self.group_size


class Record(msgspec.Struct, frozen=True):
    """One repeat.

    `seconds` of the whole run; `coordinator_seconds` inside the coordinator's calls, from a separate run."""

    shape: Shape
    repeat: int
    updates: int
    seconds: float
    coordinator_seconds: float

    @property
    def samples(self) -> int:
        return self.updates * self.shape.samples_per_update

    @property
    def group_events_per_s(self) -> float:
        return 3 * self.updates * self.shape.groups_per_update / self.seconds

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def coordinator_us(self) -> float:
        """Return microseconds per sample."""
        return 1e6 * self.coordinator_seconds / self.samples


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    records: list[Record]


# ---- the roles -------------------------------------------------------------------------------------------------------


def make_config(shape: Shape, updates: int, max_updates: int = 1) -> Config:
    """Return a configuration whose buffers have room for all admitted groups: only the budget delays roles."""
    live = (max_updates + 1) * shape.groups_per_update
    raw = {
        "model": {"path": "none"},
        "data": {"prompts": "none"},
        "rollout": {"workers": shape.engines, "group_size": shape.group_size},
        "reward": {"scorers": [{"name": "none"}]},
        "staleness": {"max_updates": max_updates},
        "buffer": {"trajectories": live * shape.group_size, "groups": live},
        "algorithm": {"name": "flow_grpo"},
        "trainer": {"updates": updates, "groups_per_update": shape.groups_per_update},
    }
    config = msgspec.convert(raw, Config)
    problem = check(config)
    assert problem is None, problem
    return config


class Roles:
    """All roles around one coordinator. All engines hold `version`, which the trainer publishes after each update."""

    def __init__(self, config: Config, coordinator: Any) -> None:
        self._config = config
        self._coordinator = coordinator
        self._version = 0

    async def play(self) -> None:
        engines = [self._engine(name) for name in self._config.engine_names]
        rewarders = [self._reward_worker(f"reward-{worker}") for worker in range(_REWARD_WORKERS)]
        await asyncio.gather(self._driver(), self._trainer(), *rewarders, *engines)

    async def _engine(self, name: str) -> None:
        capacity = self._config.rollout.max_inflight
        results: list[SampleResult] = []
        while requests := await self._coordinator.next_samples(name, capacity, capacity, results):
            version = self._version
            await asyncio.sleep(0)
            versions = VersionSpans.same(version, _STEPS)
            results = [SampleResult(r.sample_id, name, None, None, version, versions, 0.0, 1.0) for r in requests]

    async def _reward_worker(self, name: str) -> None:
        results: list[ScoreResult] = []
        while jobs := await self._coordinator.next_to_score(name, self._config.reward.batch, results):
            await asyncio.sleep(0)
            results = [ScoreResult(job.sample_id, job.attempt, score=Score(_reward(job))) for job in jobs]

    async def _trainer(self) -> None:
        per_update = self._config.trainer.groups_per_update
        await self._publish()
        while self._version < self._config.trainer.updates:
            groups: list[ReadyGroup] = []
            while len(groups) < per_update:
                groups += await self._coordinator.next_groups(self._version, per_update - len(groups))
            report = UpdateReport(self._version + 1, tuple(group.group for group in groups), {}, 0.0, 1.0)
            await self._coordinator.update_done(report)
            self._version += 1
            await self._publish()

    async def _publish(self) -> None:
        await self._coordinator.announce(self._version, "digest")
        for name in self._config.engine_names:
            await self._coordinator.engine_holds(WeightReport(name, self._version, "digest"))

    async def _driver(self) -> None:
        while not any(event.kind == "ended" for event in await self._coordinator.events()):
            pass


def _reward(job: ScoreJob) -> float:
    """Return a reward that is different for each sample of a group, so that no group is rejected."""
    return float(job.sample_id.rpartition(".s")[2])


class Stopwatch:
    """A coordinator whose calls are timed while they run, but not while they wait."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._coordinator, name)

        @coroutine
        def call(*args: Any) -> Generator[Any, Any, Any]:
            steps = method(*args).__await__()
            while True:
                began = time.perf_counter()
                try:
                    awaited = steps.send(None)
                except StopIteration as done:
                    return done.value
                finally:
                    self.seconds += time.perf_counter() - began
                yield awaited

        setattr(self, name, call)
        return call


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(shape: Shape, repeat: int, updates: int) -> Record:
    whole, _ = _run(shape, updates, timed=False)
    _, inside = _run(shape, updates, timed=True)
    return Record(shape, repeat, updates, whole, inside)


def _run(shape: Shape, updates: int, *, timed: bool) -> tuple[float, float]:
    """Return the seconds of a whole run, and of the calls if `timed`."""
    config = make_config(shape, updates)
    prompts = [Prompt(i, f"prompt {i}") for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Coordinator(config, "benchmark", prompts, [], JsonlSink(Path(folder) / "ledger.jsonl"))
        watch = Stopwatch(coordinator)
        began = time.perf_counter()
        asyncio.run(Roles(config, watch if timed else coordinator).play())
        seconds = time.perf_counter() - began
    trained = coordinator.ledger.events["trained"]
    if trained != updates * shape.groups_per_update:
        raise RuntimeError(f"{shape}: {trained} groups were trained, expected {updates * shape.groups_per_update}")
    return seconds, watch.seconds


def measure_all(shapes: Sequence[Shape], repeats: int, samples: int, say: Callable[[str], None]) -> Iterable[Record]:
    """Measure all shapes in each repeat, each for about `samples` samples and at least three updates."""
    for repeat in range(repeats):
        for shape in shapes:
            record = measure(shape, repeat, max(3, samples // shape.samples_per_update))
            say(
                f"{repeat + 1}/{repeats} {shape}: {record.group_events_per_s:,.0f} group events/s,"
                f" {record.samples_per_s:,.0f} samples/s"
            )
            yield record


def table(records: Sequence[Record]) -> Table:
    made = Table(
        title=f"one coordinator: median (lowest to highest) of the repeats; target {_TARGET:,} group events/s",
        title_justify="left",
    )
    for heading in (
        "engines",
        "groups an update",
        "group size",
        "group events/s",
        "samples/s",
        "coordinator µs per sample",
    ):
        made.add_column(heading, justify="right")
    for shape in dict.fromkeys(record.shape for record in records):
        of_shape = [record for record in records if record.shape == shape]
        columns = (
            _spread([record.group_events_per_s for record in of_shape], ",.0f"),
            _spread([record.samples_per_s for record in of_shape], ",.0f"),
            _spread([record.coordinator_us for record in of_shape], ".1f"),
        )
        made.add_row(str(shape.engines), str(shape.groups_per_update), str(shape.group_size), *columns)
    return made


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# ---- the command -----------------------------------------------------------------------------------------------------


def parse_shape(text: str) -> Shape:
    try:
        engines, groups, samples = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ENGINES x GROUPS x SAMPLES like 64x32x16, got {text!r}") from None
    if min(engines, groups) < 1 or samples < 2:
        raise argparse.ArgumentTypeError(f"expected at least 1x1x2, got {text!r}")
    return Shape(engines, groups, samples)


def main(argv: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("control_plane", _HELP)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[parse_shape(text) for text in _SHAPES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--samples", type=int, default=20_000, help="about how many samples a run makes (default %(default)s)"
    )
    args = parser.parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    records = list(measure_all(args.shapes, args.repeats, args.samples, console.print))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.json"
    write_atomic(path, msgspec.json.format(msgspec.json.encode(Results(describe_machine(), records))))
    console.print(table(records))
    console.print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

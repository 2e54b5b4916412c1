"""Measures one coordinator process under the messages of many workers: the real actor, called over Ray.

This process has the real producers and reward workers, on one event loop; their engines and scorers do no work. Each
message crosses two processes as in a run, and carries references to stored objects. Samples of an engine finish one by
one, or in batches. Only the coordinator's process is measured: its CPU seconds, its calls, and the lag of its loop,
which is how much later than due a timer fires.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import benchmark_parser, write_json
from benchmarks.control_plane import Roles, Shape, make_config
from omni_async.aio.clock import WallClock
from omni_async.aio.waiting import Event, cancel
from omni_async.commands.bench.result import Machine, describe_machine
from omni_async.config import Config
from omni_async.config.role_table import roles_of
from omni_async.control.coordinator import Coordinator
from omni_async.media import Media
from omni_async.records.write.ledger_file import JsonlSink
from omni_async.rewards.base import Scorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.roles.producer import Producer
from omni_async.roles.rewarder import Rewarder
from omni_async.rollout.base import Trajectory
from omni_async.runtime.on_ray.connection import connect
from omni_async.runtime.on_ray.shell import Proxy, actor_class
from omni_async.runtime.on_ray.store import RayStore
from omni_async.store import ObjectStore
from omni_async.types import Prompt, SampleRequest, Score, VersionSpans, WeightReport
from omni_async.worker import COORDINATOR

_HELP = """\
Samples per second that one coordinator process serves over Ray, by engines and by samples that finish together.

  python -m benchmarks.coordinator_on_ray                                    # about four minutes
  python -m benchmarks.coordinator_on_ray --engines 256 --batches 1 --rates 500

OUT gets results.json; the table is printed.
"""
_ENGINES_PER_REWARD_WORKER = 8
_TICK_S = 0.005  # interval of the timer whose delay is the lag
_WARM_S = 3.0
_BUDGET = 2  # staleness.max_updates
_UPDATES = 1_000_000  # more than any arm makes


class Reading(msgspec.Struct, frozen=True):
    """The coordinator process during `seconds`: samples received, CPU seconds, calls by name, lags in milliseconds."""

    seconds: float
    samples: int
    cpu_s: float
    calls: dict[str, int]
    lag_p50_ms: float
    lag_p99_ms: float

    @property
    def samples_per_cpu_s(self) -> float:
        return self.samples / self.cpu_s

    @property
    def calls_per_sample(self) -> float:
        return sum(self.calls.values()) / max(1, self.samples)


class Record(msgspec.Struct, frozen=True):
    """One repeat of an arm. `rate`: samples per second that all engines generate, if they get enough leases."""

    engines: int
    batch: int
    rate: float
    repeat: int
    reading: Reading


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    records: list[Record]


# ---- in the coordinator's process ------------------------------------------------------------------------------------


class Measured:
    """A coordinator that counts its calls and measures its process between two calls of `reading`."""

    def __init__(self, config: Config, ledger: Path) -> None:
        prompts = [Prompt(index, f"prompt {index}") for index in range(64)]
        self._coordinator = Coordinator(config, "benchmark", prompts, [], JsonlSink(ledger))
        self._calls: Counter[str] = Counter()
        self._lags: list[float] = []
        self._ticking: asyncio.Task[None] | None = None
        self._images = 0
        self._began = self._cpu_began = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._coordinator, name)

        def call(*args: Any) -> Any:
            self._calls[name] += 1
            return method(*args)

        setattr(self, name, call)
        return call

    async def reading(self) -> tuple[Any, ...]:
        """Return the fields of `Reading` since the last call, because a class of this module is not sent."""
        loop = asyncio.get_running_loop()
        if self._ticking is None:
            self._ticking = loop.create_task(self._tick())
        now, cpu, images = loop.time(), time.process_time(), self._coordinator._plane.samples.images
        lags = sorted(self._lags) or [0.0]
        reading = (
            now - self._began,
            images - self._images,
            cpu - self._cpu_began,
            dict(self._calls),
            1e3 * statistics.median(lags),
            1e3 * lags[int(0.99 * (len(lags) - 1))],
        )
        self._began, self._cpu_began, self._images = now, cpu, images
        self._calls.clear()
        self._lags.clear()
        return reading

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lags.append(loop.time() - due)


# ---- the workers -----------------------------------------------------------------------------------------------------


class LightEngine:
    """An engine that generates nothing: every `seconds`, on average, `batch` of its samples are done."""

    def __init__(self, name: str, batch: int, seconds: float, random: np.random.Generator) -> None:
        self.name = name
        self.version = 0
        self._batch, self._seconds, self._random = batch, seconds, random
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._came = Event()

    async def start(self) -> WeightReport:
        return WeightReport(self.name, 0, "")

    async def generate(self, request: SampleRequest) -> Trajectory:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._came.notify()
        await future
        steps = VersionSpans.same(self.version, request.num_inference_steps)
        return Trajectory(np.zeros(8, np.uint8), Media(image=np.zeros((3, 2, 2), np.uint8)), steps)  # type: ignore[arg-type]

    async def work(self) -> None:
        await asyncio.sleep(self._seconds * self._random.random())
        while True:
            await asyncio.sleep(self._seconds * self._random.uniform(0.5, 1.5))
            while not self._waiting:
                await self._came.wait()
            for _ in range(min(self._batch, len(self._waiting))):
                self._waiting.popleft().set_result(None)

    async def close(self) -> None:
        """Free nothing."""


class LightScorer(Scorer):
    name = "light"
    accepts = ("image",)
    concurrency = 1

    async def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return [Score(float(np.random.default_rng().random())) for _ in media]


class Workers(Roles):
    """The producers, reward workers, trainer and driver of a run, around a coordinator in another process."""

    def __init__(self, config: Config, coordinator: Any, store: ObjectStore, batch: int, rate: float) -> None:
        super().__init__(config, coordinator)
        seconds = batch * config.rollout.workers / rate
        random = np.random.default_rng(0)
        self._engines = [LightEngine(name, batch, seconds, random) for name in config.engine_names]
        self._clock, self._store = WallClock(), store

    async def play(self) -> None:
        """Work until cancelled."""
        config, peers = self._config, (self._coordinator, self._store, self._clock)
        producers = [Producer(engine.name, config, engine, *peers) for engine in self._engines]  # type: ignore[arg-type]
        rewards = [
            LoadedReward.load(config.reward, build=lambda *_: LightScorer()) for _ in range(config.reward.workers)
        ]
        rewarders = [Rewarder(f"reward-{i}", config, reward, *peers) for i, reward in enumerate(rewards)]
        roles: list[Producer | Rewarder] = [*producers, *rewarders]
        working = [role.run() for role in roles] + [engine.work() for engine in self._engines]
        async with asyncio.TaskGroup() as tasks:
            for work in (self._driver(), self._trainer(), *working):
                tasks.create_task(work)

    async def _publish(self) -> None:
        await self._coordinator.announce(self._version, "digest")
        for engine in self._engines:
            engine.version = self._version
        reports = [WeightReport(engine.name, self._version, "digest") for engine in self._engines]
        await asyncio.gather(*map(self._coordinator.engine_holds, reports))


# ---- measuring -------------------------------------------------------------------------------------------------------


def config_of(engines: int, batch: int) -> Config:
    """Return the configuration of a run with `engines`, which has about four samples of each update."""
    config = make_config(Shape(engines, max(4, engines // 4), 16), _UPDATES, _BUDGET)
    workers = max(1, engines // _ENGINES_PER_REWARD_WORKER)
    return replace(config, reward=replace(config.reward, workers=workers, batch=batch))


async def measure(engines: int, batch: int, rate: float, seconds: float, ledger: Path) -> Reading:
    config = config_of(engines, batch)
    actor = actor_class().options(num_cpus=0).remote(partial(Measured, config, ledger), 1)
    coordinator = Proxy(COORDINATOR, actor, roles_of(config)[COORDINATOR].waiting_calls)
    working = asyncio.ensure_future(Workers(config, coordinator, RayStore(), batch, rate).play())
    live = (_BUDGET + 1) * config.trainer.groups_per_update * config.rollout.group_size
    try:
        for pause in (_WARM_S + live / rate, seconds):
            await asyncio.wait([working], timeout=pause)
            if working.done():
                working.result()
            reading = Reading(*await coordinator.reading())
        return reading
    finally:
        await cancel([working])
        ray.kill(actor)


def table(records: Sequence[Record]) -> Table:
    made = Table(title="one coordinator process on Ray: medians of the repeats", title_justify="left")
    for heading in ("engines", "together", "rate", "samples/s", "per CPU s", "calls a sample", "lag p50, p99 ms"):
        made.add_column(heading, justify="right")
    for arm in dict.fromkeys((record.engines, record.batch, record.rate) for record in records):
        readings = [one.reading for one in records if (one.engines, one.batch, one.rate) == arm]

        def middle(value: Callable[[Reading], float], of: Sequence[Reading] = readings) -> float:
            return statistics.median(map(value, of))

        made.add_row(
            str(arm[0]),
            str(arm[1]),
            f"{arm[2]:g}",
            f"{middle(lambda one: one.samples / one.seconds):,.0f}",
            f"{middle(lambda one: one.samples_per_cpu_s):,.0f}",
            f"{middle(lambda one: one.calls_per_sample):.2f}",
            f"{middle(lambda one: one.lag_p50_ms):.1f}, {middle(lambda one: one.lag_p99_ms):.1f}",
        )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("coordinator_on_ray", _HELP)
    parser.add_argument("--engines", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], help="samples that finish together")
    parser.add_argument("--rates", nargs="+", type=float, default=[200.0], help="samples/s of all engines")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each repeat (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if min(*args.engines, *args.batches, *args.rates, args.repeats, args.seconds) < 1 or max(args.batches) > 16:
        parser.error("expected numbers of at least 1, and batches of at most 16")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    records: list[Record] = []
    connection = connect(None, 1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(args.repeats):
                for engines, batch, rate in [(e, b, r) for r in args.rates for e in args.engines for b in args.batches]:
                    ledger = Path(folder) / f"{len(records)}.jsonl"
                    reading = asyncio.run(measure(engines, batch, rate, args.seconds, ledger))
                    records.append(Record(engines, batch, rate, repeat, reading))
                    console.print(
                        f"{repeat + 1}/{args.repeats} {engines} engines, {batch} together:"
                        f" {reading.samples / reading.seconds:,.0f} samples/s, {reading.samples_per_cpu_s:,.0f} per CPU"
                        f" second, {reading.calls_per_sample:.2f} calls a sample, p99 lag {reading.lag_p99_ms:.1f} ms"
                    )
    finally:
        connection.close()
    args.out.mkdir(parents=True, exist_ok=True)
    path = write_json(args.out / "results.json", Results(describe_machine(), records))
    console.print(table(records))
    console.print(f"results: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

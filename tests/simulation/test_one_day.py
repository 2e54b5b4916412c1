"""Plays one day of virtual time: 1,000 engines and 200 reward workers around the real coordinator, of which a thousand
and two hundred are lost, racks that go dark, four restarts.

The roles are stand-ins, so that a million samples fit into minutes: an engine makes one sample at a time, weights
arrive at a random time, calls take no time but are made again, or arrive late from dead engines. The real roles are
simulated in chaos_world. `Fleet` owns what outlives a restart of everything: the ledger's lines, the newest checkpoint,
the dice.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, cast

import pytest

from omni_async.config import Config
from omni_async.control.control_state import ControlState
from omni_async.control.coordinator import Coordinator
from omni_async.simulation.virtual_time import VirtualTimeLoop, run
from omni_async.simulation.world import at_once
from omni_async.types import (
    LedgerEntry,
    Prompt,
    ReadyGroup,
    SampleRequest,
    SampleResult,
    Score,
    ScoreJob,
    ScoreResult,
    UpdateReport,
    VersionSpans,
    WeightReport,
)
from tests.simulation.chaos_job import Checks, Job, Violation, make_config
from tests.simulation.chaos_network import Process
from tests.simulation.chaos_roles import Made, Reference

DAY_S = 86_400.0


@dataclass(frozen=True)
class Times:
    """Mean seconds, drawn within a factor of two around; `*_lost_s` is the time between two losses in the whole
    fleet."""

    sample_s: float = 90.0
    score_s: float = 2.0
    group_s: float = 1.2  # training on a group
    step_s: float = 8.0
    weights_s: float = 6.0
    checkpoint_s: float = 20.0
    detection_s: float = 30.0
    hang_s: float = 300.0  # before a hung engine is given up
    start_s: float = 120.0
    restart_s: float = 300.0
    engine_lost_s: float = DAY_S / 1000
    scorer_lost_s: float = DAY_S / 200
    rack_lost_s: float = DAY_S / 4
    killed_s: float = DAY_S / 4


class Fleet:
    def __init__(self, config: Config, times: Times, end_s: float, rack: int) -> None:
        self.config, self.times, self.end_s, self.rack = config, times, end_s, rack
        self.dice = random.Random(0)
        self.prompts = [Prompt(index, "a prompt") for index in range(1000)]
        self.checks = Checks(Job(0, config, None), self.prompts)  # type: ignore[arg-type]
        self.seen: Counter[str] = Counter()
        self.lines: list[LedgerEntry] = []
        self.checkpoint = ControlState()
        self.updates: list[float] = []  # when each was made
        self.now = 0.0

    def run(self) -> Fleet:
        status = ""
        while status != "interrupted":
            del self.lines[self.checkpoint.ledger.lines :]
            self.checks.goes_on(self.checkpoint, self.lines)
            status = run(Attempt(self).work(), start=self.now)
            self.seen[f"attempt: {status}"] += 1
        return self

    def about(self, seconds: float) -> float:
        return seconds * (0.5 + self.dice.random())

    def chance(self, odds: float) -> bool:
        return self.dice.random() < odds


class Engine(Process):
    """One incarnation of an engine."""

    version = -1
    making: SampleRequest | None = None


class Attempt:
    """One attempt of the fleet: from one start of everything to the next."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.config, self.times = fleet, fleet.config, fleet.times
        self.coordinator = Coordinator(fleet.config, "day", fleet.prompts, [], self._record, fleet.checkpoint)
        self.version = fleet.checkpoint.version
        self.engines: dict[str, Engine] = {}
        self.scorers: dict[str, asyncio.Task[None]] = {}
        self.over = False
        self._numbers, self._tasks = count(), set[asyncio.Task[Any]]()

    async def work(self) -> str:
        self.loop, fleet = cast(VirtualTimeLoop, asyncio.get_running_loop()), self.fleet
        self.verdict: asyncio.Future[str] = self.loop.create_future()
        for name in self.config.engine_names:
            self._start_engine(Engine(name))
        for number in range(self.config.reward.workers):
            self._start_scorer(f"reward-{number}")
        self._begin(self._train())
        for what in ("engine_lost", "scorer_lost", "rack_lost", "killed"):
            self._begin(self._again_and_again(getattr(self, f"_{what}"), getattr(self.times, f"{what}_s")))
        self.loop.call_at(fleet.end_s, lambda: self._begin(self.coordinator.stop("the day is over")))
        try:
            return await self.verdict
        finally:
            self.over = True
            fleet.now = self.loop.time()

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.verdict.done():
            self.verdict.set_exception(error)

    def _record(self, entry: LedgerEntry) -> None:
        if not self.over:
            self.fleet.lines.append(entry)

    async def _again_and_again(self, what: Callable[[], None], every_s: float) -> None:
        while True:
            await self.loop.sleep_until(self.loop.time() + self.fleet.dice.expovariate(1 / every_s))
            if self.coordinator._closed:
                return
            what()

    # ---- engines -----------------------------------------------------------------------------------------------------

    def _start_engine(self, engine: Engine) -> None:
        self.engines[engine.name] = engine
        engine.tasks.append(self._begin(self._generate(engine)))

    async def _about(self, seconds: float) -> None:
        await self.loop.sleep_until(self.loop.time() + self.fleet.about(seconds))

    async def _generate(self, engine: Engine) -> None:
        fleet, coordinator = self.fleet, self.coordinator
        while requests := await coordinator.next_samples(engine.name, 1, 1):
            engine.making = requests[0]
            first = engine.version
            await self._about(self.times.sample_s)
            fleet.seen["samples"] += 1
            if fleet.chance(0.0005):
                await coordinator.sample_failed(engine.name, engine.making.sample_id, "out of memory")
                continue
            result = self._result(engine, engine.making, first)
            await coordinator.samples_done(engine.name, [result])
            if fleet.chance(0.01):
                await coordinator.samples_done(engine.name, [result])

    def _result(self, engine: Engine, request: SampleRequest, first: int) -> SampleResult:
        """Returns the result of a sample; new weights came, if any, after two steps."""
        versions = (first,) * 2 + (engine.version,) * (request.num_inference_steps - 2)
        assert request.window is not None
        trained = VersionSpans.of(versions[step] for step in request.window.steps)
        made = Reference(engine, Made(request, versions))
        return SampleResult(request.sample_id, engine.name, made, None, first, trained, 0.0, 0.0)

    def _engine_lost(self) -> None:
        if self.engines:
            self._lose(self.fleet.dice.choice([*self.engines]))

    def _rack_lost(self) -> None:
        self.fleet.seen["rack lost"] += 1
        for name in self.fleet.dice.sample([*self.engines], min(len(self.engines), self.fleet.rack)):
            self._lose(name)

    def _lose(self, name: str) -> None:
        engine = self.engines.pop(name)
        engine.tasks[0].cancel()
        self.fleet.seen["engine lost"] += 1
        self._begin(self._replace(engine))

    async def _replace(self, lost: Engine) -> None:
        fleet, times = self.fleet, self.times
        hung = fleet.chance(0.1)
        await asyncio.sleep(times.hang_s if hung else fleet.about(times.detection_s))
        await self.coordinator.engine_lost(lost.name, "hung" if hung else "died")
        if fleet.chance(0.5):  # its machine is gone too
            lost.dead = True
            await self.coordinator.objects_lost(lost.name)
        if lost.making is not None and fleet.chance(0.3):  # it was under way
            fleet.seen["late answer"] += 1
            await self.coordinator.samples_done(lost.name, [self._result(lost, lost.making, lost.version)])
            await self.coordinator.engine_holds(WeightReport(lost.name, max(0, lost.version), "late"))
        await asyncio.sleep(fleet.about(times.start_s))
        engine = Engine(f"rollout-{next(self._numbers)}.new")
        await self.coordinator.engine_joins(engine.name)
        self._start_engine(engine)
        if (newest := self.coordinator.versions.published) is not None:
            self._send(engine, newest)

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        await self.coordinator.announce(self.version, f"digest {self.version}")
        for engine in self.engines.values():
            self._send(engine, self.version)

    def _send(self, engine: Engine, version: int) -> None:
        self.loop.call_when(self.loop.time() + self.fleet.about(self.times.weights_s), self._arrive, engine, version)

    def _arrive(self, engine: Engine, version: int) -> None:
        if engine.name in self.engines and engine.version < version:
            engine.version = version
            at_once(self.coordinator.engine_holds(WeightReport(engine.name, version, f"digest {version}")))

    # ---- reward workers ----------------------------------------------------------------------------------------------

    def _start_scorer(self, name: str) -> None:
        self.scorers[name] = self._begin(self._score(name))

    async def _score(self, name: str) -> None:
        coordinator = self.coordinator
        while jobs := await coordinator.next_to_score(name, self.config.reward.batch):
            await self._about(self.times.score_s)
            await coordinator.scored(name, [self._scored(job) for job in jobs])

    def _scored(self, job: ScoreJob) -> ScoreResult:
        if self.fleet.chance(0.0005):
            return ScoreResult(job.sample_id, job.attempt, error="unreadable")
        group, sample = job.sample_id[1:].split(".s")
        reward = 0.5 if int(group) % 50 == 7 else float(sample)  # one group in fifty has equal rewards
        return ScoreResult(job.sample_id, job.attempt, score=Score(reward))

    def _scorer_lost(self) -> None:
        name = self.fleet.dice.choice([*self.scorers])
        self.scorers.pop(name).cancel()
        self.fleet.seen["scorer lost"] += 1
        self._begin(self._replace_scorer(name))

    async def _replace_scorer(self, name: str) -> None:
        await asyncio.sleep(self.fleet.about(self.times.detection_s))
        await self.coordinator.scorer_lost(name)
        await asyncio.sleep(self.fleet.about(self.times.start_s))
        self._start_scorer(f"reward-{next(self._numbers)}.new")

    # ---- the trainer -------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        fleet, trainer = self.fleet, self.config.trainer
        await self._publish()
        going = True
        while going:
            groups: list[ReadyGroup] = []
            while len(groups) < trainer.groups_per_update:
                args = (self.version, trainer.groups_per_update - len(groups))
                taken = await self.coordinator.next_groups(*args)
                fleet.checks.message(self.coordinator, "next_groups", args, taken)
                if not taken:
                    self._end()
                    return
                for group in taken:
                    if any(sample.trajectory.owner.dead for sample in group.samples):
                        fleet.seen["group gone"] += 1
                        await self.coordinator.group_gone(group.group, "its trajectories were on a lost machine")
                        continue
                    groups.append(group)
                    await asyncio.sleep(fleet.about(self.times.group_s))
            await asyncio.sleep(fleet.about(self.times.step_s))
            self.version += 1
            report = UpdateReport(self.version, tuple(group.group for group in groups), {}, 0.0, 0.0)
            going = await self.coordinator.update_done(report)
            fleet.checks.message(self.coordinator, "update_done", (report,), going)
            fleet.updates.append(self.loop.time())
            await self._publish()
            if self.version % self.config.checkpoint.every == 0:
                kept = await self.coordinator.continuation()
                self.loop.call_when(self.loop.time() + self.times.checkpoint_s, self._keep, kept)
        self._end()

    def _keep(self, checkpoint: ControlState) -> None:
        self.fleet.checkpoint = checkpoint
        self.fleet.seen["checkpoint"] += 1

    def _end(self) -> None:
        assert self.coordinator._ending.outcome is not None
        status, reason = self.coordinator._ending.outcome
        if status == "failed":
            raise Violation(f"the run failed: {reason}")
        if not self.verdict.done():
            self.verdict.set_result(status)

    def _killed(self) -> None:
        """Kills everything; all roles go on from the newest checkpoint."""
        self.fleet.seen["kill"] += 1
        self.over = True
        self._begin(self._down())

    async def _down(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(self.fleet.about(self.times.restart_s))
        if not self.verdict.done():
            self.verdict.set_result("killed")


# ---- the days --------------------------------------------------------------------------------------------------------

SIZE, S = 8, 2


def play_day(engines: int, scorers: int, groups: int, times: Times, end_s: float = DAY_S) -> Counter[str]:
    """Checks everything but the number of faults, which it returns."""
    config = make_config(
        rollout__workers=engines,
        rollout__group_size=SIZE,
        rollout__max_inflight=1,
        rollout__max_batch=1,
        rollout__num_inference_steps=10,
        rollout__sde={"window": {"size": 2, "range": [0, 5]}},
        rollout__retries=5,
        reward__workers=scorers,
        reward__batch=4,
        staleness__max_updates=S,
        buffer__trajectories=2 * engines + 48,
        buffer__groups=(S + 1) * groups,
        buffer__window=groups,
        trainer__updates=100_000,
        trainer__groups_per_update=groups,
        checkpoint__every=10,
    )
    assert config is not None
    began = time.perf_counter()
    fleet = Fleet(config, times, end_s, rack=engines // 10).run()
    seen, lines, rate = fleet.seen, fleet.lines, fleet.seen["samples"] / (time.perf_counter() - began)
    sys.stdout.write(f"{dict(seen)}; {len(fleet.updates)} updates, {rate:.0f} samples/s\n")

    assert fleet.now >= end_s
    assert seen["attempt: killed"] == seen["kill"] >= 1 and seen["rack lost"] >= 1
    numbers = sorted(line.group for line in lines)
    assert numbers == [*range(len(numbers))], "each group ended in exactly one line, over all attempts"
    by_update = Counter(line.trained_version for line in lines if line.event == "trained")
    assert by_update == dict.fromkeys(range(1, len(by_update) + 1), groups)
    assert max(line.staleness for line in lines if line.staleness is not None) <= S
    unfinished = [line for line in lines if (line.reason or "").startswith("run interrupted")]
    assert len(unfinished) <= (S + 1) * groups, "at the end of the day"
    dropped = sum(line.event == "dropped" for line in lines) - len(unfinished)
    assert dropped < 0.001 * len(lines), "a lost engine costs a group nothing but time"
    rejected = {(line.reason, line.group % 50) for line in lines if line.event == "rejected"}
    assert rejected == {("zero reward variance", 7)}
    longest = max(later - earlier for earlier, later in pairwise(fleet.updates))
    assert longest < 1800, "progress: at worst a restart, and the longest hang"
    return seen


def test_two_hours_of_a_hundred_engines() -> None:
    """Plays more faults for each engine and hour than in the day below."""
    hour = 3600.0
    times = Times(engine_lost_s=hour / 40, scorer_lost_s=hour / 10, rack_lost_s=hour / 2, killed_s=hour / 2)
    seen = play_day(engines=100, scorers=20, groups=8, times=times, end_s=2 * hour)
    assert seen["engine lost"] > 40 and seen["scorer lost"] > 5


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_one_day_of_a_thousand_engines() -> None:
    seen = play_day(engines=1000, scorers=200, groups=64, times=Times())
    assert seen["engine lost"] > 800 and seen["scorer lost"] > 120 and seen["late answer"] > 100

"""Plays a job of real roles in a hostile world, from one seed: coordinator, producers, reward workers, trainer and
publisher on virtual time, over a network that delays and repeats messages, with processes that crash, hang and are
replaced, until the job is done.

An *attempt* is what runs between two kills of everything: an event loop and all roles of its own. `World` owns what
outlives it: the newest checkpoint, the ledger's lines, the dice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import count
from typing import Any

from omni_async.control.control_state import ControlState
from omni_async.control.coordinator import Coordinator
from omni_async.control.events import RunEvent
from omni_async.control.seeds import derive
from omni_async.roles.emulated import EmulatedRule
from omni_async.roles.plan import plan_updates
from omni_async.roles.producer import Producer
from omni_async.roles.publisher import WeightPublisher
from omni_async.rollout.base import EngineError
from omni_async.simulation.virtual_time import VirtualClock, run
from omni_async.types import LedgerEntry, Prompt, SampleRequest
from omni_async.weights.transport.object_store import ObjectStoreSender
from tests.simulation.chaos_job import Checks, Job, Violation
from tests.simulation.chaos_network import CoordinatorProxy, Network, Process, ProducerProxy
from tests.simulation.chaos_roles import Engine, QuietTracer, Rank, Scorer, SimulatedRewarder, SimulatedTrainer, Store

MOST_ATTEMPTS = 12
MOST_MESSAGES = 30_000  # of an attempt: roles without progress send for ever
LONGEST_S = 1e6  # virtual; no timer of its own, because a deadlock is one where no timer is pending


class World:
    def __init__(self, job: Job, trace: bool = False) -> None:
        self.job, self.config, self.temper = job, job.config, job.temper
        self.dice = random.Random(f"world/{job.seed}")
        self.trace = trace
        self.prompts = [Prompt(index, f"prompt {index}") for index in range(job.prompts)]
        self.checks = Checks(job, self.prompts)
        self.seen: Counter[str] = Counter(self._kind_of_job())  # what happened: for coverage
        self.faults = list(job.faults)
        self.messages = 0
        self.checkpoint: ControlState | None = None
        self.lines: list[LedgerEntry] = []
        self.now = 0.0
        self._attempt: Attempt | None = None

    def run(self) -> World:
        """Runs until the job is done. Raises Violation, or DeadlockError."""
        for number in count(1):
            if number > MOST_ATTEMPTS:
                raise Violation(f"not done after {MOST_ATTEMPTS} attempts")
            start = self.checkpoint or ControlState()
            del self.lines[start.ledger.lines :]
            self.checks.goes_on(start, self.lines)
            self._attempt = attempt = Attempt(self, start)
            dice = random.Random(f"order/{self.job.seed}/{number}") if self.temper.shuffled else None
            try:
                status = run(attempt.play(), start=self.now, dice=dice)
            finally:
                attempt.release()
            self.seen[f"attempt ended: {status}"] += 1
            if status == "done":
                self.checks.ledger(self.lines)
                return self
            if status == "fruitless":
                return self
        raise AssertionError

    def _kind_of_job(self) -> list[str]:
        config, temper = self.config, self.temper
        always = [f"swap: {config.weights.swap}", f"S = {config.staleness.max_updates}"]
        kinds = {
            "scored in step": not config.reward.streaming,
            "exact": config.staleness.exact,
            "validated": config.validation is not None,
            "several steps": config.trainer.steps_per_update > 1,
            "one slot for samples": config.buffer.trajectories == 1,
            "one slot for groups": config.buffer.groups == 1,
            "shuffled": temper.shuffled,
            "stores die": temper.store_dies,
        }
        return always + [kind for kind, there in kinds.items() if there]

    # ---- chance ------------------------------------------------------------------------------------------------------

    def seconds(self, longest: float) -> float:
        """Draws seconds that are rarely much longer than `longest`."""
        if not longest:
            return 0.0
        drawn = self.dice.random() * longest * (10 if self.dice.random() < 0.02 else 1)
        return round(drawn / self.temper.grain) * self.temper.grain if self.temper.grain else drawn

    def seconds_of(self, what: str) -> float:
        """Draws the seconds of a `message`, of training (`train`), ..."""
        return self.seconds(getattr(self.temper, f"{what}_s"))

    def step_s(self, request: SampleRequest) -> float:
        slow = request.kind == "train" and self._always("slow", request.group, self.temper.slow_groups)
        return self.seconds_of("step") * (5 if slow else 1)

    def _always(self, what: str, group: int, odds: float) -> bool:
        return odds > 0 and derive(what, self.job.seed, group) % 1000 < 1000 * odds

    def generation_fails(self, request: SampleRequest) -> bool:
        if request.kind == "train" and self._always("failing", request.group, self.temper.lasting_failures):
            self.seen["generation failed for good"] += 1
            return True
        fails = self.dice.random() < self.temper.generation_fails
        self.seen["generation failed"] += fails
        return fails

    def score_fails(self) -> bool:
        fails = self.dice.random() < self.temper.score_fails
        self.seen["score failed"] += fails
        return fails

    def reward(self, group: int, sample: int) -> float:
        return 0.5 if self._always("equal", group, self.temper.equal_rewards) else float(sample)

    # ---- checks by the roles -----------------------------------------------------------------------------------------

    def require(self, holds: bool, what: str) -> None:
        """Ends the attempt with a Violation unless `holds`, even if a role swallows what is raised in it."""
        if not holds:
            assert self._attempt is not None
            self._attempt.broken(Violation(what))

    def check_request(self, request: SampleRequest) -> None:
        try:
            self.checks.request(request)
        except Violation as violation:
            self.require(False, str(violation))

    def say(self, what: str) -> None:
        if self.trace:
            print(f"{self.now:12.3f}  {self.messages:5d}  {what}")  # noqa: T201


class Attempt:
    def __init__(self, world: World, start: ControlState) -> None:
        self.world, self.config, self.start = world, world.config, start
        self.events: list[RunEvent] = []
        self.alive = True
        self.engines: dict[str, tuple[Process, Engine]] = {}
        self.scorers: dict[str, Process] = {}
        self._ends: dict[str, asyncio.Future[str]] = {}  # why a process was given up
        self._messages = 0
        self._processes: list[Process] = []  # dead ones as well: hanging tasks in them must not be collected

    def _process(self, name: str) -> Process:
        self._processes.append(Process(name))
        return self._processes[-1]

    def release(self) -> None:
        """Lets go of what ran in the processes, once the attempt is over."""
        for process in self._processes:
            process.forget()

    async def play(self) -> str:
        """Returns how it ended: done, interrupted, killed, or fruitless."""
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[str] = self._loop.create_future()
        self._build()
        self._loop.create_task(self._work(), name="attempt").add_done_callback(self._worked)
        try:
            return await self._verdict
        finally:
            self.alive = False
            self.world.now = self._loop.time()
            self.world.checks.attempt(self.start.version, self.events)

    def _worked(self, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and (error := task.exception()):
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.broken(error)
        elif not task.cancelled() and not self._verdict.done():
            self._verdict.set_result(task.result())

    def broken(self, error: BaseException) -> None:
        if not self._verdict.done():
            self._verdict.set_exception(error)

    def _build(self) -> None:
        world, config = self.world, self.config
        held_out = [Prompt(index, f"held out {index}") for index in range(2)]
        self.coordinator = Coordinator(config, "run", world.prompts, held_out, self._record, self.start)
        self.network = Network(self, world)
        self.keeper = self._process("keeper")
        self.keeper_proxy = self._proxy(self.keeper)
        self.training = training = self._process("trainer")
        coordinator, store, clock = self._proxy(training), Store(training, world), VirtualClock()
        self.rank = Rank(training, world, store)
        rule: Any = EmulatedRule(config, plan_updates(config), self.rank)  # type: ignore[arg-type]
        self._first = {slot: self._engine(f"rollout-{slot}") for slot in range(config.rollout.workers)}
        producers: Any = {process.name: proxy for process, _, proxy in self._first.values()}
        publisher = WeightPublisher(config, producers, coordinator, ObjectStoreSender(store), clock)  # type: ignore[arg-type]
        publisher._tracer = QuietTracer("publisher", coordinator, clock)
        self.trainer = SimulatedTrainer(self._keep, config, [self.rank], rule, coordinator, publisher, store, "", clock)

    def _engine(self, name: str) -> tuple[Process, Producer, ProducerProxy]:
        process = self._process(name)
        engine = Engine(process, self.world)
        producer = Producer(name, self.config, engine, self._proxy(process), Store(process, self.world), VirtualClock())
        producer._tracer = QuietTracer(name, None, VirtualClock())  # type: ignore[arg-type]
        self.engines[name] = (process, engine)
        self._ends[name] = self._loop.create_future()
        return process, producer, ProducerProxy(self.network, self.training, process, producer)

    def _proxy(self, process: Process) -> Any:
        return CoordinatorProxy(self.network, process, self.coordinator)

    def _no_failure(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken(error)

    def _record(self, entry: LedgerEntry) -> None:
        if self.alive:
            self.world.lines.append(entry)
            self.world.seen[f"group {entry.event}"] += 1

    def _keep(self, control: ControlState) -> None:
        if self.alive:
            self.world.say(f"checkpoint {control.version}")
            self.world.seen["checkpoint"] += 1
            self.world.seen["checkpoint with ready groups"] += bool(control.ready)
            self.world.checkpoint = control

    # ---- the roles ---------------------------------------------------------------------------------------------------

    async def _work(self) -> str:
        await self.trainer.start_from(self.start)
        keepers = [self._keep_engine(slot) for slot in range(self.config.rollout.workers)]
        keepers += [self._keep_scorer(slot) for slot in range(self.config.reward.workers)]
        self.training.start(self.trainer.run_publisher(), "publisher").add_done_callback(self._no_failure)
        training = self.training.start(self.trainer.run(), "trainer")
        async with asyncio.TaskGroup() as tasks:
            for keeper in keepers:
                tasks.create_task(keeper)
            tasks.create_task(asyncio.wait_for(training, None))
            tasks.create_task(self._watch())
        ended = next(event.data for event in self.events if event.kind == "ended")
        status, reason = ended["status"], ended["reason"]
        if status == "failed":
            if "in a row ended without being trained" not in reason:
                raise Violation(f"the run failed: {reason}")
            return "fruitless"
        return str(status)

    async def _watch(self) -> None:
        while not any(event.kind == "ended" for event in self.events):
            news = await self.coordinator.events()
            self.events += news
            for event in news:
                if event.kind == "lost":
                    self._lost(event.data["name"], event.data["reason"])

    async def _keep_engine(self, slot: int) -> None:
        """Keeps an engine running, by replacements."""
        for incarnation in count():
            made = self._engine(f"rollout-{slot}.{incarnation}") if incarnation else self._first[slot]
            process, producer, proxy = made
            name = process.name
            reason = await self._admitted(name, proxy) if incarnation else None
            reason = reason or await self._end_of(process, producer.run())
            if reason is None:
                return
            del self.engines[name]
            await self._detected(process)
            await self._call(self.trainer.remove_engine, name)
            await self.keeper_proxy.engine_lost(name, reason)
            if self.world.temper.store_dies:
                await self.keeper_proxy.objects_lost(name)
            if self._over:
                return
            self.world.seen["engine replaced"] += 1

    async def _admitted(self, name: str, proxy: ProducerProxy) -> str | None:
        """Waits until the engine holds the current weights. Returns why it does not, or None."""
        await self.keeper_proxy.engine_joins(name)
        try:
            await self._call(self.trainer.admit, name, proxy)
        except EngineError as error:
            self.world.seen["engine lost while it joined"] += 1
            return str(error)
        return None

    async def _call(self, target: Any, *args: Any) -> Any:
        return await self.network.call(self.keeper, target.__name__, target, *args)

    async def _keep_scorer(self, slot: int) -> None:
        for incarnation in count():
            name = f"reward-{slot}" + (f".{incarnation}" if incarnation else "")
            process = self._process(name)
            store = Store(process, self.world)
            scorer, proxy = Scorer(self.world), self._proxy(process)
            rewarder = SimulatedRewarder(name, self.config, scorer, proxy, store, VirtualClock())
            self.scorers[name] = process
            self._ends[name] = self._loop.create_future()
            reason = await self._end_of(process, rewarder.run())
            del self.scorers[name]
            if reason is None:
                return
            await self._detected(process)
            await self.keeper_proxy.scorer_lost(name)
            if self._over:
                return
            self.world.seen["scorer replaced"] += 1

    async def _end_of(self, process: Process, work: Any) -> str | None:
        """Returns why a worker is gone; None if it ended because the run is over."""
        given_up = self._ends[process.name]
        task = process.start(work, process.name)
        # It may have been given up before it failed.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([task, given_up], return_when=asyncio.FIRST_COMPLETED)
        if given_up.done():
            return given_up.result()
        if task.cancelled():
            return "crashed"
        error = task.exception()
        if error is None:
            if self._over:
                return None
            if process.name.startswith("reward") or self.coordinator.versions.knows(process.name):
                raise Violation(f"{process.name} was ended in the middle of the run")
            return await given_up  # the publisher or the keeper will report it
        if not isinstance(error, EngineError) or not process.hung:
            raise error  # nothing was wrong with it
        self.world.seen["hang found by a timeout"] += 1
        return str(error)

    async def _detected(self, process: Process) -> None:
        process.kill()
        if seconds := self.world.seconds(self.world.temper.detection_s):
            await asyncio.sleep(seconds)

    @property
    def _over(self) -> bool:
        return self.coordinator._plane.closed

    def _lost(self, name: str, reason: str) -> None:
        """Gives up an engine that the keeper here, or the publisher, reported to the coordinator."""
        found = self.engines.get(name)
        if found is None:
            return
        if not (found[0].hung or found[0].dead):
            self.broken(Violation(f"{name} was healthy, and is given up: {reason}"))
        self.world.seen["loss found by the publisher"] += 1
        self._give_up(name, reason)

    def _give_up(self, name: str, reason: str) -> None:
        if not (end := self._ends[name]).done():
            end.set_result(reason)

    # ---- what happens to them ----------------------------------------------------------------------------------------

    def delivered(self, caller: Process, call: str, args: tuple[Any, ...], answer: Any) -> None:
        world = self.world
        world.messages += 1
        self._messages += 1
        if world.trace:
            world.now = self._loop.time()
            world.say(f"{caller.name}{' (dead)' if caller.dead else ''}: {call}{_short(args)} -> {_short(answer)}")
        if self._messages > MOST_MESSAGES or self._loop.time() > LONGEST_S:
            raise Violation(f"no end after {self._messages} messages and {self._loop.time():.0f} s")
        world.seen["group given back"] += call == "group_gone"
        world.checks.message(self.coordinator, call, args, answer)
        while world.faults and world.faults[0][0] <= world.messages:
            _, kind = world.faults.pop(0)
            temper = world.temper
            longest = world.dice.choice([0.0, temper.message_s, temper.step_s, temper.train_s])
            self._loop.call_later(world.seconds(longest), self._strike, kind)

    def _strike(self, kind: str) -> None:
        if self._verdict.done():
            return
        self.world.say(f"!!! {kind}")
        what, _, how = kind.rpartition(" ")
        engines = [process for process, _ in self.engines.values()]
        match what:
            case "engine":
                self._hurt(engines, how)
            case "scorer":
                self._hurt(list(self.scorers.values()), how)
            case _:
                self._note(kind)
                if kind == "kill":
                    self._verdict.set_result("killed")
                elif kind == "stop":
                    self._loop.create_task(self.coordinator.stop("ctrl-c"))
                else:
                    for process in engines:
                        self._hurt([process], "crash")

    def _hurt(self, candidates: list[Process], how: str) -> None:
        healthy = [process for process in candidates if not process.dead and not process.hung]
        if not healthy:
            return
        running = {name: engine.running for name, (_, engine) in self.engines.items()}
        busy = [one for one in healthy if one.name in running and (running[one.name] or one.doing)]
        process = self.world.dice.choice(busy if busy and self.world.dice.random() < 0.7 else healthy)
        kind = "engine" if process.name.startswith("rollout") else "scorer"
        self._note(f"{kind} {how}")
        if kind == "engine":
            self._note_engine(how, *self.engines[process.name])
        if how == "crash":
            process.kill()
            return
        process.hung = True
        found_after = self.world.dice.choice([10.0, 10_000.0])  # a heartbeat, unless a timeout of its own comes first
        self._loop.call_later(found_after, lambda: process.dead or self._give_up(process.name, "it does not answer"))

    def _note(self, what: str) -> None:
        """Counts an event, also with the phase that the trainer is in."""
        doing = sorted(self.training.doing) or ["between"]
        if self.coordinator.versions.held is None:
            doing = ["before the first version"]
        elif self._over:
            doing = ["closing"]
        self.world.seen[what] += 1
        for phase in doing:
            self.world.seen[f"{what} / trainer {phase}"] += 1

    def _note_engine(self, how: str, process: Process, engine: Engine) -> None:
        doing = [*process.doing, *(["generating"] if engine.running else [])] or ["idle"]
        if self.coordinator.versions.of(process.name) < 0:
            doing.append("joining")
        for phase in doing:
            self.world.seen[f"engine {how} / {phase}"] += 1


def _short(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_short(one) for one in value) + ")"
    for name in ("sample_id", "group", "version"):
        if hasattr(value, name):
            attempt = f"#{value.attempt}" if hasattr(value, "attempt") else ""
            return f"{name[0]}:{getattr(value, name)}{attempt}" + ("!" if getattr(value, "error", None) else "")
    return repr(value)[:60]

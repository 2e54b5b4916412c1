"""Tests the real coordinator under arbitrary interleavings: the invariants after every step, and that every run ends.

Every rule is one message of one role, or a turn of the event loop; messages arrive late, twice, or from the wrong
engine, waiters are cancelled, and the run may be stopped at any point. At the end well-behaved roles take over and must
bring the run to its end.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from omni_async.config import Config
from omni_async.control.control_state import ControlState
from omni_async.types import ReadyGroup, SampleRequest, Score, ScoreJob, ScoreResult, WeightReport
from tests.control.control_world import (
    MEDIA_BYTES,
    SAMPLE_BYTES,
    bytes_of,
    digest_of,
    make_config,
    make_coordinator,
    make_result,
    now,
    number_of,
    report,
    trained_steps,
)


def random_config(dice: random.Random) -> Config:
    max_updates, per_update, group_size = dice.randint(0, 4), dice.randint(1, 4), dice.randint(2, 3)
    exact = dice.random() < 0.25
    # From the least that works, one update's groups, to more than there are slots.
    trajectories, images = dice.choice([1, 2, 3, 8, 64]), dice.choice([1, 2, 16])
    update = per_update * group_size
    least = update * SAMPLE_BYTES + min(update, trajectories + images) * MEDIA_BYTES
    bound = least * dice.choice([100, 130, 200, 700]) // 100
    share = dice.choice([0.1, 0.5, 1.0])
    rounds = {"every": dice.randint(1, 4), "samples_per_prompt": dice.randint(1, 2), "share": share}
    any_of: dict[str, Sequence[Any]] = {
        "max_bytes": [None, None if exact else bound],
        "buckets": [(), (), (1.0, 1.0), (1.0, 5.0, 2.0)],
        "updates": range(1, 9),
        "window": range(1, 7),
        "publish_every": range(1, 2 if exact else max_updates + 2),
        "trajectories": [trajectories],
        "images": [images],
        "images_every": [1, 3],
        "groups": [max(number, (max_updates + 1) * per_update if exact else 1) for number in (1, 2, 4, 16)],
        "engines": range(1, 4),
        "retries": range(3),
        "score_retries": range(3),
        "validation": [None, rounds],
        "steps": [None, None, 3],
        "score_at_once": [True, True, True, False, False],
    }
    drawn = {name: dice.choice(values) for name, values in any_of.items()}
    return make_config(S=max_updates, P=per_update, group_size=group_size, exact=exact, **drawn)


# What the arguments of moves are drawn from. `pick` and `back` choose from a list, from its front and from its end.
VALUES: dict[str, Sequence[Any]] = {
    "pick": range(2**16),
    "back": [*range(8)] * 3 + [20, 100, 500],
    "seed": range(2**16),
    "free": range(1, 5),
    "limit": range(1, 4),
    "rounds": range(1, 7),
    "worker": range(2),
    "failed": [False, True],
    "replaced": [False, True, True],
    "store_too": [False, True, True],
    "how": ["value"] * 6 + ["equal", "error", "down"],
}
# What may happen: when it may, the names of its arguments, and how often it does in long runs, as one of these weights.
MOVES: dict[str, tuple[Callable[[Any], Any], list[str], Sequence[float]]] = {}
Method = TypeVar("Method", bound=Callable[..., None])


def move(*often: float, when: Callable[[Any], Any] = lambda machine: True) -> Callable[[Method], Method]:
    """Makes a method a rule of the machine and one of the `MOVES`."""

    def made(method: Method) -> Method:
        names = [*inspect.signature(method).parameters][1:]
        MOVES[method.__name__] = when, names, often
        return precondition(when)(rule(**{name: st.sampled_from(VALUES[name]) for name in names})(method))

    return made


T = TypeVar("T")


def pop(items: list[T], pick: int) -> T:
    return items.pop(pick % len(items))


@dataclass
class Lease:
    """A sample an engine works on; `seen` are the versions the engine held since."""

    engine: str
    request: SampleRequest
    seen: list[int]


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.waiting: dict[str, asyncio.Task[Any]] = {}
        self.leases: list[Lease] = []
        self.at_engines: dict[str, str] = {}  # training samples, from the moment they are leased -> their engine
        self.generated: set[str] = set()  # training samples, also of groups that ended since
        self.sizes: dict[int, int] = {}  # bytes of a sample, by the buckets that are known from one
        self.answered: list[Lease] = []  # leases that were answered: material for second answers
        self.unscored: dict[str, str] = {}  # training and validation samples generated and not finally scored -> kind
        self.jobs: list[tuple[str, ScoreJob]] = []
        self.scored: list[tuple[str, ScoreJob]] = []
        self.groups: list[ReadyGroup] = []  # what the trainer holds
        self.sending: dict[str, int] = {}
        self.taken: list[int] = []
        self.returned: set[int] = set()  # groups that the trainer could not read
        self.made_again = False
        self.made_by: dict[str, str] = {}  # samples that were generated -> their engine
        self.next_value = 0
        self.ended: dict[str, Any] | None = None

    @initialize(
        config=st.builds(random_config, st.randoms(use_true_random=False)),
        start=st.sampled_from([0, 0, 0, 3]),
        may_stop=st.sampled_from([False, False, True]),
        stored=st.booleans(),
    )
    def begin(self, config: Config, start: int, may_stop: bool, stored: bool) -> None:
        """Begins a run. `stored`: samples without a window come from a dataset; no version took their steps."""
        self.config, self.may_stop, self.stored = config, may_stop, stored and config.rollout.sde is None
        self.start = min(start, config.trainer.updates)
        self.version = self.to_publish = self.start
        start_of_run = ControlState(version=self.start, next_group=10 * self.start)
        self.coordinator, self.entries = make_coordinator(config, start=start_of_run)
        self.bucket = cache(self.coordinator._plane.factory.bucket)
        self.engines = [*config.engine_names]
        self.workers = ["reward-0", "reward-1"]
        self.lost: list[str] = []
        self.holds = dict.fromkeys(self.engines, -1)
        self.oldest = -1  # version that every engine held at some time
        self.announced = -1

    # ---- the event loop ----------------------------------------------------------------------------------------------

    async def next_samples(self, engine: str, free: int) -> list[SampleRequest]:
        requests: list[SampleRequest] = await self.coordinator.next_samples(engine, free, 4)
        self.at_engines |= {request.sample_id: engine for request in requests if request.kind == "train"}
        return requests

    async def next_to_score(self, worker: str, limit: int) -> list[ScoreJob]:
        jobs: list[ScoreJob] = await self.coordinator.next_to_score(worker, limit)
        if not self.config.reward.streaming and any(job.kind == "train" for job in jobs):
            self.nothing_more_could_be_generated()
        return jobs

    def nothing_more_could_be_generated(self) -> None:
        """Checks `reward.streaming: false` at the moment samples are handed out to be scored."""
        assert not self.at_engines, f"scored although engines work on {self.at_engines}"
        waiting, slots = self.live_samples() - self.generated, self.buffers()["trajectories"]
        assert not waiting or slots["reserved"] == slots["capacity"], f"scored although {waiting} wait"

    def ask(self, who: str, work: Any) -> None:
        if who in self.waiting:
            work.close()
        else:
            self.waiting[who] = self.loop.create_task(work, name=who)

    @move(6)
    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for who in [who for who, task in self.waiting.items() if task.done()]:
            task = self.waiting.pop(who)
            if not task.cancelled():
                kind, _, name = who.partition(":")
                getattr(self, f"got_{kind}")(name, task.result())

    def got_samples(self, engine: str, requests: list[SampleRequest]) -> None:
        if engine in self.lost:
            return  # there is no engine to take them
        assert requests or self.over, f"{engine} was evicted in the middle of the run"
        for request in requests:
            assert self.holds[engine] >= 0, "a sample was leased to an engine without weights"
            self.leases.append(Lease(engine, request, [self.holds[engine]]))
            if request.kind == "validation" and not self.over:
                round_ = self.coordinator._plane.validation.rounds[request.group]
                assert request.sample_id not in round_.failed, "its round goes on without it"

    def num_versions(self, request: SampleRequest) -> int:
        return 0 if self.stored else len(trained_steps(request))

    def tell_done(self, lease: Lease, versions: tuple[int, ...] | None = None, engine: str | None = None) -> None:
        """Reports the lease's sample; unless said otherwise by its engine, all steps taken with the first version."""
        versions = (lease.seen[0],) * self.num_versions(lease.request) if versions is None else versions
        result = make_result(lease.request, engine or lease.engine, versions, version=lease.seen[0])
        now(self.coordinator.samples_done(result.engine, [result]))

    def tell_score(
        self, worker: str, job: ScoreJob, score: Score | None = None, error: str = "late", fault: Any = "retry"
    ) -> None:
        told = ScoreResult(job.sample_id, job.attempt, score=score, error=None if score else error, fault=fault)
        now(self.coordinator.scored(worker, [told]))

    def got_jobs(self, worker: str, jobs: list[ScoreJob]) -> None:
        if worker in self.lost:
            return
        assert jobs or self.over
        self.jobs += [(worker, job) for job in jobs]

    def got_groups(self, _: str, groups: list[ReadyGroup]) -> None:
        assert groups or self.over
        for group in groups:
            staleness = self.version - group.oldest_version
            assert 0 <= staleness <= self.config.staleness.max_updates
            if self.config.staleness.exact:
                self.nothing_else_could_be_trained(staleness)
            older = [g for g in self.untaken() if g < group.group and g not in self.returned]
            assert len(older) < self.config.buffer.window, f"{group.group} overtook {older}"
            self.taken.append(group.group)
            self.groups.append(group)
            self.returned.discard(group.group)

    def nothing_else_could_be_trained(self, staleness: int) -> None:
        """Checks `staleness.exact`: the newest weights are everywhere, all groups are ready and equally old."""
        assert {version for version in self.holds.values() if version >= 0} == {self.version}
        live = self.live()
        leased = [lease.request for lease in self.leases]
        making = [request.sample_id for request in leased if request.kind == "train" and request.group in live]
        unscored = [i for i, kind in self.unscored.items() if kind == "train" and number_of(i) in live]
        assert not making and not unscored, f"trained although {making} and {unscored} are on their way"
        expected = min(self.version - self.start, self.config.staleness.max_updates)
        younger = staleness < expected and self.made_again
        assert staleness == expected or younger, "only what was made a second time may be younger"

    def got_events(self, _: str, events: list[Any]) -> None:
        for event in events:
            assert self.ended is None, f"{event.kind} after the end"
            if event.kind == "ended":
                self.ended = event.data

    @property
    def over(self) -> bool:
        return self.coordinator._plane.closed

    # ---- rules: engines ----------------------------------------------------------------------------------------------

    @move(4, when=lambda self: self.engines)
    def ask_for_samples(self, pick: int, free: int) -> None:
        engine = self.engines[pick % len(self.engines)]
        self.ask(f"samples:{engine}", self.next_samples(engine, free))

    @move(5, when=lambda self: self.leases)
    def finish_sample(self, pick: int, seed: int) -> None:
        """Finishes a sample whose steps were taken with any of the versions the engine held meanwhile, in order."""
        lease = pop(self.leases, pick)
        size = self.num_versions(lease.request)
        self.finish(lease, tuple(sorted(random.Random(seed).choices(lease.seen, k=size))))

    def finish(self, lease: Lease, versions: tuple[int, ...]) -> None:
        request = lease.request
        alive = request.kind == "validation" or request.group in self.live()
        self.at_engines.pop(request.sample_id, None)
        self.tell_done(lease, versions)
        self.answered.append(lease)
        if alive and not self.over:
            self.unscored[request.sample_id] = request.kind
            self.generated.add(request.sample_id)
            self.made_by[request.sample_id] = lease.engine
            if request.kind == "train":
                self.sizes[self.bucket_of(request.sample_id)] = bytes_of(request)

    @move(0, 0.3, 1, when=lambda self: self.leases)
    def fail_sample(self, pick: int) -> None:
        lease = pop(self.leases, pick)
        self.at_engines.pop(lease.request.sample_id, None)
        now(self.coordinator.sample_failed(lease.engine, lease.request.sample_id, "out of memory"))
        self.answered.append(lease)

    @move(0, 0.5, when=lambda self: self.answered)
    def second_answer(self, back: int, failed: bool, pick: int) -> None:
        """Answers for a sample already answered; or, when it was leased again, from an engine that does not have it."""
        lease = self.answered[-1 - back % len(self.answered)]
        again = {x.engine for x in self.leases if x.request.sample_id == lease.request.sample_id}
        # Those that leased it, not yet seen here.
        again |= {who.removeprefix("samples:") for who, task in self.waiting.items() if task.done()}
        everybody = [*self.engines, *self.lost]
        engine = everybody[pick % len(everybody)]
        if engine not in again and failed:
            now(self.coordinator.sample_failed(engine, lease.request.sample_id, "late"))
        elif engine not in again:
            self.tell_done(lease, engine=engine)

    # ---- rules: reward workers ---------------------------------------------------------------------------------------

    @move(4)
    def ask_for_jobs(self, worker: int, limit: int) -> None:
        name = self.workers[worker]
        self.ask(f"jobs:{name}", self.next_to_score(name, limit))

    @move(6, when=lambda self: self.jobs)
    def answer_job(self, pick: int, how: str) -> None:
        worker, job = held = pop(self.jobs, pick)
        self.next_value += 1
        drawn = Score(0.5 if how == "equal" else 1.0 + self.next_value, {"ocr": 1.0})
        value = None if how in ("error", "down") else drawn
        self.tell_score(worker, job, value, "timeout", "outage" if how == "down" else "retry")
        self.scored.append(held)
        if value is not None:
            self.unscored.pop(job.sample_id, None)
        self.forget_failed()

    def forget_failed(self) -> None:
        """Forgets validation samples whose round goes on without them, or is over."""
        for sample in [sample for sample, kind in self.unscored.items() if kind == "validation"]:
            round_ = self.coordinator._plane.validation.rounds.get(number_of(sample))
            if round_ is None or sample in round_.failed:
                del self.unscored[sample]

    @move(0, 0.5, when=lambda self: self.scored)
    def second_score(self, back: int, failed: bool) -> None:
        worker, job = self.scored[-1 - back % len(self.scored)]
        again = any(job.sample_id == other.sample_id for _, other in self.jobs)
        if not again and not any(who.startswith("jobs:") and task.done() for who, task in self.waiting.items()):
            self.tell_score(worker, job, None if failed else Score(-1.0))

    # ---- rules: trainer and weights ----------------------------------------------------------------------------------

    @move(4)
    def ask_for_group(self) -> None:
        needed = self.config.trainer.groups_per_update - len(self.groups)
        if needed > 0 and self.version < self.config.trainer.updates:
            self.ask("groups:", self.coordinator.next_groups(self.version, needed))

    @move(0.5, 4, when=lambda self: len(self.groups) == self.config.trainer.groups_per_update)
    def finish_update(self) -> None:
        self.version += 1
        now(self.coordinator.update_done(report(self.version, self.groups)))
        self.groups = []
        if self.version % self.config.weights.publish_every == 0 or self.version == self.config.trainer.updates:
            self.to_publish = self.version

    @move(0.5, 4, when=lambda self: self.announced < self.to_publish)
    def announce(self) -> None:
        """Announces a version, also while an older one is still on its way to some engines: they skip it."""
        self.announced = self.to_publish
        now(self.coordinator.announce(self.announced, digest_of(self.announced)))
        self.sending = dict.fromkeys(self.engines, self.announced)

    @move(0.5, 4, when=lambda self: self.sending)
    def swap(self, pick: int) -> None:
        engine = sorted(self.sending)[pick % len(self.sending)]
        self.holds[engine] = version = self.sending.pop(engine)
        for lease in self.leases:
            if lease.engine == engine:
                lease.seen.append(version)
        now(self.coordinator.engine_holds(WeightReport(engine, version, digest_of(version))))
        self.look_at_holds()

    def look_at_holds(self) -> None:
        held = [version for version in self.holds.values() if version >= 0]
        if held and (self.oldest >= 0 or len(held) == len(self.holds)):
            self.oldest = max(self.oldest, min(held))

    # ---- rules: who comes and goes -----------------------------------------------------------------------------------

    @move(0, 0, 0.3, when=lambda self: self.engines)
    def lose_engine(self, pick: int, replaced: bool, store_too: bool) -> None:
        """Loses an engine at any moment, with what it stored, or without."""
        engine = pop(self.engines, pick)
        self.lost.append(engine)
        self.holds.pop(engine)
        self.sending.pop(engine, None)
        self.answered += [lease for lease in self.leases if lease.engine == engine]
        self.leases = [lease for lease in self.leases if lease.engine != engine]
        self.at_engines = {sample: at for sample, at in self.at_engines.items() if at != engine}
        now(self.coordinator.engine_lost(engine, "killed"))
        self.look_at_holds()
        if store_too and not self.over:
            gone = [sample for sample, by in self.made_by.items() if by == engine and self.is_unread(sample)]
            now(self.coordinator.objects_lost(engine))
            self.is_made_again(gone)
        if replaced:
            self.join_engine()

    def is_unread(self, sample: str) -> bool:
        """Returns whether the sample's group waits for samples or for the trainer, or its round for scores."""
        if sample in self.unscored or sample.startswith("v"):
            return sample in self.unscored
        on_its_way = {group.group for group in self.taken_unseen()}
        return number_of(sample) in {*self.untaken()} - on_its_way

    def is_made_again(self, samples: list[str]) -> None:
        self.made_again |= bool(samples)
        for sample in samples:
            self.generated.discard(sample)
            self.unscored.pop(sample, None)
            self.made_by.pop(sample)
        self.scored += [held for held in self.jobs if held[1].sample_id in samples]
        self.jobs = [held for held in self.jobs if held[1].sample_id not in samples]

    @move(0, 0.2, when=lambda self: self.groups and not self.over)
    def group_is_gone(self, pick: int) -> None:
        """Reports a group that the trainer took, and cannot read."""
        group = pop(self.groups, pick)
        self.taken.remove(group.group)
        self.returned.add(group.group)
        now(self.coordinator.group_gone(group.group, "its node is gone"))
        self.is_made_again([sample.sample_id for sample in group.samples])

    @move(0, 0.2, when=lambda self: self.jobs)
    def image_is_gone(self, pick: int) -> None:
        """Reports an image that the reward worker cannot read."""
        worker, job = pop(self.jobs, pick)
        unread = job.sample_id in self.unscored
        self.tell_score(worker, job, error="gone", fault="replace")
        self.scored.append((worker, job))
        if unread and not self.over:
            self.is_made_again([job.sample_id])

    @move(0, 0.2, when=lambda self: len(self.engines) < 4 and len(self.lost) < 20)
    def join_engine(self) -> None:
        """Adds an engine; the publisher sends it the newest version that was announced."""
        engine = f"rollout-{len(self.lost) + len(self.engines) + 10}"
        self.engines.append(engine)
        self.holds[engine] = -1
        now(self.coordinator.engine_joins(engine))
        if self.announced >= 0:
            self.sending[engine] = self.announced

    @move(0, 0, 0.3)
    def lose_scorer(self, worker: int) -> None:
        name = self.workers[worker]
        self.workers[worker] = f"reward-{len(self.lost) + 10}"
        self.lost.append(name)
        self.scored += [held for held in self.jobs if held[0] == name]
        self.jobs = [held for held in self.jobs if held[0] != name]
        now(self.coordinator.scorer_lost(name))
        self.forget_failed()  # a sample that was with too many workers that were lost counts as the cause

    # ---- rules: everybody --------------------------------------------------------------------------------------------

    @move(0, 1, when=lambda self: self.waiting)
    def cancel_a_waiter(self, pick: int) -> None:
        """Cancels a waiter, also between being woken and running; another one must get what it would have got."""
        self.waiting[sorted(self.waiting)[pick % len(self.waiting)]].cancel()

    @move(0)
    def work_in_order(self, rounds: int) -> None:
        """Runs a stretch of undisturbed work, so that the disturbances of short runs meet every phase."""
        for _ in range(rounds):
            if not self.over:
                self.everybody_works()

    @move(0.1, when=lambda self: self.may_stop)
    def stop(self) -> None:
        self.may_stop = False
        now(self.coordinator.stop("ctrl-c"))

    # ---- what must always hold ---------------------------------------------------------------------------------------

    def buffers(self) -> dict[str, dict[str, Any]]:
        return now(self.coordinator.statistics())["buffers"]  # type: ignore[no-any-return]

    def ended_groups(self, *events: str) -> list[int]:
        """Returns the groups of the ledger, as often as they are there; only those that ended so, if that is said."""
        return [entry.group for entry in self.entries if not events or entry.event in events]

    def admitted(self) -> range:
        return range(10 * self.start, now(self.coordinator.continuation()).next_group)

    def live(self) -> set[int]:
        return set(self.admitted()) - set(self.ended_groups())

    def live_samples(self) -> set[str]:
        return {f"g{group}.s{i}" for group in self.live() for i in range(self.config.rollout.group_size)}

    def untaken(self) -> list[int]:
        return sorted(self.live() - set(self.taken))

    @property
    def wanted(self) -> int:
        """The number of groups to train."""
        return (self.config.trainer.updates - self.start) * self.config.trainer.groups_per_update

    @invariant()
    def all_is_well(self) -> None:
        self.every_group_ends_once()
        self.staleness_stays_within_the_budget()
        self.slots_are_never_overdrawn()
        self.buffers_stay_within_their_bounds()
        self.nothing_is_admitted_that_will_not_be_trained()
        self.counts_of_samples_agree_with_their_states()

    def every_group_ends_once(self) -> None:
        ended, live = self.ended_groups(), self.live()
        assert len(ended) == len(set(ended)) and set(ended) <= set(self.admitted())
        assert self.coordinator.ledger.live == live
        assert not (live and self.ended)
        self.coordinator._groups.check()
        counts = now(self.coordinator.statistics())["conservation"]
        assert counts["admitted"] == counts["trained"] + counts["rejected"] + counts["dropped"] + counts["live"]

    def staleness_stays_within_the_budget(self) -> None:
        for entry in self.entries:
            if entry.event == "trained":
                assert entry.staleness is not None and 0 <= entry.staleness <= self.config.staleness.max_updates
                assert entry.trained_version is not None
                assert (entry.step_versions is None) == self.stored
                oldest = entry.admitted_version if entry.step_versions is None else entry.step_versions[0]
                assert entry.staleness == entry.trained_version - 1 - oldest
                assert entry.admitted_version <= oldest
        if self.ended is not None and self.ended["status"] == "failed":
            assert "in a row" in self.ended["reason"], self.ended

    def slots_are_never_overdrawn(self) -> None:
        unpublished = [e for e in self.entries if e.trained_version is not None and e.trained_version > self.oldest]
        slots = (self.config.staleness.max_updates + 1) * self.config.trainer.groups_per_update
        assert self.over or len(self.live()) + len(unpublished) <= slots

    def buffers_stay_within_their_bounds(self) -> None:
        if self.over:
            return
        for name, buffer in self.buffers().items():
            if name == "bytes":
                self.bytes_stay_within_their_bound(buffer)
            elif name != "slots":
                assert 0 <= buffer["ready"] <= buffer["reserved"] <= buffer["capacity"], (name, buffer)
        live = self.live()
        waiting = [i for i, kind in self.unscored.items() if kind == "validation" or number_of(i) in live]
        # Counted here: samples at an engine, and samples generated but not scored. No more than there is room for, and
        # no slot leaks.
        assert len(self.leases) + len(waiting) <= self.config.buffer.trajectories
        if not any(who.startswith("samples:") and task.done() for who, task in self.waiting.items()):
            assert len(self.leases) + len(waiting) == self.buffers()["trajectories"]["reserved"]
        untaken = self.untaken()
        places = len(untaken) - len(self.taken_unseen()) - len(self.returned & set(untaken))
        assert places <= self.config.buffer.groups

    def bytes_stay_within_their_bound(self, counted: dict[str, Any]) -> None:
        live = self.live()
        made = [sample for sample in self.generated if sample.startswith("g") and number_of(sample) in live]
        bound, places = self.config.buffer.bound, self.config.buffer.trajectories
        shown = set(filter(self.is_shown, made))
        unscored = {sample for sample in made if sample in self.unscored} - shown
        held = sum(map(self.size_of, made)) + MEDIA_BYTES * len(unscored | shown)
        assert held == counted["ready"] <= counted["reserved"], "counted here, and by the coordinator"
        assert bound is None or counted["reserved"] <= bound
        samples = self.live_samples() | set(self.at_engines)
        to_show = set(filter(self.is_shown, samples))
        media = len(to_show - set(made)) + min(len(samples - to_show), places) - len(unscored)
        expected = media * MEDIA_BYTES * bool(self.sizes)
        assert counted["reserved"] == sum(map(self.size_of, samples)) + held - sum(map(self.size_of, made)) + expected

    def bucket_of(self, sample: str) -> int:
        return self.bucket(number_of(sample))

    def size_of(self, sample: str) -> int:
        """Returns the bytes of a training sample: those of its bucket, once one of that is known."""
        samples = self.config.trainer.groups_per_update * self.config.rollout.group_size
        media = min(samples, self.config.buffer.trajectories + self.config.tracking.images) * MEDIA_BYTES
        bound = (self.config.buffer.bound or 0) - media * bool(self.sizes)
        return self.sizes.get(self.bucket_of(sample), max(0, bound) // samples)

    def is_shown(self, sample: str) -> bool:
        return self.coordinator._samples.samples[sample].shown

    def taken_unseen(self) -> list[ReadyGroup]:
        """Returns the groups on their way to the trainer."""
        done = [task for who, task in self.waiting.items() if who == "groups:" and task.done() and not task.cancelled()]
        return [group for task in done for group in task.result()]

    def nothing_is_admitted_that_will_not_be_trained(self) -> None:
        assert len(self.admitted()) - len(self.ended_groups("rejected", "dropped")) <= self.wanted

    def counts_of_samples_agree_with_their_states(self) -> None:
        table = self.coordinator._samples
        states = [(sample, sample.owner, sample.state.name) for sample in table.samples.values()]
        counts = table.statistics()
        waiting = {sample.request.sample_id for sample, _, state in states if state == "GENERATED"}
        assert {name for queue in table._to_score.values() for name in queue} == waiting
        leased = Counter((o.kind, s.engine) for s, o, state in states if state in ("LEASED", "ABANDONED"))
        assert +table._num_leased_to == leased
        others = sum(state in ("GENERATED", "SCORING", "PAUSED") for *_, state in states)
        assert (counts["ready"], counts["reserved"]) == (len(waiting), leased.total() + others)
        for kind in ("train", "validation"):
            assert table.at_engines[kind].num_waiting == sum(
                (o.kind, state) == (kind, "QUEUED") for _, o, state in states
            )
            assert table.at_engines[kind].num_samples == sum(n for (of, _), n in leased.items() if of == kind)
        assert table.may_lease == (
            any(stage.num_waiting for stage in table.at_engines.values()) and counts["reserved"] < counts["capacity"]
        )
        for sample, owner, state in states:
            assert bool(sample.workers) == (state == "SCORING") and state != "GONE"
            missing = sum(one.state.name not in ("SCORED", "FAILED") for one in owner.samples)
            assert not owner.samples or owner.num_missing == missing

    # ---- and the run always ends -------------------------------------------------------------------------------------

    def everybody_asks(self, worker: int) -> None:
        for number in range(len(self.engines)):
            self.ask_for_samples(number, free=4)
        self.ask_for_jobs(worker, limit=2)

    def everybody_works(self) -> None:
        """Runs one round of well-behaved roles."""
        self.ask("events:", self.coordinator.events())
        self.everybody_asks(worker=0)
        self.ask_for_group()
        self.settle()
        while self.leases:
            lease = self.leases.pop()
            self.finish(lease, (lease.seen[-1],) * self.num_versions(lease.request))
        while self.jobs:
            self.answer_job(pick=-1, how="value")
        if len(self.groups) == self.config.trainer.groups_per_update:
            self.finish_update()
        if self.announced < self.to_publish:
            self.announce()
        while self.sending:
            self.swap(pick=0)
        self.all_is_well()

    def teardown(self) -> None:
        if not hasattr(self, "coordinator"):
            self.loop.close()
            return
        config = self.config
        per_update = config.trainer.groups_per_update
        # The slowest schedule moves one sample per round.
        most_rounds = 20 * ((config.trainer.updates + 1) * per_update * config.rollout.group_size + 200)
        rounds = 0
        while self.ended is None:
            if not self.engines:
                self.join_engine()
            self.everybody_works()
            rounds += 1
            assert rounds < most_rounds, f"stranded: {sorted(self.waiting)}, {now(self.coordinator.statistics())}"
        self.nobody_is_left_waiting()
        self.late_messages_are_harmless()
        self.every_group_ends_once()
        self.staleness_stays_within_the_budget()
        trained = len(self.ended_groups("trained"))
        if self.ended["status"] == "done":
            assert trained == self.wanted
            assert self.oldest == config.trainer.updates, "every engine had it, but for those that just joined"
        elif self.ended["status"] == "failed":
            lost = self.ended_groups("rejected", "dropped")
            assert len(lost) >= 4 * (config.staleness.max_updates + 1) * per_update
        else:
            assert self.ended["reason"] == "ctrl-c"
        assert self.ended["conservation"]["trained"] == trained
        self.loop.close()

    def nobody_is_left_waiting(self) -> None:
        self.everybody_asks(worker=1)
        for _ in range(len(self.waiting)):  # in a queue each wakes the next
            self.settle()
        left = [who for who in self.waiting if who != "events:"]
        assert not left, f"{left} still wait although the run is over"
        for task in self.waiting.values():
            task.cancel()
        self.settle()

    def late_messages_are_harmless(self) -> None:
        """Reports work that was under way when the run ended."""
        before = [*self.entries]
        for lease in self.leases:
            self.tell_done(lease)
        for worker, job in self.jobs:
            self.tell_score(worker, job, Score(1.0))
        if self.groups:
            now(self.coordinator.update_done(report(self.version + 1, self.groups)))
        for engine, version in self.sending.items():
            now(self.coordinator.engine_holds(WeightReport(engine, version, digest_of(version))))
        now(self.coordinator.stop("again"))
        assert self.entries == before
        events = self.coordinator._plane.log._events
        assert not events, f"{[e.kind for e in events]} after the end"


def test_every_interleaving_keeps_the_invariants_and_ends() -> None:
    """Searches short runs, adversarial and shrinkable."""
    run_state_machine_as_test(
        CoordinatorMachine, settings=settings(max_examples=80, stateful_step_count=50, deadline=None)
    )


def test_long_random_runs_keep_the_invariants_and_end(slice_of: Callable[[str, int, int], range]) -> None:
    """Applies the same rules, in proportions that carry a run from its first to its last update."""
    for seed in slice_of("long runs of the coordinator", 240, 30):
        dice = random.Random(seed)
        try:
            play_at_random(random_config(dice), dice)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def play_at_random(config: Config, dice: random.Random) -> None:
    machine = CoordinatorMachine()
    machine.begin(
        config=config, start=dice.choice([0, 0, 0, 3]), may_stop=dice.random() < 0.3, stored=dice.random() < 0.5
    )
    values = {**VALUES, "how": ["value"] * 20 + ["equal", "error", "down"] * dice.choice([0, 1, 8])}
    weights = {name: dice.choice(often) for name, (_, _, often) in MOVES.items()}
    for name in dice.choices([*weights], weights=[*weights.values()], k=dice.randint(1, 2500)):
        possible, arguments, _ = MOVES[name]
        if possible(machine):
            getattr(machine, name)(**{argument: dice.choice(values[argument]) for argument in arguments})
            machine.all_is_well()
        if machine.over:
            break
    machine.teardown()

"""Hosts the whole control plane in one asyncio class, the coordinator.

All other roles request work from it and report their results to it. It is a shell over `omni_async.control.plane`: a
call here checks its arguments, changes a table, and leaves the consequences to the plane.

| call            | made by  | waits for                          | unblocked by                                     |
|-----------------|----------|------------------------------------|--------------------------------------------------|
| `next_samples`  | producer | a queued sample and                | admission (a slot freed), a score,               |
|                 |          | a trajectory slot                  | a retry, validation                              |
| `next_to_score` | rewarder | a generated sample                 | a result, a retried score, its pause's end       |
| `closing`       | rewarder | the end of the run                 | its end, for any reason                          |
| `next_groups`   | trainer  | the group that may be trained next | the group's last score                           |
| `addresses`     | anyone   | a service's worker to be ready     | `service_ready`, the end of the run              |
| `events`        | driver   | anything that happened             | any of the above                                 |

The end of the run unblocks all of them. A call for work also carries results and activity of its caller. They are taken
at once: no report waits for the work. No call here touches a tensor or runs in another thread. Only `continuation`
blocks: it synchronises the ledger's file. State changes only between awaits. A worker that leaves gets an empty answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from omni_async.aio.clock import Clock
from omni_async.config import Config
from omni_async.config.held import is_shown
from omni_async.config.redact import redact_text
from omni_async.control.addresses import Addresses
from omni_async.control.control_state import ControlState
from omni_async.control.events import RunEvent, Shown
from omni_async.control.group import Group
from omni_async.control.plane import ControlPlane
from omni_async.control.reporting import buffer_statistics, endings, shown_of, totals, update_event
from omni_async.control.requests import require_trained_steps
from omni_async.control.scorer_totals import ScorerTotals
from omni_async.control.versions import WeightMismatch
from omni_async.types import (
    Activity,
    LedgerEntry,
    Prompt,
    ReadyGroup,
    SampleRequest,
    SampleResult,
    Score,
    ScoreJob,
    ScoreResult,
    UpdateReport,
    WeightReport,
)

# The score of every sample if the recipe has no scorers.
_NO_SCORE = Score(0.0)


class Coordinator:
    def __init__(
        self,
        config: Config,
        run_id: str,
        prompts: Sequence[Prompt],
        validation_prompts: Sequence[Prompt],
        ledger_sink: Callable[[LedgerEntry], None],
        start: ControlState | None = None,
        ledger_sync: Callable[[], None] = lambda: None,
        has_scored: bool = False,
        collects: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """Start or resume a run.

        Args:
            start: The state that an earlier attempt of the run reached, if any.
            ledger_sync: Makes the lines given to `ledger_sink` survive a crash of the machine.
            has_scored: The current scorers have scored samples of this run, so the run waits for a failing scorer.
            collects: The trainer starts an update once it has all its groups.
            clock: Measures how long groups and updates take; None: the event loop's time."""
        self._config = config
        self._ledger_sync = ledger_sync
        self._plane = plane = ControlPlane(
            config, run_id, prompts, validation_prompts, ledger_sink, start, ledger_sync, has_scored, collects, clock
        )
        self._groups, self._samples = plane.groups, plane.samples
        self.ledger, self.versions, self.admission = plane.ledger, plane.versions, plane.admission
        self._scorers = ScorerTotals()
        self._addresses = Addresses(config.services)

    # ---- producers ---------------------------------------------------------------------------------------------------

    async def next_samples(
        self, engine: str, free: int, capacity: int, done: Sequence[SampleResult] = (), activity: Activity | None = None
    ) -> list[SampleRequest]:
        """Wait for samples for an engine, and lease them. The list is empty if the run is over or the engine has left.

        Args:
            engine: its name; it gets no samples before it holds checked weights.
            free: how many more samples it can take now.
            capacity: how many it can hold in all.
            done: samples that it has generated, as for `samples_done`; `activity`: since its last message."""
        await self.report(engine, activity)
        if done:
            await self.samples_done(engine, done)
        while self.versions.of(engine) < 0 and self.versions.knows(engine) and not self._plane.closed:
            await self._plane.weights.wait()  # no engine generates with unchecked weights
        return await self._plane.producers.take(
            lambda: [] if self._plane.closed else self._samples.lease(engine, free, capacity), engine
        )

    async def samples_done(
        self, engine: str, results: Sequence[SampleResult], activity: Activity | None = None
    ) -> None:
        """Take generated samples. Raises the error of an invalid result; its sample is generated again."""
        await self.report(engine, activity)
        frees = self._samples.bytes.bound is not None  # they may be smaller than their reservation
        for result in results:
            sample = self._samples.answered(engine, result.sample_id)
            if sample is None:
                frees = True  # a slot, if its group had ended
                continue
            try:
                require_trained_steps(sample.request, result)
                self.versions.require_made(result)
            except (ValueError, WeightMismatch) as error:
                self._plane.generate_again(sample, str(error))
                self._plane.settle()
                raise
            problem = self._samples.generated(sample, result)
            if problem is not None:
                self._plane.close("failed", problem)
        if self._config.unscored:  # there are no reward workers
            jobs = self._samples.jobs(engine, self._samples.statistics()["ready"])
            await self.scored(engine, [ScoreResult(job.sample_id, job.attempt, score=_NO_SCORE) for job in jobs])
        if frees:
            self._plane.settle()
        else:
            self._plane.rewarders.notify()

    async def sample_failed(self, engine: str, sample_id: str, error: str) -> None:
        """Generate the sample again with the same seed; after `rollout.retries` the group is dropped.

        Args:
            engine: the name of the engine that failed.
            sample_id: the sample's; ignored if that engine no longer has the lease.
            error: the cause, for the ledger."""
        sample = self._samples.answered(engine, sample_id)
        if sample is not None:
            self._plane.generate_again(sample, error)
        self._plane.settle()

    # ---- reward workers ----------------------------------------------------------------------------------------------

    async def next_to_score(
        self, worker: str, limit: int, done: Sequence[ScoreResult] = (), activity: Activity | None = None
    ) -> list[ScoreJob]:
        """Return up to `limit` generated samples; an empty list if the run is over or this worker has left.

        `done`: answers about earlier samples, as for `scored`. `activity`: since its last message."""
        await self.report(worker, activity)
        if done:
            self._plane.scored(worker, done)
        self._samples.faults.end_outage(worker)
        return await self._plane.rewarders.take(
            lambda: [] if self._plane.closed else self._samples.jobs(worker, limit), worker
        )

    async def scored(self, worker: str, results: Sequence[ScoreResult], activity: Activity | None = None) -> None:
        """Record scores and failures."""
        await self.report(worker, activity)
        self._plane.scored(worker, results)

    async def scorer_wrong(self, reason: str) -> bool:
        """Record that a scorer fails its trial before it gets a sample, in the same way every time.

        Returns whether that ends the run. It does not if samples were scored before: then the scorers have lost
        something that they need, and may recover."""
        if self._samples.faults.has_scored:
            return False
        self._plane.close("failed", reason)
        return True

    # ---- trainer -----------------------------------------------------------------------------------------------------

    async def require_fields(self, fields: tuple[str, ...]) -> None:
        """Set the tensors of training trajectories; called before the first version is published."""
        self._plane.factory.fields = fields

    async def trainer_collects(self, collects: bool) -> None:
        """Set whether the trainer starts an update once it has all its groups, or with each group."""
        self.admission.trainer_collects(collects)

    async def next_groups(self, version: int, needed: int) -> list[ReadyGroup]:
        """Return the groups that may be trained now, at least one and at most `needed`.

        They are for the update that starts from `version` and needs `needed` more groups. The list is empty if the run
        is over: the update is then not made."""
        taken: list[ReadyGroup] = []
        self.admission.asked(version, needed, self._samples.spare_s, self._plane.clock.now())
        self._plane.settle()
        while not self._plane.closed:
            while len(taken) < needed and (ready := self._plane.take(version, needed - len(taken))):
                taken.append(ready)
            if taken and not self._plane.closed:
                return taken
            if not self._plane.closed:
                await self._plane.ready.wait()
        self._plane.end()
        return []

    async def update_done(self, report: UpdateReport) -> bool:
        """Record that the trainer made `report.version` from these groups. Return whether the run continues.

        Their slots are freed by the publish. A report after the end of the run is ignored: the ledger already has its
        groups as dropped."""
        self.versions.trained = report.version
        if self._plane.ended is not None:
            return False
        trained = self._groups.trained(report)
        shown: tuple[Shown, ...] = ()
        if is_shown(self._config, report.version):
            shown = shown_of((group for group, _ in trained), self._config.tracking.images)
        for group, _ in trained:
            self._samples.end_samples(group)
        data = update_event(report, [ready for _, ready in trained], self._config) | {
            **totals(self._groups, self._samples),
            **endings(self.ledger),
            "held": self.versions.held,
            "scorers": self._scorers.take(),
            "admission": self.admission.pace,
        }
        self._samples.begin_update()
        self._plane.record.updated(data["reward"])
        self._plane.log.add("update", data, shown)
        if self.ledger.problem is not None:
            self._plane.close("failed", self.ledger.problem)
        if self._plane.closed:
            self._plane.end()
        self._plane.settle()
        return not self._plane.closed

    async def group_gone(self, group: int, reason: str) -> None:
        """Regenerate a group that the trainer has taken and cannot read; the trainer takes it before any other."""
        if self._plane.closed or (owner := self._groups.give_back(group)) is None:
            return
        if owner.losses > self._config.rollout.retries:
            self._plane.end_group(owner, "dropped", f"its trajectories were lost {owner.losses} times: {reason}")
        else:
            for sample in owner.samples:
                self._samples.make_again(sample)
        self._plane.settle()

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def announce(self, version: int, digest: str) -> None:
        """Record that the publisher is about to send `version` to the engines."""
        self.versions.announce(version, digest)

    async def engine_holds(self, report: WeightReport) -> None:
        """Record that an engine swapped weights; a version that all engines hold frees the slots of its groups."""
        if not self.versions.knows(report.engine):
            return  # the report was under way when the engine was removed
        before, newcomer = self.versions.held, self.versions.of(report.engine) < 0
        try:
            self.versions.report(report)
        except WeightMismatch as error:
            await self.engine_lost(report.engine, str(error))  # its samples, made with those weights, are lost too
            return
        if newcomer and self.versions.held is not None:
            self._plane.weights.notify()
        self._plane.held_may_differ(before)

    # ---- membership --------------------------------------------------------------------------------------------------

    async def engine_joins(self, engine: str) -> None:
        """Add an engine. It gets work once its weights are no older than the weights of all others."""
        self.versions.join(engine)
        self._samples.engines.add(engine)

    async def engine_lost(self, engine: str, reason: str) -> None:
        """Remove a lost engine. Other engines regenerate its samples; its late messages are ignored."""
        if not self.versions.knows(engine):
            return
        if not self._plane.closed:
            self._plane.log.add("lost", {"name": engine, "reason": reason})
        before = self.versions.held
        self.versions.leave(engine)
        self._plane.weights.notify()
        await self.engine_leaves(engine)
        leases = self._samples.leases_of(engine)
        # First, because a round that ends with the engine's samples must not end the run if another round is due.
        self._plane.held_may_differ(before)
        for sample_id in leases:
            await self.sample_failed(engine, sample_id, f"{engine} was lost: {reason}")
        self._plane.settle()  # samples of groups that had ended held bytes until now

    async def objects_lost(self, engine: str) -> None:
        """Regenerate samples that a lost process had stored and the trainer has not read."""
        if self._plane.closed:
            return
        for sample in self._samples.made_by(engine):
            if not isinstance(sample.owner, Group) or self._groups.spoil(sample.owner):
                self._samples.make_again(sample)
        self._plane.settle()

    async def engine_leaves(self, engine: str) -> None:
        """Stop giving work to an engine; `engine_lost` follows once it has reported on all its leases."""
        self._samples.engines.discard(engine)
        self._plane.producers.evict(engine)

    async def scorer_lost(self, worker: str) -> None:
        """Remove a reward worker that is lost or abandoned; other workers score the samples it had taken."""
        await self.scorer_leaves(worker)
        for failure in self._samples.worker_lost(worker):
            self._plane.end_owner(failure)
        self._plane.settle()

    async def scorer_leaves(self, worker: str) -> None:
        """Stop giving work to a reward worker that is no longer needed; it finishes the samples it has."""
        self._samples.lost_workers.add(worker)
        self._plane.rewarders.evict(worker)
        self._scorers.forget(worker)

    # ---- services and events -----------------------------------------------------------------------------------------

    async def service_ready(self, worker: str, address: str) -> None:
        """Publish the address of a service's ready worker."""
        self._addresses.ready[worker] = address
        self._plane.changed.notify()
        await self.phase(f"{worker}: ready" + (f" at {address}" if address else ""))

    async def service_lost(self, worker: str) -> None:
        """Remove the address of a service's worker that is lost or leaves."""
        self._addresses.ready.pop(worker, None)

    async def addresses(self, role: str) -> dict[str, str]:
        """Wait for a ready worker of a service; return the addresses of all its ready workers, by name.

        Returns an empty dict if the run ends first. Raises ValueError for a role that the recipe does not name."""
        while not (found := self._addresses.of(role)) and not self._plane.closed:
            await self._plane.changed.wait()
        return found

    async def events(self) -> list[RunEvent]:
        """Return the events since the last call, at least one."""
        return await self._plane.log.take()

    async def report(self, worker: str, activity: Activity | None) -> None:
        """Pass a worker's spans of time to the driver, and add the counts of its scorers."""
        if activity is not None and activity.spans:
            self._plane.log.add("spans", {"spans": activity.spans})
        if activity is not None and activity.scorers:
            self._scorers.add(worker, activity.scorers)

    async def phase(self, text: str) -> None:
        """Pass a message for the user to the driver; credentials are masked."""
        self._plane.log.add("phase", {"text": redact_text(text)})

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def closing(self) -> None:
        """Wait until workers get no more work; for workers that wait for something other than work."""
        while not self._plane.closed:
            await self._plane.changed.wait()

    async def stop(self, reason: str) -> None:
        """End the run early, in order: the workers' calls return nothing."""
        self._plane.close("interrupted", reason)

    async def fail(self, reason: str) -> None:
        """End the run as failed, in order."""
        self._plane.close("failed", reason)

    async def conclude(self) -> None:
        """Drop the groups that the trainer has not reported, once every role has finished or is abandoned."""
        self._plane.close("failed", "the roles finished before the run did")
        self._plane.end()
        self._plane.log.add("concluded", {})

    async def take_up(self, groups: list[ReadyGroup]) -> None:
        """Take over the trajectories of a checkpoint's ready groups; called before the first version."""
        self._plane.source.take_up(groups)

    async def continuation(self) -> ControlState:
        """Return the state for a checkpoint of the newest version; the trainer calls this between two updates.

        After the end of the run, it is the state before unfinished groups were dropped. Raises OSError if the ledger
        lines that it counts are not safe."""
        self._ledger_sync()
        return self._plane.ended or self._plane.state()

    async def statistics(self) -> dict[str, Any]:
        """Return the contents of buffers, the ends of groups, the versions of engines and the addresses of services."""
        return {
            "buffers": buffer_statistics(self._groups, self._samples),
            **endings(self.ledger),
            "engines": dict(self.versions.engines),
            "scorers": self._scorers.now(),
            "addresses": {name: redact_text(address) for name, address in self._addresses.ready.items()},
        }

"""Hosts the whole control plane in one asyncio class, the coordinator. All other roles ask it for work and report their
results to it.

| call            | made by  | waits for                          | unblocked by                                     |
|-----------------|----------|------------------------------------|--------------------------------------------------|
| `next_samples`  | producer | a queued sample and                | admission (a slot freed), a score,               |
|                 |          | a trajectory slot                  | a retry, validation                              |
| `next_to_score` | rewarder | a generated sample                 | `samples_done`, a retried score, its pause's end |
| `closing`       | rewarder | the end of the run                 | its end, however it comes                        |
| `next_groups`   | trainer  | the group that may be trained next | the group's last score                           |
| `addresses`     | anyone   | a service's worker to be ready     | `service_ready`, the end of the run              |
| `events`        | driver   | anything that happened             | any of the above                                 |

A run ends in two steps. *Closing*: no worker gets work, and every wait returns nothing. *Ended*: the trainer has
answered for the update under way, by `update_done` (its groups are trained, as the checkpoint that follows has them) or
by leaving it; groups unfinished then are dropped, though a run resumed from the checkpoint admits them again. No call
here touches a tensor or runs in another thread, and none blocks but for the ledger's file, which `continuation`
synchronises; state changes only between awaits. A worker that leaves gets an empty answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from omni_async.aio.waiting import Event
from omni_async.config import Config
from omni_async.config.redact import redact_text
from omni_async.control.addresses import Addresses
from omni_async.control.control_state import ControlState
from omni_async.control.events import EventLog, RunEvent
from omni_async.control.flow import SampleFlow
from omni_async.control.group_source import GroupSource
from omni_async.control.group_table import GroupTable, TooStale
from omni_async.control.groups import GroupProgress
from omni_async.control.held_bytes import HeldBytes
from omni_async.control.ledger import ConservationError, Ledger
from omni_async.control.record import Record
from omni_async.control.reporting import round_data, round_shown, update_data, update_shown
from omni_async.control.requests import RequestFactory
from omni_async.control.sample_events import SampleEvents
from omni_async.control.validation import Validation, ValidationRound, ValidationSchedule
from omni_async.control.versions import Versions, WeightMismatch
from omni_async.types import (
    LedgerEntry,
    Prompt,
    ReadyGroup,
    SampleRequest,
    SampleResult,
    ScoreJob,
    ScoreResult,
    Span,
    Terminal,
    UpdateReport,
    WeightReport,
)


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
    ) -> None:
        """Starts from `start`, the state that an earlier attempt of the run reached, if there was one. `ledger_sync`
        makes the lines given to `ledger_sink` survive a crash of the machine. `has_scored`: the scorers, as they are
        now, have scored samples of this run, so the run waits for one that fails."""
        start = start or ControlState()
        self._ledger_sync = ledger_sync
        self._config = config
        self._last_version = config.trainer.updates
        self._factory = RequestFactory(config)
        self._source = GroupSource(config, prompts, self._factory, start)
        schedule = (
            ValidationSchedule(config.validation.every, self._last_version, start.validated)
            if config.validation
            else None
        )
        self._validation = Validation(
            schedule, partial(self._factory.validation, prompts=tuple(validation_prompts)), start.validated
        )
        self._groups = GroupTable(config, run_id, Ledger(ledger_sink, start.ledger), start.version)
        self._samples = SampleFlow(config)
        self._group_size = config.rollout.group_size
        self._held_bytes = HeldBytes(config.buffer.bound, config.trainer.groups_per_update * self._group_size)
        self._record = Record(start)
        self.versions = Versions(start.version)
        for engine in config.engine_names:
            self.versions.join(engine)
            self._samples.engine_joins(engine)
        self._sample_events = SampleEvents(
            config,
            self._samples,
            self._groups,
            self._validation,
            self.versions,
            self._held_bytes,
            self,
            start.images,
            has_scored,
        )
        self._ready = Event()
        self._weights = Event()
        self._addresses = Addresses()
        self._log = EventLog()
        self._outcome: tuple[str, str | None] | None = None
        self._ended = False
        self._last_state: ControlState | None = None

    @property
    def ledger(self) -> Ledger:
        return self._groups.ledger

    # ---- producers ---------------------------------------------------------------------------------------------------

    async def next_samples(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        """Leases up to `free` samples to an engine that holds `capacity` at most. Returns an empty list if the run is
        over, or goes on without this engine."""
        while self.versions.of(engine) < 0 and self.versions.knows(engine) and not self._closed:
            await self._weights.wait()  # no engine generates with unchecked weights
        return await self._samples.lease(engine, free, capacity)

    async def samples_done(self, engine: str, results: list[SampleResult]) -> None:
        try:
            self._sample_events.samples_done(engine, results)
        finally:
            if self._held_bytes.bounded:
                self._admit()  # samples may be smaller than was reserved for them

    async def sample_failed(self, engine: str, sample_id: str, error: str) -> None:
        """Generates the sample again with the same seed; after `rollout.retries` the group is dropped."""
        self._sample_events.sample_failed(engine, sample_id, error)
        self._admit()

    # ---- reward workers ----------------------------------------------------------------------------------------------

    async def next_to_score(self, worker: str, limit: int) -> list[ScoreJob]:
        """Returns up to `limit` generated samples, as many as there are; an empty list if the run is over, or goes on
        without this worker."""
        self._sample_events.asks(worker)
        return await self._samples.jobs(worker, limit)

    async def scored(self, worker: str, kinds: dict[str, str], results: list[ScoreResult]) -> None:
        """Records scores and failures. `kinds` maps the sample ids to train or validation, as their jobs do."""
        self._sample_events.scored(worker, kinds, results)

    async def scorer_wrong(self, reason: str) -> bool:
        """Records that a scorer fails its trial before it gets a sample, in the same way every time. Returns whether
        that ends the run: not if samples were scored before, for then something that scorers need has gone, and may
        come back."""
        if self._sample_events.has_scored:
            return False
        self._fail(reason)
        return True

    # ---- trainer -----------------------------------------------------------------------------------------------------

    async def require_fields(self, fields: tuple[str, ...]) -> None:
        """Sets the trajectory tensors that training samples must carry; called before the first version is
        published."""
        self._factory.fields = fields

    async def next_groups(self, version: int, needed: int) -> list[ReadyGroup]:
        """Returns groups for the update that starts from `version` and still needs `needed` groups, as many as may be
        trained by now; an empty list if the run is over, and the update will not be made."""
        taken: list[ReadyGroup] = []
        while not self._closed:
            while len(taken) < needed and (ready := self._take(version, needed - len(taken))):
                taken.append(ready)
            if taken or self._closed:
                break
            await self._ready.wait()
        if self._closed:
            self._end()
            return []
        return taken

    def _take(self, version: int, needed: int) -> ReadyGroup | None:
        """Returns the next group to train; None if there is none, or the run is over because one is too old."""
        if not self._may_train(version):
            return None
        try:
            ready = self._groups.take(version, needed)
        except TooStale as error:
            self._fail(str(error))
            return None
        if ready is not None:
            self._admit()
        return ready

    def _may_train(self, version: int) -> bool:
        """Returns whether groups may be trained: with `staleness.exact`, none while anything could still be
        generated."""
        if not self._config.staleness.exact:
            return True
        return self.versions.held == version and self._groups.all_ready

    async def update_done(self, report: UpdateReport) -> bool:
        """Records that the trainer made `report.version` from these groups: they are trained, and their slots wait for
        the publish. A report after the run ended comes too late: its groups are in the ledger as dropped. Returns
        whether the run goes on."""
        self.versions.trained = report.version
        if self._ended:
            return False
        trained = self._groups.trained(report)
        self._held_bytes.release(sample.sample_id for group in trained for sample in group.samples)
        tracking = self._config.tracking
        shown = report.version % tracking.images_every == 0 or report.version in (1, self._last_version)
        data = {
            **update_data(report, trained),
            "images": self._sample_events.images,
            "held": self.versions.held,
            "buffers": self._buffer_statistics(),
            "conservation": self.ledger.counters(),
        }
        self._held_bytes.begin_update()
        self._record.updated(data["reward"])
        self._log.add("update", data, update_shown(trained, tracking.images) if shown else ())
        if self.ledger.problem is not None:
            self._fail(self.ledger.problem)
        if self._closed:
            self._end()
        self._admit()
        return not self._closed

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def announce(self, version: int, digest: str) -> None:
        """Records that the publisher is about to send `version` to the engines."""
        self.versions.announce(version, digest)

    async def engine_holds(self, report: WeightReport) -> None:
        """Records that an engine swapped. Once all engines hold a version, the slots of the groups it was trained on
        are free again."""
        if not self.versions.knows(report.engine):
            return  # it was on its way when the engine was given up
        before, newcomer = self.versions.held, self.versions.of(report.engine) < 0
        try:
            self.versions.report(report)
        except WeightMismatch as error:
            await self.engine_lost(report.engine, str(error))  # and with it the samples it made with them
            return
        if newcomer and self.versions.held is not None:
            self._weights.notify()
        self._held_may_differ(before)

    def _held_may_differ(self, before: int | None) -> None:
        held = self.versions.held
        if held is None or held == before or self._closed:
            return
        self._ready.notify()
        self._groups.slots.held(held)
        self._samples.add(self._validation.begin(held))
        self._admit()
        self._finish_if_complete()

    def _admit(self) -> None:
        """Admits groups while there is a slot, room for them downstream, and an update left that will train them."""
        version = self.versions.held
        if version is None or self._closed:
            return
        while self._groups.may_admit and self._held_bytes.has_room(self._source.next_bucket, self._group_size):
            group = self._source.next(version)
            self._groups.admit(group)
            self._held_bytes.reserve(group.bucket, group.samples)
            if group.complete:
                self._groups.complete(group)  # first: if the run is over now, the next attempt has it ready, too
                if not self._holds(group):
                    return
                self._ready.notify()
            else:
                self._samples.add([sample.request for sample in group.samples.values()])

    def _holds(self, group: GroupProgress) -> bool:
        """Counts the bytes of a group that an earlier attempt had ready. Returns whether the bound allows them; if not,
        the run is over."""
        for sample in group.samples.values():
            problem = self._held_bytes.made(sample.request.sample_id, sample.result.nbytes if sample.result else 0)
            if problem is not None:
                self._fail(problem)
                return False
        return True

    # ---- membership --------------------------------------------------------------------------------------------------

    async def engine_joins(self, engine: str) -> None:
        """Adds an engine. It gets work once it holds weights no older than those of all others."""
        self.versions.join(engine)
        self._samples.engine_joins(engine)

    async def engine_lost(self, engine: str, reason: str) -> None:
        """Removes an engine that is gone, or given up: others generate its samples again, with their seeds; its late
        messages are ignored."""
        if not self.versions.knows(engine):
            return
        if not self._closed:
            self._log.add("lost", {"name": engine, "reason": reason})
        before = self.versions.held
        self.versions.leave(engine)
        self._weights.notify()
        leased = self._samples.engine_lost(engine)
        # First: a round that ends with the engine's samples must not be the last one if another is due.
        self._held_may_differ(before)
        for sample_id in leased:
            self._sample_events.sample_failed(engine, sample_id, f"{engine} was lost: {reason}")
        self._admit()  # samples of groups that had ended held bytes until now

    async def scorer_lost(self, worker: str) -> None:
        """Removes a reward worker that is gone, or given up: others score the samples it had taken."""
        self._sample_events.scorer_lost(worker)

    async def engine_leaves(self, engine: str) -> None:
        """Stops giving work to an engine that is not needed any more; `engine_lost` follows when it has answered for
        its leases."""
        self._samples.engine_leaves(engine)

    async def scorer_leaves(self, worker: str) -> None:
        """Stops giving work to a reward worker that is not needed any more; it answers for the samples it has."""
        self._samples.scorer_leaves(worker)

    async def service_ready(self, worker: str, address: str) -> None:
        """Makes known how a service's worker is reached."""
        self._addresses.ready(worker, address)
        self._log.add("phase", {"text": f"{worker}: ready" + (f" at {redact_text(address)}" if address else "")})

    async def service_lost(self, worker: str) -> None:
        """Forgets the address of a service's worker that is gone, or leaves."""
        self._addresses.lost(worker)

    async def addresses(self, role: str) -> dict[str, str]:
        """Returns how the ready workers of a service are reached, by name, once there is one; nothing if the run is
        over before. ValueError for a role that the recipe does not name: nobody would ever be ready."""
        named = [one.name for one in self._config.roles]
        if role not in named:
            raise ValueError(f"addresses: expected a role of the recipe, one of {named}, got {role!r}")
        return await self._addresses.of(role)

    async def objects_lost(self, engine: str) -> None:
        """Generates again the samples that a lost process had generated and the trainer has not read: its store went
        with it."""
        if not self._closed:
            self._sample_events.objects_lost(engine)

    async def group_gone(self, group: int, reason: str) -> None:
        """Takes back a group that the trainer has taken and cannot read: it is generated again, and taken before any
        other."""
        if not self._closed:
            self._sample_events.group_gone(group, reason)

    # ---- ends of groups and rounds -----------------------------------------------------------------------------------

    def end_round(self, round_: ValidationRound) -> None:
        """Ends a validation round if it is complete."""
        if not round_.complete:
            return
        del self._validation.rounds[round_.version]
        self._record.validated(round_.version, round_.means())
        self._log.add("validation", round_data(round_), round_shown(round_, self._config.tracking.images))
        self._finish_if_complete()

    def end_group(self, group: GroupProgress, event: Terminal, reason: str) -> None:
        """Rejects or drops a live group; its slot admits a replacement at once."""
        why = self._groups.end(group, event, reason) or self.ledger.problem
        self._samples.forget(group.group, group.samples)
        self._held_bytes.release(sample for sample in group.samples if not self._samples.leased(sample))
        if why is not None:
            self._fail(why)
        self._admit()
        self._ready.notify()

    def group_ready(self) -> None:
        self._ready.notify()

    def end_run(self, reason: str) -> None:
        self._fail(reason)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _finish_if_complete(self) -> None:
        if (
            self.versions.held == self._last_version
            and not self._validation.rounds
            and self.versions.trained == self._last_version
        ):
            self._close("done", None)

    async def closing(self) -> None:
        """Returns once no worker gets work any more, for workers that wait for something else than work."""
        while not self._closed:
            await self._weights.wait()

    async def stop(self, reason: str) -> None:
        """Ends the run early, in order: workers see their calls return nothing."""
        self._close("interrupted", reason)

    async def fail(self, reason: str) -> None:
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        self._close("failed", reason)

    def _close(self, status: str, reason: str | None) -> None:
        if self._closed:
            return
        self._outcome = (status, reason)
        self._log.add("closing", {"status": status, "reason": reason})
        self._validation.cancel()
        self._samples.close()
        self._weights.notify()
        self._ready.notify()
        self._addresses.close()
        if not self._groups.in_training:
            self._end()

    async def conclude(self) -> None:
        """Drops the groups that the trainer has not answered for, once every role has finished, or is given up. No
        event follows this."""
        self._close("failed", "the roles finished before the run did")
        self._end()
        self._log.add("concluded", {})

    def _end(self) -> None:
        if self._outcome is None or self._ended:
            return
        self._last_state = self._state()
        self._ended = True
        status, reason = self._outcome
        self._groups.drop_all(f"run {status}" + (f": {reason}" if reason else ""))
        try:
            self._groups.check()
        except ConservationError as error:
            self._outcome = ("failed", str(error))
        problem = self.ledger.problem
        if self._outcome[0] == "done":
            try:
                # Where no update was left to make, nothing has made the lines of a former attempt void yet.
                self._ledger_sync()
            except OSError as error:
                problem = problem or f"the ledger cannot be written: {error}"
        if problem is not None and self._outcome[0] != "failed":
            self._outcome = ("failed", problem)
        status, reason = self._outcome
        self._log.add(
            "ended", {"status": status, "reason": reason, "images": self._sample_events.images, **self.ledger.summary()}
        )

    @property
    def _closed(self) -> bool:
        return self._outcome is not None

    # ---- watching ----------------------------------------------------------------------------------------------------

    async def events(self) -> list[RunEvent]:
        return await self._log.take()

    async def report_spans(self, spans: list[Span]) -> None:
        self._log.add("spans", {"spans": spans})

    async def phase(self, text: str) -> None:
        self._log.add("phase", {"text": text})

    async def take_up(self, groups: list[ReadyGroup]) -> None:
        """Takes over groups of the checkpoint, with their trajectories, that need not be made again; called before the
        first version is published."""
        self._source.take_up(groups)

    async def continuation(self) -> ControlState:
        """Returns the state for a checkpoint of the newest version; the trainer asks between two updates. Once the run
        has ended: the state before unfinished groups were dropped. OSError if the ledger lines that it counts are not
        safe."""
        self._ledger_sync()
        return self._last_state or self._state()

    def _state(self) -> ControlState:
        unfinished, ready = self._groups.state()
        unfinished_before, ready_before = self._source.state()
        validated = self._validation.done
        return ControlState(
            version=self.versions.trained,
            next_group=self._source.next_group,
            images=self._sample_events.images,
            validated=validated,
            ledger=self.ledger.state(),
            unfinished=unfinished + unfinished_before,
            ready=ready + ready_before,
            rewards=self._record.rewards,
            rounds=self._record.rounds(until=validated),
        )

    def _buffer_statistics(self) -> dict[str, dict[str, Any]]:
        return {
            **self._groups.statistics(),
            "trajectories": msgspec.structs.asdict(self._samples.statistics()),
            "bytes": msgspec.structs.asdict(self._held_bytes.statistics()),
        }

    async def statistics(self) -> dict[str, Any]:
        return {
            "buffers": self._buffer_statistics(),
            "conservation": self.ledger.counters(),
            "engines": self.versions.engines(),
            "addresses": {name: redact_text(address) for name, address in self._addresses.known.items()},
        }

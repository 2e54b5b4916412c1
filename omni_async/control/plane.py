"""Owns the tables of the control plane, and the order of their changes after an event.

The transition tables of `sample.py` and `group.py` define which events a sample or a group accepts, and which resources
an event releases.

  samples    QUEUED --> LEASED --> GENERATED --> SCORING --> SCORED        (sample.py)
             producer   engine                   reward      |
                                                 worker      v  all samples of the group
  groups     MAKING --------------------------------------> READY --> TRAINING --> TRAINED --> GONE    (group.py)
             admitted: a slot is free                                 trainer      published: the slot is free

Nothing here waits. `omni_async.control.coordinator` waits on the queues and events that are notified here. A change
that may have freed something is followed by `settle`, which admits groups and wakes callers that can continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from omni_async.aio.backoff import Backoff, Later
from omni_async.aio.clock import Clock, LoopClock
from omni_async.aio.waiting import Event, FairQueue
from omni_async.config import Config
from omni_async.control.admission import JustInTime
from omni_async.control.control_state import ControlState
from omni_async.control.events import EventLog
from omni_async.control.group import Group
from omni_async.control.group_table import GroupTable, TooStale
from omni_async.control.ledger import ConservationError, Ledger
from omni_async.control.reporting import Record, round_event, shown_of
from omni_async.control.requests import GroupSource, RequestFactory
from omni_async.control.reward_formula import RewardFormula
from omni_async.control.sample import Complete, EndRun, Failure, Pause, Sample
from omni_async.control.sample_table import SampleTable
from omni_async.control.validation import Validation, ValidationRound
from omni_async.control.versions import Versions
from omni_async.types import LedgerEntry, Prompt, ReadyGroup, ScoreResult, Terminal


class ControlPlane:
    """The tables, and the queues and events on which callers wait. The arguments are those of `Coordinator`.

    A run ends in two phases. `closed`: no worker gets work. `ended`: the state before unfinished groups were dropped,
    once the trainer has finished or abandoned its update. `changed` is notified of `closed` and of new addresses."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        prompts: Sequence[Prompt],
        validation_prompts: Sequence[Prompt],
        ledger_sink: Callable[[LedgerEntry], None],
        start: ControlState | None,
        ledger_sync: Callable[[], None],
        has_scored: bool,
        collects: bool,
        clock: Clock | None,
    ) -> None:
        start = start or ControlState()
        self._config = config
        self.clock = clock or LoopClock()
        self.factory = RequestFactory(config)
        self.source = GroupSource(config, prompts, self.factory, start)
        requests_of = partial(self.factory.validation, prompts=tuple(validation_prompts))
        self.validation = Validation(config, requests_of, start.validated)
        self.ledger = Ledger(ledger_sink, start.ledger)
        self.groups = GroupTable(config, run_id, self.ledger, start.version)
        self.samples = SampleTable(config, self.clock.now, start.images, has_scored)
        self.record = Record(start)
        self._formula = RewardFormula(config.reward)
        self.versions = Versions(start.version)
        for engine in config.engine_names:
            self.versions.join(engine)
        self.samples.engines.update(config.engine_names)
        self._backoff = Backoff(config.reward.backoff_s, config.reward.backoff_max_s)
        self._pauses = Later()
        self.admission = JustInTime(config, collects=collects)
        self.producers = FairQueue(lambda: self.closed or self.samples.may_lease)
        self.rewarders = FairQueue(lambda: self.closed or self.samples.may_score)
        self.ready = Event()
        self.weights = Event()
        self.changed = Event()
        self.log = EventLog()
        self._ledger_sync = ledger_sync
        self.closed = False
        self._outcome: tuple[str, str | None]  # status and reason, once the run is closed
        self.ended: ControlState | None = None

    # ---- admission ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Admit groups, and wake the first producer and reward worker that can continue."""
        self._admit()
        self.producers.notify()
        self.rewarders.notify()

    def _admit(self) -> None:
        """Admit the groups that are due, while there is a free slot, room in the buffers, and an update to train them.

        Groups of an earlier attempt are due at once. If a group is not due yet, this is called again when it is."""
        version = self.versions.held
        if version is None or self.closed:
            return
        while self.groups.may_admit and self._has_room(version):
            now = self.clock.now()
            due = now if self.source.resumes else self.admission.due(*self.groups.untaken, now)
            if due > now:
                if due < math.inf:
                    self._pauses.call("admission", due - now, self.settle)
                return
            group, former = self.source.next(version)
            self.groups.admit(group)
            self.samples.add_samples(group)
            if former is not None:
                problems = [self.samples.restore(*each) for each in group.restored(former)]
                self.groups.complete(group)  # first, so that the next attempt has it ready if the run ends now
                if problem := next(filter(None, problems), None):
                    self.close("failed", problem)
                    return
                self.ready.notify()
        self.admission.full()

    def _has_room(self, version: int) -> bool:
        held = self.samples.bytes
        return held.bound is None or held.has_room(*self.source.next_size(version))

    def held_may_differ(self, before: int | None) -> None:
        """Free the slots of the groups of a version that all engines hold now, and begin its validation round.

        Args:
            before: the version that all engines held before an engine's weights changed."""
        if (held := self.versions.held) is None or held == before or self.closed:
            return
        self.ready.notify()
        self.groups.publish(held)
        if (round_ := self.validation.begin(held)) is not None:
            self.samples.add_samples(round_)
        self.settle()
        self._finish_if_complete()

    # ---- samples, groups and rounds ----------------------------------------------------------------------------------

    def generate_again(self, sample: Sample, error: str) -> None:
        """Queue a sample whose generation failed; after `rollout.retries` its group or round goes without it."""
        if (failure := self.samples.generation_failed(sample, error)) is not None:
            self.end_owner(failure)

    def scored(self, worker: str, results: Sequence[ScoreResult]) -> None:
        """Record scores and failures, and act on each."""
        for result in results:
            match self.samples.scored(worker, result):
                case None:
                    continue
                case Complete(Group() as group):
                    self._complete(group)
                case Complete(ValidationRound() as round_):
                    self._end_round(round_)
                case Pause(sample):
                    seconds = self._backoff.pause_s(sample.score_failures)
                    self._pauses.call(sample.request.sample_id, seconds, partial(self._resume, sample))
                case Failure() as failure:
                    self.end_owner(failure)
                case EndRun(reason):
                    self.close("failed", reason)
                    break
        self.settle()

    def _resume(self, sample: Sample) -> None:
        """Queue a sample to be scored again after its pause."""
        self.samples.resume(sample)
        self.rewarders.notify()

    def end_owner(self, failure: Failure) -> None:
        """End the group of a failed sample, or leave the sample out of its validation round."""
        owner = failure.sample.owner
        if isinstance(owner, Group):
            self.end_group(owner, failure.event, failure.reason)
        elif isinstance(owner, ValidationRound):
            owner.leave_out(failure.sample, failure.reason)
            self._end_round(owner)

    def _complete(self, group: Group) -> None:
        """Hand a fully scored group to the trainer, or reject it if it has nothing to teach."""
        reason = group.reason_to_reject(self._formula, self._config.algorithm.advantage)
        if reason is None:
            self.groups.complete(group)
            self.ready.notify()
        else:
            self.end_group(group, "rejected", reason)

    def end_group(self, group: Group, event: Terminal, reason: str) -> None:
        """Reject or drop a group; its slot admits a replacement."""
        why = self.groups.end(group, event, reason) or self.ledger.problem
        self.admission.ended()
        self._pauses.cancel(sample.request.sample_id for sample in group.samples)
        self.samples.end_samples(group)
        if why is not None:
            self.close("failed", why)
        self.ready.notify()

    def _end_round(self, round_: ValidationRound) -> None:
        """End a validation round if it is complete."""
        if round_.num_missing:
            return
        del self.validation.rounds[round_.version]
        round_.leave_incomplete(self._formula)
        result = round_.result(self._formula)
        self.record.validated(result)
        shown = shown_of([round_], self._config.tracking.images)
        self.log.add("validation", round_event(round_, result), shown)
        self.samples.end_samples(round_)
        self._finish_if_complete()

    def take(self, version: int, needed: int) -> ReadyGroup | None:
        """Return the next group to train; None if no group is ready, or if a stale group has ended the run.

        With `staleness.exact`, the result is None while anything could still be generated."""
        if self._config.staleness.exact and not (self.versions.held == version and self.groups.all_ready):
            return None
        try:
            ready = self.groups.take(version, needed)
        except TooStale as error:
            self.close("failed", str(error))
            return None
        if ready is not None:
            self.admission.taken(self.groups.groups[ready.group].times, self.clock.now())
            self.settle()
        return ready

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _finish_if_complete(self) -> None:
        if self.versions.held == self.versions.trained == self._config.trainer.updates and not self.validation.rounds:
            self.close("done", None)

    def close(self, status: str, reason: str | None) -> None:
        """Begin to close the run, unless this has happened: no worker gets work, and every wait returns nothing."""
        if self.closed:
            return
        self.closed = True
        self._outcome = status, reason
        self.log.add("closing", {"status": status, "reason": reason})
        for round_ in self.validation.cancel():
            self.samples.end_samples(round_)
        self._pauses.cancel_all()
        for each in (self.producers, self.rewarders, self.weights, self.ready, self.changed):
            each.notify()
        if not self.groups.in_training:
            self.end()

    def end(self) -> None:
        """Drop the unfinished groups of a closed run, unless this has happened, and report the end.

        The trainer has finished the current update (its groups are trained, as in the checkpoint that follows) or has
        abandoned it. A run resumed from the checkpoint admits the dropped groups again."""
        if self.ended is not None:
            return
        assert self.closed
        self.ended = self.state()
        status, reason = self._outcome
        for group in self.groups.drop_all(f"run {status}" + (f": {reason}" if reason else "")):
            self.samples.end_samples(group)
        try:
            self.groups.check()
        except ConservationError as error:
            status, reason = "failed", str(error)
        problem = self.ledger.problem
        if status == "done":
            try:
                # If no update was left to make, the void lines of a former attempt are still in the file.
                self._ledger_sync()
            except OSError as error:
                problem = problem or f"the ledger cannot be written: {error}"
        if problem is not None and status != "failed":
            status, reason = "failed", problem
        images = self.ended.images
        self.log.add("ended", {"status": status, "reason": reason, "images": images, **self.ledger.summary()})

    def state(self) -> ControlState:
        """Return the part of the control plane that a checkpoint of the newest version contains."""
        unfinished, ready = self.groups.state()
        unfinished_before, ready_before = self.source.state()  # wait for readmission
        return ControlState(
            version=self.versions.trained,
            next_group=self.source.next_group,
            images=self.samples.images,
            validated=self.validation.done,
            ledger=self.ledger.state(),
            unfinished=unfinished + unfinished_before,
            ready=ready + ready_before,
            rewards=tuple(self.record.rewards),
            rounds=self.record.rounds(until=self.validation.done),
        )

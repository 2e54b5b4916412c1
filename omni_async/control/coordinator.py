"""The coordinator: one asyncio class that hosts the whole control plane. Everybody else asks it for work and tells it what was done.

| call            | made by    | waits for                                  | unblocked by                                          |
|-----------------|------------|--------------------------------------------|-------------------------------------------------------|
| `next_samples`  | producer   | a queued sample and a trajectory place     | admission (a slot freed), a score, a retry, validation |
| `next_to_score` | rewarder   | a generated sample                         | `samples_done`, a retried score                       |
| `next_groups`   | trainer    | the group that may be trained next         | the group's last score                                |
| `events`        | driver     | anything that happened                     | any of the above                                      |

A run ends in two moments. *Closing*: nobody gets more work, every wait returns nothing, and groups nobody trains are dropped. *Ended*: the
update under way has been answered for too, by `update_done` (its groups are trained, as the checkpoint that follows has them) or by the
trainer's leaving it. No call here touches a tensor, blocks, or runs in another thread; its state changes only between awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from omni_async.config import Config
from omni_async.control.admission import Slots
from omni_async.control.buffer import ReplayBuffer
from omni_async.control.events import EventLog, RunEvent
from omni_async.control.flow import SampleFlow
from omni_async.control.groups import GroupProgress, SampleProgress, require_trained_steps
from omni_async.control.ledger import ConservationError, Ledger
from omni_async.control.reporting import round_data, round_pictures, update_data, update_pictures
from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import PromptStream
from omni_async.control.signal import Fruitless, has_signal
from omni_async.control.validation import Validation, ValidationRound, ValidationSchedule
from omni_async.control.versions import Versions, WeightMismatch
from omni_async.control.waiting import Bell
from omni_async.types import (
    LedgerEntry,
    Prompt,
    ReadyGroup,
    SampleRequest,
    SampleResult,
    Score,
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
        *,
        start_version: int = 0,
        start_group: int = 0,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._per_update = config.trainer.groups_per_update
        self._last_version = config.trainer.updates
        self._factory = RequestFactory(config)
        self._prompts = PromptStream(prompts, config.run.seed, config.data.shuffle)
        schedule = ValidationSchedule(config.validation.every, self._last_version) if config.validation else None
        self._validation = Validation(schedule, partial(self._factory.validation, prompts=tuple(validation_prompts)))
        self._slots = Slots(config.staleness.max_updates, self._per_update)
        self._samples = SampleFlow(config)
        self._replay = ReplayBuffer(
            config.buffer.groups,
            window=config.buffer.window,
            max_updates=config.staleness.max_updates,
            groups_per_update=self._per_update,
        )
        self.ledger = Ledger(ledger_sink)
        self.versions = Versions(start_version)
        for engine in config.engine_names:
            self.versions.join(engine)
        self._next_group = start_group
        self._wanted = (self._last_version - start_version) * self._per_update
        self._fruitless = Fruitless(self._slots.capacity)
        self._groups: dict[int, GroupProgress] = {}
        self._training: dict[int, tuple[GroupProgress, ReadyGroup]] = {}
        self._images = 0
        self._ready = Bell()
        self._weights = Bell()
        self._log = EventLog()
        self._outcome: tuple[str, str | None] | None = None
        self._ended = False

    # ---- producers ----------------------------------------------------------------------------------------------------------------

    async def next_samples(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        """Lease up to `free` samples to an engine that holds `capacity` at most. Empty: the run is over."""
        while self.versions.of(engine) < 0 and not self._closed:
            await self._weights.wait()  # nothing is admitted before the last engine has some
        return await self._samples.lease(engine, free, capacity)

    async def samples_done(self, engine: str, results: list[SampleResult]) -> None:
        for result in results:
            request = self._samples.answered(engine, result.sample_id)
            if request is None:
                continue
            progress = self._progress(request)
            if progress is None:
                self._samples.release(result.sample_id)  # the group ended while the sample was being made
                continue
            require_trained_steps(request, result)
            self.versions.require_made(result)
            progress.result = result
            self._images += request.kind == "train"
            self._samples.generated(progress.job())

    async def sample_failed(self, engine: str, sample_id: str, error: str) -> None:
        """Generate it again with the same seed; after `rollout.retries` the group is dropped."""
        request = self._samples.answered(engine, sample_id)
        if request is None:
            return
        self._samples.release(sample_id)
        if self._progress(request) is not None:
            if request.attempt <= self._config.rollout.retries:
                again = msgspec.structs.replace(request, attempt=request.attempt + 1)
                if home := self._groups.get(request.group) if request.kind == "train" else None:
                    home.attempts = max(home.attempts, again.attempt)
                self._samples.add([again])
            elif request.kind == "validation":
                self._fail_validation(request, error)
            else:
                self._end_group(self._groups[request.group], "dropped", f"generation failed {request.attempt} times: {error}")

    def _progress(self, request: SampleRequest) -> SampleProgress | None:
        """The live sample behind a request; None if its group or round is over or the sample has a result already."""
        home = (self._groups if request.kind == "train" else self._validation.rounds).get(request.group)
        progress = home.samples.get(request.sample_id) if home else None
        return progress if progress is not None and progress.result is None else None

    # ---- reward workers -----------------------------------------------------------------------------------------------------------

    async def next_to_score(self, worker: str, limit: int) -> list[ScoreJob]:
        """Up to `limit` generated samples, as many as there are. Empty: the run is over."""
        return await self._samples.jobs(limit)

    async def scored(self, worker: str, kinds: dict[str, str], results: list[ScoreResult]) -> None:
        """`kinds` maps the sample ids to train or validation, as their jobs said."""
        for result in results:
            if not self._samples.being_scored(result.sample_id):
                continue  # a second answer, or the group ended meanwhile
            home = (self._validation.rounds if kinds[result.sample_id] == "validation" else self._groups).get(_group_of(result.sample_id))
            if home is None:
                self._samples.release(result.sample_id)
                continue
            progress = home.samples[result.sample_id]
            if result.score is None:
                self._score_failed(home, progress, result.error or "no score")
            else:
                self._samples.release(result.sample_id)
                self._scored(home, progress, result.score)

    def _scored(self, home: GroupProgress | ValidationRound, progress: SampleProgress, score: Score) -> None:
        if isinstance(home, ValidationRound):
            progress.score = score
            self._end_round_if_complete(home)
            return
        home.scored(progress, score)
        if not home.complete:
            return
        advantage = self._config.algorithm.advantage
        # Against the rewards its prompt had before, even a group of equal rewards says something.
        may_drop = advantage.drop_zero_variance and not advantage.track_prompts
        if may_drop and not has_signal(home.scores, each_scorer=advantage.aggregate != "rewards"):
            self._end_group(home, "rejected", "zero reward variance")
        else:
            self._fruitless.reset()
            self._replay.put(home.ready())
            self._ready.ring()

    def _score_failed(self, home: GroupProgress | ValidationRound, progress: SampleProgress, error: str) -> None:
        """Score it again; after `reward.retries` the group is rejected, or the round goes on without the sample."""
        progress.score_attempts += 1
        if progress.score_attempts <= self._config.reward.retries:
            self._samples.retry_score(progress.job())
        elif isinstance(home, ValidationRound):
            self._fail_validation(progress.request, error)
        else:
            self._end_group(home, "rejected", f"reward failed {progress.score_attempts} times: {error}")

    # ---- trainer ------------------------------------------------------------------------------------------------------------------

    async def require_fields(self, fields: tuple[str, ...]) -> None:
        """Before the first version is published: what training samples must carry."""
        self._factory.fields = fields

    async def next_groups(self, version: int, places: int) -> list[ReadyGroup]:
        """Groups for the update that starts from `version` and still needs `places` groups, as many as may be trained by now. Empty: the run
        is over, and the update will not be made."""
        taken: list[ReadyGroup] = []
        while not self._closed:
            while len(taken) < places and (ready := self._take(version, places - len(taken))):
                taken.append(ready)
            if taken or self._closed:
                break
            await self._ready.wait()
        if self._closed:
            self._end()
            return []
        return taken

    def _take(self, version: int, places: int) -> ReadyGroup | None:
        """None: there is none, or the run is over because one is too old."""
        ready = self._replay.take(version, places) if self._may_train(version) else None
        if ready is None:
            return None
        staleness = version - ready.oldest_version
        if staleness > self._config.staleness.max_updates:
            self._fail(
                f"group {ready.group} reached the trainer {staleness} updates old, the budget is {self._config.staleness.max_updates}"
            )
            return None
        self._training[ready.group] = (self._groups.pop(ready.group), ready)
        self._admit()
        return ready

    def _may_train(self, version: int) -> bool:
        """With `staleness.exact` nothing is trained while anything could still be generated."""
        if not self._config.staleness.exact:
            return True
        return self.versions.held == version and self._replay.all_ready

    async def update_done(self, report: UpdateReport) -> bool:
        """The trainer made `report.version` from these groups: they are trained, and their slots wait for the publish. Reported after the run
        ended it comes too late: its groups are in the ledger as dropped. Returns whether the run goes on."""
        self.versions.trained = report.version
        if self._ended:
            return False
        trained: list[ReadyGroup] = []
        for group_id in report.groups:
            progress, group = self._training.pop(group_id)
            trained.append(group)
            self._slots.trained(group_id, report.version)
            self._record(progress, "trained", trained_version=report.version)
        self.ledger.check(self._slots.live)
        tracking = self._config.tracking
        shown = report.version % tracking.images_every == 0 or report.version in (1, self._last_version)
        data = {
            **update_data(report, trained),
            "images": self._images,
            "held": self.versions.held,
            "buffers": self._buffer_statistics(),
            "conservation": self.ledger.counters(),
        }
        self._log.add("update", data, update_pictures(trained, tracking.images) if shown else ())
        if self._closed:
            self._end()
        return not self._closed

    # ---- weights ------------------------------------------------------------------------------------------------------------------

    async def announce(self, version: int, digest: str) -> None:
        """The publisher is about to send `version` to the engines."""
        self.versions.announce(version, digest)

    async def engine_holds(self, report: WeightReport) -> None:
        """An engine swapped. Once all engines hold a version, the slots of the groups it was trained on are free again."""
        before = self.versions.held
        try:
            self.versions.report(report)
        except WeightMismatch as error:
            self._fail(str(error))
            return
        held = self.versions.held
        if held is None or held == before or self._closed:
            return
        self._weights.ring()
        self._ready.ring()
        self._slots.held(held)
        self._samples.add(self._validation.begin(held))
        self._admit()
        self._finish_if_complete()

    def _admit(self) -> None:
        """Admit groups while there is a slot, room for them downstream, and an update left that will train them."""
        version = self.versions.held
        if version is None or self._closed:
            return
        while self._slots.free > 0 and self._replay.free > 0 and self._still_wanted():
            group, self._next_group = self._next_group, self._next_group + 1
            prompt = self._prompts[group]
            window = self._factory.window(group)
            requests = self._factory.training(group, prompt, window)
            self._slots.take(group)
            self._replay.reserve(group, version)
            self.ledger.admit(group)
            self._groups[group] = GroupProgress(group, prompt, window, version, requests)
            self._samples.add(requests)

    def _still_wanted(self) -> bool:
        return self.ledger.events["trained"] + len(self._training) + len(self._groups) < self._wanted

    # ---- validation ---------------------------------------------------------------------------------------------------------------

    def _fail_validation(self, request: SampleRequest, error: str) -> None:
        self._samples.release(request.sample_id)
        if round_ := self._validation.fail(request, error):
            self._end_round_if_complete(round_)

    def _end_round_if_complete(self, round_: ValidationRound) -> None:
        if not round_.complete:
            return
        del self._validation.rounds[round_.version]
        self._log.add("validation", round_data(round_), round_pictures(round_, self._config.tracking.images))
        self._finish_if_complete()

    # ---- ends ---------------------------------------------------------------------------------------------------------------------

    def _record(self, progress: GroupProgress, event: Terminal, reason: str | None = None, trained_version: int | None = None) -> None:
        self.ledger.end(progress.entry(self._run_id, event, reason, trained_version))

    def _end_group(self, group: GroupProgress, event: Terminal, reason: str) -> None:
        """Reject or drop a live group; its slot admits a replacement at once."""
        self._record(group, event, reason)
        del self._groups[group.group]
        self._slots.end(group.group)
        self._replay.end(group.group)
        self._samples.forget(group.group, group.samples)
        if self._closed:
            return
        if self._fruitless.too_many():
            self._fail(f"{self._fruitless.in_a_row} groups in a row ended without being trained; the last one was {event}: {reason}")
        self._admit()
        self._ready.ring()

    def _finish_if_complete(self) -> None:
        if self.versions.held == self._last_version and not self._validation.rounds and self.versions.trained == self._last_version:
            self._close("done", None)

    async def stop(self, reason: str) -> None:
        """End the run early, in order: workers see their calls return nothing."""
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
        for group in self._groups.values():
            self._drop_at_the_end(group)
        self._groups.clear()
        self._validation.rounds.clear()
        self._samples.close()
        self._weights.ring()
        self._ready.ring()
        if not self._training:
            self._end()

    async def conclude(self) -> None:
        """Every role has finished, or is given up: what the trainer has not answered for is dropped. Nothing is told after this."""
        self._close("failed", "the roles finished before the run did")
        self._end()
        self._log.add("concluded", {})

    def _end(self) -> None:
        if self._outcome is None or self._ended:
            return
        self._ended = True
        for group, _ in self._training.values():
            self._drop_at_the_end(group)
        self._training.clear()
        try:
            self.ledger.check(self._slots.live)
        except ConservationError as error:
            self._outcome = ("failed", str(error))
        status, reason = self._outcome
        self._log.add("ended", {"status": status, "reason": reason, "images": self._images, **self.ledger.summary()})

    def _drop_at_the_end(self, group: GroupProgress) -> None:
        assert self._outcome is not None
        status, reason = self._outcome
        self._record(group, "dropped", f"run {status}" + (f": {reason}" if reason else ""))
        self._slots.end(group.group)

    @property
    def _closed(self) -> bool:
        return self._outcome is not None

    # ---- watching -----------------------------------------------------------------------------------------------------------------

    async def events(self) -> list[RunEvent]:
        return await self._log.take()

    async def report_spans(self, spans: list[Span]) -> None:
        self._log.add("spans", {"spans": spans})

    async def phase(self, text: str) -> None:
        self._log.add("phase", {"text": text})

    async def next_group_number(self) -> int:
        """The first group number no run of this lineage has used: what a checkpoint stores to continue the prompt stream."""
        return self._next_group

    def _buffer_statistics(self) -> dict[str, dict[str, int]]:
        statistics = {
            "slots": self._slots.statistics(),
            "trajectories": self._samples.statistics(),
            "replay": self._replay.statistics(),
        }
        return {name: msgspec.structs.asdict(one) for name, one in statistics.items()}

    async def statistics(self) -> dict[str, Any]:
        return {"buffers": self._buffer_statistics(), "conservation": self.ledger.counters(), "engines": self.versions.engines()}


def _group_of(sample_id: str) -> int:
    return int(sample_id.split(".", 1)[0][1:])

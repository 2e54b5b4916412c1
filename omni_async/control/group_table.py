"""Owns every live prompt group: its state, and the events that it accepts.

Pure bookkeeping: waits for nothing and calls only the ledger, an independent auditor that gets one line for the end of
every admitted group.

             complete          take                train            publish
  MAKING ----------------> READY ----> TRAINING ----------> TRAINED ------> GONE
    ^                        |          |    ^
    +- spoil: samples are ---+   return |    | take
       gone                             v    |
                                 REMAKING -> REMADE     as MAKING and READY

`end` (rejected, dropped) leads to GONE from everywhere but TRAINED.

| state    | holds                            | waits for                                                    |
|----------|----------------------------------|--------------------------------------------------------------|
| MAKING   | slot, place in the replay buffer | its samples                                                  |
| READY    | slot, place in the replay buffer | the trainer                                                  |
| TRAINING | slot                             | the trainer's update                                         |
| REMAKING | slot                             | its samples: the trainer could not read it                   |
| REMADE   | slot                             | the trainer, which takes it before any younger group         |
| TRAINED  | slot                             | every engine to hold the weights that came out of its update |

A transition releases everything that the old state held and the new state does not.

There are (S + 1) x P slots, and every group in the table has one. Everything in flight, including trained groups whose
version is not yet held, therefore fits into S + 1 updates: a group admitted at version a reaches a trainer that is at
most S updates further. Places are taken at admission. A ready group therefore never waits for a place, and the buffer
cannot fill with young groups while the trainer waits for the oldest.

Groups are taken in windowed admission order. `buffer.window` = 1 is strict first-in-first-out. With a larger window a
ready group may overtake up to `window - 1` older groups that are not ready, but only while every other untaken group
can still be trained within its own budget. Group g, admitted at version a, must be taken by update a + S. So before a
younger group takes a position in an update, enough positions must be left for all groups due by each later update.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

from omni_async.config import Config
from omni_async.config.algorithm import Advantage
from omni_async.config.redact import redact_text
from omni_async.control.control_state import Unfinished
from omni_async.control.ledger import Ledger
from omni_async.control.reward_formula import NoReward, RewardFormula
from omni_async.control.sample_table import Sample, SampleSet
from omni_async.types import (
    SHOWN_OF_PROMPT,
    LedgerEntry,
    Prompt,
    ReadyGroup,
    ReadySample,
    SampleRequest,
    SampleResult,
    Score,
    SdeWindow,
    Terminal,
    UpdateReport,
)

GroupState = IntEnum("GroupState", "MAKING READY TRAINING REMAKING REMADE TRAINED GONE")
GroupEvent = IntEnum("GroupEvent", "COMPLETE SPOIL TAKE RETURN TRAIN PUBLISH END")
MAKING, READY, TRAINING, REMAKING, REMADE, TRAINED, GONE = GroupState
COMPLETE, SPOIL, TAKE, RETURN, TRAIN, PUBLISH, END = GroupEvent

GROUP_TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (MAKING, COMPLETE): READY,
    (MAKING, END): GONE,
    (READY, SPOIL): MAKING,
    (READY, TAKE): TRAINING,
    (READY, END): GONE,
    (TRAINING, RETURN): REMAKING,
    (TRAINING, TRAIN): TRAINED,
    (TRAINING, END): GONE,  # the trainer will not report it any more
    (REMAKING, COMPLETE): REMADE,
    (REMAKING, END): GONE,
    (REMADE, SPOIL): REMAKING,
    (REMADE, TAKE): TRAINING,
    (REMADE, END): GONE,
    (TRAINED, PUBLISH): GONE,
}
_HOLDS_PLACE = frozenset({MAKING, READY})
# A run ends if this many groups in a row, or four times the number of slots, end untrained: without this bound, a run
# whose groups all end untrained would never end.
_FRUITLESS = 32


def has_signal(scores: Sequence[Score], *, each_scorer: bool = False) -> bool:
    """Return False if all rewards of the group are equal, or if it has fewer than two: then every advantage is 0.

    With `each_scorer` the scorers' own values count too: advantages computed per scorer may differ although the sums
    are equal."""
    columns: list[list[float]] = [[score.value for score in scores]]
    if each_scorer:
        # A scorer that was not called, or is left out, has no value for any of the samples.
        values = zip(*(score.values for score in scores), strict=True)
        columns += [[value for value in column if value is not None] for column in values]
    return any(len(column) > 1 and min(column) != max(column) for column in columns)


class TooStale(RuntimeError):
    """A group reached the trainer beyond the staleness budget. Always a bug in omni_async."""


class Group(SampleSet):
    """An admitted group and its samples, all generated in the shape of `bucket`.

    `losses` counts how often the trainer could not read it. `ready` is the message for the trainer, set once the group
    is complete. `left_out` are the scorers that its rewards do without."""

    def __init__(
        self,
        number: int,
        prompt: Prompt,
        window: SdeWindow | None,
        admitted_version: int,
        requests: list[SampleRequest],
        bucket: int = 0,
    ) -> None:
        super().__init__("train", number, requests, bucket)
        self.prompt = prompt
        self.window = window
        self.admitted_version = admitted_version
        self.trained_version: int | None = None
        self.state = MAKING
        self.losses = 0
        self.ready: ReadyGroup | None = None
        self.left_out: tuple[str, ...] = ()

    def restored(self, ready: ReadyGroup) -> Iterator[tuple[Sample, SampleResult, Score]]:
        """Yield the group's samples with their results and scores from `ready`."""
        former = {sample.sample_id: sample for sample in ready.samples}
        for sample in self.samples:
            one = former[sample.request.sample_id]
            versions = one.step_versions
            first = versions.first if versions else ready.admitted_version
            where = one.trajectory, one.media
            result = SampleResult(one.sample_id, "checkpoint", *where, first, versions, 0.0, 0.0, one.nbytes)
            yield sample, result, one.score

    @property
    def scores(self) -> list[Score]:
        return [s.score for s in self.samples if s.score is not None]

    def reason_to_reject(self, formula: RewardFormula, advantage: Advantage) -> str | None:
        """Return why the fully scored group has nothing to teach; None if it goes to the trainer.

        A scorer that failed for one sample is left out of all samples."""
        try:
            scores, self.left_out = formula.level(self.prompt, self.scores)
        except NoReward as error:
            return str(error)
        if self.left_out:
            for sample, score in zip(self.samples, scores, strict=True):
                sample.score = score
        # Compared with earlier rewards of its prompt, even a group of equal rewards has a signal.
        may_reject = advantage.drop_zero_variance and not advantage.track_prompts
        if may_reject and not has_signal(scores, each_scorer=advantage.aggregate != "rewards"):
            return "zero reward variance"
        return None

    @property
    def step_versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest version of any trained step so far."""
        taken = {span[0] for s in self.samples if s.result is not None for span in s.result.step_versions.spans}
        return (min(taken), max(taken)) if taken else None

    def entry(self, run: str, event: Terminal, reason: str | None) -> LedgerEntry:
        """Return the group's line of the ledger.

        Staleness is the version trained from (`trained_version` - 1) minus the oldest version that took a step. If no
        policy took a step, it is computed from the version of admission.

        Args:
            run: the run's id.
            event: how the group ended.
            reason: why it was not trained; None if it was. The line masks credentials."""
        versions, scores, trained = self.step_versions, self.scores, self.trained_version
        oldest = versions[0] if versions else self.admitted_version
        return LedgerEntry(
            run=run,
            group=self.number,
            prompt=self.prompt.index,
            event=event,
            reason=reason and redact_text(reason),
            admitted_version=self.admitted_version,
            trained_version=trained,
            staleness=None if trained is None else trained - 1 - oldest,
            step_versions=versions,
            attempts=self.attempts,
            reward=sum(score.value for score in scores) / len(scores) if scores else None,
            left_out=self.left_out,
            text=self.prompt.text[:SHOWN_OF_PROMPT],
        )

    def make_ready(self) -> ReadyGroup:
        """Return the group in the form that the trainer takes. Raises ValueError unless every sample is scored."""
        samples = []
        for sample in self.samples:
            made, score = sample.result, sample.score
            if made is None or score is None:
                raise ValueError(f"group {self.number} is not complete: sample {sample.request.sample_id}")
            samples.append(
                ReadySample(made.sample_id, made.trajectory, made.media, score, made.step_versions, made.nbytes)
            )
        return ReadyGroup(self.number, self.prompt, self.window, self.admitted_version, tuple(samples), self.bucket)


class GroupTable:
    """The table of live groups, by number, in the order of their admission.

    An example with S = 1 and P = 1, hence two slots. `held()` counts the slots and places that groups hold, and
    `report` is the trainer's report of the first update:

    >>> table.admit(first); table.admit(second); held()     # each takes a slot and a place
    (2, 2)
    >>> table.may_admit
    False
    >>> table.complete(first); held()                       # all its samples are scored: it may be taken
    (2, 2)
    >>> table.take(version=0, needed=1).group; held()       # frees the place
    0
    (2, 1)
    >>> print(table.take(version=1, needed=1))              # the second group is not complete
    None
    >>> table.trained(report) == [(first, ready)]; held()   # a line in the ledger; the slot waits for the publish
    True
    (2, 1)
    >>> table.publish(1); held()                            # every engine holds version 1: frees the slot
    (1, 1)
    >>> table.may_admit
    True
    """

    def __init__(self, config: Config, run_id: str, ledger: Ledger, start_version: int) -> None:
        self._run_id = run_id
        self._budget = config.staleness.max_updates
        self._per_update = config.trainer.groups_per_update
        self._window = config.buffer.window
        self._num_places = config.buffer.groups
        self._num_slots = config.slots
        self._wanted = ledger.events["trained"] + (config.trainer.updates - start_version) * self._per_update
        self._most_fruitless = max(_FRUITLESS, 4 * self._num_slots)
        self._num_fruitless = 0  # groups in a row that ended without being trained
        self.ledger = ledger
        self.groups: dict[int, Group] = {}
        # Indexes over `groups`: with a place in the replay buffer, and counts of these by version of admission.
        self._placed: OrderedDict[int, Group] = OrderedDict()
        self._admitted_at: Counter[int] = Counter()
        self._num: Counter[GroupState] = Counter()

    # ---- transitions -------------------------------------------------------------------------------------------------

    def _move(self, group: Group, event: GroupEvent) -> None:
        """Apply the transition table, and free what the group no longer holds. Raises ValueError."""
        before, after = group.state, GROUP_TRANSITIONS.get((group.state, event))
        if after is None:
            raise ValueError(f"group {group.number} is {before.name}: {event.name} cannot happen to it")
        group.state = after
        self._num[before] -= 1
        self._num[after] += 1
        if before in _HOLDS_PLACE and after not in _HOLDS_PLACE:
            del self._placed[group.number]
            self._admitted_at[group.admitted_version] -= 1
            if not self._admitted_at[group.admitted_version]:
                del self._admitted_at[group.admitted_version]
        if after is GONE:
            del self.groups[group.number]

    @property
    def live(self) -> set[int]:
        """Return the numbers of the groups that have not ended."""
        return {number for number, group in self.groups.items() if group.state is not TRAINED}

    @property
    def may_admit(self) -> bool:
        """Return whether there is a slot, a place, and an update left that would train another group."""
        num_groups = len(self.groups)
        return (
            num_groups < self._num_slots
            and len(self._placed) < self._num_places
            and self.ledger.events["trained"] + num_groups - self._num[TRAINED] < self._wanted
        )

    @property
    def untaken(self) -> tuple[int, int]:
        """Return the numbers of groups that the trainer has not taken: without all scores, and ready."""
        ready = self._num[READY]
        return len(self._placed) - ready, ready

    def admit(self, group: Group) -> None:
        """Give the group a slot and a place. Raises ValueError if none is free."""
        if len(self.groups) >= self._num_slots or len(self._placed) >= self._num_places:
            raise ValueError(
                f"no room for group {group.number}: {len(self.groups)} of {self._num_slots} slots and"
                f" {len(self._placed)} of {self._num_places} places are held"
            )
        self.ledger.admit(group.number)
        self.groups[group.number] = self._placed[group.number] = group
        self._admitted_at[group.admitted_version] += 1
        self._num[MAKING] += 1

    def complete(self, group: Group) -> None:
        """Hand a fully scored group to the trainer."""
        self._num_fruitless = 0
        group.ready = group.make_ready()
        self._move(group, COMPLETE)

    def spoil(self, group: Group) -> bool:
        """Stop a group from being trained before its lost samples are regenerated.

        Returns False if the trainer already has it; the trainer reports if it cannot read it."""
        if group.state in (TRAINING, TRAINED):
            return False
        group.ready = None
        if group.state in (READY, REMADE):
            self._move(group, SPOIL)
        return True

    def give_back(self, number: int) -> Group | None:
        """Take back a group that the trainer has and cannot read. Returns None if the trainer does not have it."""
        group = self.groups.get(number)
        if group is None or group.state is not TRAINING:
            return None
        group.ready = None
        group.losses += 1
        self._move(group, RETURN)
        return group

    # ---- training ----------------------------------------------------------------------------------------------------

    @property
    def all_ready(self) -> bool:
        """Return whether no group waits for samples, so that the trainer could take every remaining group."""
        return not self._num[MAKING] and not self._num[REMAKING]

    @property
    def in_training(self) -> bool:
        return self._num[TRAINING] > 0

    def take(self, version: int, needed: int) -> ReadyGroup | None:
        """Return the group that an update should train next, if it is ready. Raises TooStale.

        The update starts from `version` and needs `needed` more groups."""
        group = self._next(version, needed)
        if group is None:
            return None
        assert group.ready is not None
        staleness = version - group.ready.oldest_version
        if staleness > self._budget:
            raise TooStale(
                f"group {group.number} reached the trainer {staleness} updates old, the budget is {self._budget}"
            )
        self._move(group, TAKE)
        return group.ready

    def _next(self, update: int, needed: int) -> Group | None:
        if self._num[REMAKING] or self._num[REMADE]:
            # Younger groups must not overtake these: that would delay them beyond the staleness budget.
            return next((group for group in self.groups.values() if group.state is REMADE), None)
        for overtaken, group in enumerate(self._placed.values()):
            if overtaken >= self._window:
                return None
            if group.state is READY and (overtaken == 0 or self._others_stay_in_time(group, update, needed - 1)):
                return group
        return None

    def _others_stay_in_time(self, taken: Group, update: int, positions: int) -> bool:
        """Return whether all groups due by each update still fit into the positions up to it."""
        due = 0
        for version in sorted(self._admitted_at):
            others = self._admitted_at[version] - (version == taken.admitted_version)
            due += others
            if others and due > positions + (version + self._budget - update) * self._per_update:
                return False
        return True

    def trained(self, report: UpdateReport) -> list[tuple[Group, ReadyGroup]]:
        """Record a finished update and return its groups; their slots wait until all engines hold the version."""
        trained = []
        for group in [self.groups[number] for number in report.groups]:
            self._move(group, TRAIN)
            group.trained_version = report.version
            self.ledger.end(group.entry(self._run_id, "trained", None))
            assert group.ready is not None
            trained.append((group, group.ready))
            group.ready = None  # only its slot is left
        self.check()
        return trained

    def publish(self, version: int) -> None:
        """Free the slots of all groups trained up to `version`, which every live engine holds."""
        for group in [*self.groups.values()]:
            if group.trained_version is not None and group.trained_version <= version:
                self._move(group, PUBLISH)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def end(self, group: Group, event: Terminal, reason: str) -> str | None:
        """Reject or drop a group.

        Args:
            group: a group that is not trained.
            event: `rejected` or `dropped`.
            reason: the cause, for the ledger.

        Returns:
            Why the run should end, if too many groups in a row have ended untrained; else None."""
        self._move(group, END)
        self.ledger.end(group.entry(self._run_id, event, reason))
        self._num_fruitless += 1
        if self._num_fruitless < self._most_fruitless:
            return None
        return f"{self._num_fruitless} groups in a row ended without being trained; the last one was {event}: {reason}"

    def drop_all(self, reason: str) -> list[Group]:
        """Drop and return all groups, the trainer's included, because the run is over."""
        dropped = [group for group in self.groups.values() if group.state is not TRAINED]
        for group in dropped:
            self._move(group, END)
            self.ledger.end(group.entry(self._run_id, "dropped", reason))
        return dropped

    # ---- watching ----------------------------------------------------------------------------------------------------

    def state(self) -> tuple[tuple[Unfinished, ...], tuple[ReadyGroup, ...]]:
        """Return the groups that are not complete yet, and the complete groups, the trainer's included."""
        live = [group for group in self.groups.values() if group.state is not TRAINED]
        unfinished = tuple(Unfinished(group.number, group.attempts) for group in live if group.ready is None)
        return unfinished, tuple(group.ready for group in live if group.ready is not None)

    def check(self) -> None:
        """Raise ConservationError if the ledger and the table disagree."""
        self.ledger.check(self.live)

    def statistics(self) -> dict[str, dict[str, Any]]:
        waiting = self._num[TRAINED]
        live = len(self.groups) - waiting
        return {
            "slots": {"capacity": self._num_slots, "live": live, "awaiting_publication": waiting},
            "replay": {"capacity": self._num_places, "reserved": len(self._placed), "ready": self._num[READY]},
        }

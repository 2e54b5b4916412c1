"""Defines the part of the control plane that a checkpoint keeps, so that a run goes on where it stopped.

Nothing is lost, and nothing trained twice.

The state is taken between two updates, when no group is in training. A resumed run ignores what happened after it: the
lines that the ledger got since are void, and their groups are among those that the state lists as unfinished, or have
numbers that are given out again, with the same prompts and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from omni_async.control.rounds import Round
from omni_async.types import ReadyGroup


class LedgerState(Struct, frozen=True):
    """Totals over the ledger's lines so far.

    How many groups were admitted, how they ended, why (`reasons` of rejected ones, `drop_reasons` of dropped ones), and
    how old they were when trained; how many bytes the lines are, and their digest. A state recorded before counts all
    reasons in `reasons`."""

    admitted: int = 0
    events: dict[str, int] = {}
    reasons: dict[str, int] = {}
    staleness: dict[int, int] = {}
    size: int = 0
    digest: str = ""
    drop_reasons: dict[str, int] = {}

    @property
    def lines(self) -> int:
        return sum(self.events.values())


class Unfinished(Struct, frozen=True):
    """A group that was admitted and not scored yet.

    `attempts` is the most generations that any of its samples needed."""

    group: int
    attempts: int = 1


class ControlState(Struct, frozen=True):
    """The control plane between two updates.

    `version` is the policy's, `next_group` the first number that was not given out, `images` those generated for
    training, `validated` the last version a validation round began with. `ready` groups wait for the trainer; their
    references lead to trajectories that the checkpoint holds too. `unfinished` groups are generated again. `rewards`
    has the mean reward of each of the run's updates (null: it was not finite), `rounds` its validation, with every
    sample's score: what rounds are compared by."""

    version: int = 0
    next_group: int = 0
    images: int = 0
    validated: int | None = None
    ledger: LedgerState = LedgerState()
    unfinished: tuple[Unfinished, ...] = ()
    ready: tuple[ReadyGroup, ...] = ()
    rewards: tuple[float | None, ...] = ()
    rounds: tuple[Round, ...] = ()

    def to_admit(self, max_updates: int, groups_per_update: int) -> Iterator[Unfinished | ReadyGroup]:
        """Yield the groups to admit again, in the order of their admission.

        One that would be trained beyond the staleness budget, because that was made smaller meanwhile, is generated
        again."""
        groups: list[Unfinished | ReadyGroup] = [*self.unfinished, *self.ready]
        for position, one in enumerate(sorted(groups, key=lambda one: one.group)):
            trained_from = self.version + position // groups_per_update
            if isinstance(one, ReadyGroup) and trained_from - one.oldest_version > max_updates:
                yield Unfinished(one.group)
            else:
                yield one

"""Defines the part of the control plane that a checkpoint contains.

A resumed run loses nothing and trains nothing twice. The state is taken between two updates, when no group is in
training. A resumed run ignores everything later: later lines of the ledger are void. Their groups are unfinished in the
state, or their numbers are assigned again, with the same prompts and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from omni_async.control.rounds import Round
from omni_async.types import ReadyGroup


class LedgerState(Struct, frozen=True):
    """Totals over the ledger's lines so far.

    Counts of groups: admitted, by terminal event, by reason (`reasons` if rejected, `drop_reasons` if dropped), and by
    staleness when trained. `size` is the lines' bytes, `digest` their digest. A state of an earlier version counts all
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
    """An admitted group that is not fully scored.

    `attempts` is the largest number of generations that any of its samples needed."""

    group: int
    attempts: int = 1


class ControlState(Struct, frozen=True):
    """The control plane between two updates.

    `version` is the policy's, `next_group` the first unassigned number, `images` the number generated for training,
    `validated` the last version up to which all validation rounds are over. `ready` groups wait for the trainer; their
    references lead to trajectories in the same checkpoint. `unfinished` groups are generated again. `rewards` has the
    mean reward of each update (null: it was not finite). `rounds` has the validation rounds, with every sample's score
    for comparisons."""

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

        A ready group that would exceed the staleness budget, because that was reduced meanwhile, is generated again."""
        groups: list[Unfinished | ReadyGroup] = [*self.unfinished, *self.ready]
        for position, one in enumerate(sorted(groups, key=lambda one: one.group)):
            trained_from = self.version + position // groups_per_update
            if isinstance(one, ReadyGroup) and trained_from - one.oldest_version > max_updates:
                yield Unfinished(one.group)
            else:
                yield one

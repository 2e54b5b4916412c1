"""What a checkpoint keeps of the control plane, so that a run goes on where it stopped: nothing lost, and nothing
trained twice.

Taken between two updates, when no group is in training. What happened after it never happened: the lines that the
ledger got since are void, and their groups are among those that this knows as unfinished, or have numbers that it gives
out again, with the same prompts and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from omni_async.types import ReadyGroup


class LedgerState(Struct, frozen=True):
    """Of the lines up to here: how many groups were admitted, how they ended, why, and how old they were trained; how
    many bytes the lines are, and their digest (`ledger_prefix`)."""

    admitted: int = 0
    events: dict[str, int] = {}
    reasons: dict[str, int] = {}
    staleness: dict[int, int] = {}
    size: int = 0
    digest: str = ""

    @property
    def lines(self) -> int:
        return sum(self.events.values())


class Unfinished(Struct, frozen=True):
    """A group that was admitted and not scored yet. `attempts`: most generations that any of its samples needed."""

    group: int
    attempts: int = 1


class Round(Struct, frozen=True):
    """A validation round that is over: the version it was of, the mean reward and the means of the scorer's parts; null
    where not finite."""

    version: int
    reward: float | None
    parts: dict[str, float | None] = {}


class ControlState(Struct, frozen=True):
    """`version` is the policy's, `next_group` the first number that was not given out, `images` those generated for
    training, `validated` the last version a validation round began with. `ready` groups wait for the trainer; their
    references lead to trajectories that the checkpoint holds too. `unfinished` groups are generated again. `rewards`
    has the mean reward of each of the run's updates (null: it was not finite), `rounds` its validation."""

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
        """The groups to take up again, in the order of their admission. One that would be trained beyond a budget,
        because that was made smaller meanwhile, is generated again."""
        groups: list[Unfinished | ReadyGroup] = [*self.unfinished, *self.ready]
        for place, one in enumerate(sorted(groups, key=lambda one: one.group)):
            trained_from = self.version + place // groups_per_update
            if isinstance(one, ReadyGroup) and trained_from - one.oldest_version > max_updates:
                yield Unfinished(one.group)
            else:
                yield one

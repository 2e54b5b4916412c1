"""Names the workers of a run. Only this module formats and parses their names:

trainer          the only worker of its role, or the first of its ranks
rollout-0        the worker in slot 0 of the role `rollout`
rollout-0.2      the second worker in that slot, which replaced the first
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

# The built-in roles; roles of other packages have other names.
COORDINATOR, ROLLOUT, READER, REWARD, TRAINER = BUILT_IN_ROLES = (
    "coordinator",
    "rollout",
    "reader",
    "reward",
    "trainer",
)

_NAME = re.compile(r"(?P<role>[^-.\d]+)(?:-(?P<index>\d+))?(?:\.(?P<number>\d+))?")


@dataclass(frozen=True)
class Worker:
    """One worker: its role, the index of its slot, and its number in that slot, from 1.

    `index` is None if the role has one slot, or this is its first."""

    role: str
    index: int | None = None
    number: int = 1

    @classmethod
    def parse(cls, name: str) -> Worker:
        """Return the worker named `name`; a string that is no worker's name becomes a role."""
        return _parse(name)

    @property
    def slot(self) -> str:
        """Return the slot id, which all successive workers of a slot share."""
        return self.role if self.index is None else f"{self.role}-{self.index}"

    def numbered(self, number: int) -> Worker:
        """Return worker `number` of the same slot."""
        return replace(self, number=number)

    def __str__(self) -> str:
        return self.slot if self.number == 1 else f"{self.slot}.{self.number}"


@lru_cache(maxsize=4096)
def _parse(name: str) -> Worker:
    found = _NAME.fullmatch(name)
    if found is None:
        return Worker(name)
    index, number = found["index"], found["number"]
    return Worker(found["role"], None if index is None else int(index), 1 if number is None else int(number))

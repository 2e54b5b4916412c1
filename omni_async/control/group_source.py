"""Decides which group is admitted next.

It is one that an earlier attempt of the run had begun, in the order of its admission, or else the next number's.

Owns the numbers that were given out and the prompts behind them. Pure bookkeeping; waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from omni_async.config import Config
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.control.group_table import Group
from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import PromptStream
from omni_async.types import Prompt, ReadyGroup


class GroupSource:
    def __init__(self, config: Config, prompts: Sequence[Prompt], factory: RequestFactory, start: ControlState) -> None:
        self._prompts = PromptStream(prompts, config.run.seed, config.data.shuffle)
        self._factory = factory
        self._begun = deque(start.to_admit(config.staleness.max_updates, config.trainer.groups_per_update))
        self.next_group = start.next_group  # the first number that was not given out

    @property
    def next_bucket(self) -> int:
        """Return the bucket of the group that `next` will return."""
        return self._factory.bucket(self._begun[0].group if self._begun else self.next_group)

    def next(self, version: int) -> tuple[Group, ReadyGroup | None]:
        """Return a group for admission at `version`, and what an earlier attempt had of it.

        That is None unless the attempt had it ready, for the same prompt and with as many samples."""
        if not self._begun:
            self.next_group += 1
            return self._group(self.next_group - 1, version), None
        former = self._begun.popleft()
        if isinstance(former, ReadyGroup):
            group = self._group(former.group, former.admitted_version)
            if group.would_be(former):
                return group, former
        group = self._group(former.group, version)
        group.attempts = former.attempts if isinstance(former, Unfinished) else 1
        return group, None

    def _group(self, number: int, version: int) -> Group:
        prompt, window, bucket = self._prompts[number], self._factory.window(number), self._factory.bucket(number)
        requests = self._factory.training(number, prompt, window, bucket)
        return Group(number, prompt, window, version, requests, bucket)

    def take_up(self, groups: list[ReadyGroup]) -> None:
        """Add the trajectories to ready groups of the earlier attempt."""
        found = {group.group: group for group in groups}
        self._begun = deque(found.get(one.group, one) if isinstance(one, ReadyGroup) else one for one in self._begun)

    def state(self) -> tuple[tuple[Unfinished, ...], tuple[ReadyGroup, ...]]:
        """Return the groups of the earlier attempt that wait to be admitted again: unfinished and ready."""
        waiting = tuple(self._begun)
        return (
            tuple(one for one in waiting if isinstance(one, Unfinished)),
            tuple(one for one in waiting if isinstance(one, ReadyGroup)),
        )

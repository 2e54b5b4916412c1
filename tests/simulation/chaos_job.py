"""Draws a job from a seed: a small configuration, the world around its roles, and what breaks when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omni_async.config import Config, check
from omni_async.control.control_state import ControlState
from omni_async.control.coordinator import Coordinator
from omni_async.control.group import GroupState
from omni_async.control.ledger import encode_line, extend
from omni_async.control.reporting import buffer_statistics
from omni_async.control.seeds import PromptStream, derive, window_of
from omni_async.types import LedgerEntry, Prompt, ReadyGroup, SampleRequest
from tests.support.configs import build

SAMPLE_BYTES = 32  # of a trajectory and its media, as the engines make them

# What breaks, and how often relative to the rest. `kill` is everything at once, `stop` an orderly interruption; both
# are followed by a resume.
FAULTS = {
    "engine crash": 6,
    "engine hang": 2,
    "every engine crashes": 1,
    "scorer crash": 4,
    "scorer hang": 2,
    "kill": 4,
    "stop": 1,
}


@dataclass(frozen=True)
class Temper:
    """Longest times in seconds (drawn anew each time), and the odds of what may happen to a message or a sample; by
    default nothing is slow, and nothing happens.

    `grain`: times are multiples of it, so that things happen in the same instant; 0 for any time. `shuffled`: what is
    ready together runs in any order. Some groups fail, are slow, or have equal rewards, each time they are made.
    """

    message_s: float = 0.1
    step_s: float = 1.0
    store_s: float = 0.1
    train_s: float = 1.0
    swap_s: float = 1.0
    detection_s: float = 1.0
    grain: float = 0.0
    shuffled: bool = True
    duplicated: float = 0.0
    lost_with_caller: float = 0.5
    generation_fails: float = 0.0
    score_fails: float = 0.0
    equal_rewards: float = 0.0
    lasting_failures: float = 0.0
    slow_groups: float = 0.0
    store_dies: bool = False  # what a process has stored dies with it


@dataclass(frozen=True)
class Job:
    """A job to play. `faults`: the number of a message, and what happens when it was delivered."""

    seed: int
    config: Config
    temper: Temper
    faults: tuple[tuple[int, str], ...] = ()
    prompts: int = 3


def make_config(**changes: Any) -> Config | None:
    """Builds `make_config(trainer__updates=3)`; returns None if no run would start with that."""
    window = {"window": {"size": 1, "range": [0, 2]}}
    config = build(
        {
            "run": {"runtime": "inprocess"},
            "rollout": {"engine": "emulated", "num_inference_steps": 3, "group_size": 2, "sde": window},
            "trainer": {"updates": 3, "groups_per_update": 2},
            "checkpoint": {"every": 1},
        },
        changes,
    )
    return config if check(config) is None else None


def draw(seed: int) -> Job:
    dice = random.Random(f"chaos/{seed}")
    config = None
    while config is None:
        config = _config(dice, seed)
    samples = config.trainer.updates * config.trainer.groups_per_update * config.rollout.group_size
    messages = 5 * samples + 8 * config.trainer.updates + 6 * config.rollout.workers
    kinds = list(FAULTS)
    number = dice.choice([0, 1, 1, 2, 2, 3, 5])
    drawn = dice.choices(kinds, [FAULTS[kind] for kind in kinds], k=number)
    faults = tuple(sorted((dice.randrange(messages), kind) for kind in drawn))
    return Job(seed, config, _temper(dice), faults, prompts=dice.choice([1, 2, 5]))


def _config(dice: random.Random, seed: int) -> Config | None:
    """Draws a configuration; its buffers may be the smallest that are legal."""
    max_updates, per_update = dice.choice([0, 0, 1, 1, 2, 3]), dice.choice([1, 1, 2, 2, 3])
    size = dice.choice([2, 2, 3])
    exact, in_step = dice.random() < 0.15, dice.random() < 0.25
    slots = (max_updates + 1) * per_update
    trajectories = dice.choice([1, 2, 4, 64])
    bound = per_update * size * SAMPLE_BYTES
    rounds = {"every": dice.randint(1, 3), "share": dice.choice([0.1, 0.5, 1.0])}
    rounds |= {"prompts": "validation.txt", "num_inference_steps": 2}
    groups = max(dice.choice([1, per_update, slots, 32]), slots if exact else 1)
    return make_config(
        run__seed=seed % 2**31,
        rollout__workers=dice.choice([1, 1, 2, 2, 3, 4]),
        rollout__group_size=size,
        rollout__max_inflight=(inflight := dice.randint(1, 5)),
        rollout__max_batch=dice.randint(1, inflight),
        rollout__retries=dice.randint(0, 3),
        reward__workers=dice.randint(1, 3),
        reward__batch=dice.randint(1, 3),
        reward__retries=dice.randint(0, 3),
        reward__streaming=not in_step,
        staleness__max_updates=max_updates,
        staleness__exact=exact,
        staleness__reserve=dice.choice(["auto", "auto", "all", 0, min(2, slots - per_update, groups)]),
        buffer__trajectories=max(trajectories, per_update * size) if in_step else trajectories,
        buffer__groups=groups,
        buffer__window=dice.choice([1, 1, 2, 4]),
        buffer__max_bytes=None if exact else dice.choice([None, bound, bound * 3 // 2]),
        weights__publish_every=1 if exact else dice.randint(1, max_updates + 1),
        rollout__timeout_s=2000.0,  # longer than any sample of a healthy engine takes
        weights__timeout_s=6000.0,
        weights__swap=dice.choice(["step", "request", "drain"]),
        trainer__updates=dice.choice([1, 2, 2, 3, 4, 8]),
        trainer__groups_per_update=per_update,
        trainer__steps_per_update=dice.choice([n for n in range(1, per_update + 1) if per_update % n == 0]),
        trainer__streaming=dice.choice(["auto", "auto", "off"]),
        checkpoint__every=dice.choice([1, 1, 2, 20]),
        **({"validation__" + key: value for key, value in rounds.items()} if dice.random() < 0.3 else {}),
    )


def _temper(dice: random.Random) -> Temper:
    some, seconds = dice.choice, [0.0, 0.1, 1.0, 10.0]
    return Temper(
        message_s=some([0.0, 0.0, 0.01, 1.0, 5.0]),
        step_s=some(seconds),
        store_s=some(seconds),
        train_s=some(seconds),
        swap_s=some(seconds),
        detection_s=some([0.0, 1.0, 30.0]),
        grain=some([0.0, 0.0, 1.0]),
        shuffled=dice.random() < 0.5,
        duplicated=some([0.0, 0.05, 0.3]),
        lost_with_caller=some([0.0, 0.5, 1.0]),
        generation_fails=some([0.0, 0.0, 0.02, 0.2]),
        score_fails=some([0.0, 0.0, 0.02, 0.2]),
        equal_rewards=some([0.0, 0.0, 0.1, 0.3]),
        lasting_failures=some([0.0, 0.0, 0.1]),
        slow_groups=some([0.0, 0.0, 0.3]),
        store_dies=dice.random() < 0.6,
    )


COMPLETE = (GroupState.READY, GroupState.REMADE)


class Violation(AssertionError):
    """An invariant that does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class Checks:
    def __init__(self, job: Job, prompts: list[Prompt]) -> None:
        self._config = job.config
        self._prompts = PromptStream(prompts, job.config.run.seed, job.config.data.shuffle)
        self._rounds: list[int] = []  # validated versions, of all attempts
        self._attempts = 0

    # ---- after each message ------------------------------------------------------------------------------------------

    def message(self, coordinator: Coordinator, call: str, args: tuple[Any, ...], answer: Any) -> None:
        """Checks the state after `call` was made with `args`, when it is about to be answered."""
        self._buffers(coordinator)
        live = coordinator._samples.samples
        match call:
            case "next_samples" | "next_to_score" | "next_groups":
                require(len(answer) <= args[1], f"{call}: {len(answer)} were given, {args[1]} asked for")
                for group in answer if call == "next_groups" else ():
                    self._group(coordinator, args[0], group)
            case "update_done":
                version, groups, number = args[0].version, args[0].groups, self._config.trainer.groups_per_update
                require(len({*groups}) == len(groups) == number, f"update {version} trained groups {groups}")
            case "samples_done" if not coordinator.versions.knows(args[0]):
                for result in args[1]:
                    used = result.sample_id in live and live[result.sample_id].result is result
                    require(not used, f"{result.sample_id}: {args[0]} was lost, and its result is used")
            case "scored" if args[0] in coordinator._samples.lost_workers:
                for result in (result for result in args[1] if result.score is not None):
                    used = result.sample_id in live and live[result.sample_id].score is result.score
                    require(not used, f"{result.sample_id}: {args[0]} was lost, and its result is used")
            case "continuation" if not coordinator._plane.closed:
                self._control_state(coordinator, answer)

    def _buffers(self, coordinator: Coordinator) -> None:
        statistics = buffer_statistics(coordinator._groups, coordinator._samples)
        slots = statistics["slots"]
        require(slots["live"] + slots["awaiting_publication"] <= slots["capacity"], f"slots over capacity: {slots}")
        for name in ("replay", "trajectories"):
            buffer = statistics[name]
            fits = 0 <= buffer["ready"] <= buffer["reserved"] <= buffer["capacity"]
            require(fits, f"{name} buffer over capacity: {buffer}")
        coordinator._groups.check()

    def _group(self, coordinator: Coordinator, version: int, group: ReadyGroup) -> None:
        """Checks a group that the trainer takes to train from `version`."""
        number, size = group.group, self._config.rollout.group_size
        S, window = self._config.staleness.max_updates, self._config.buffer.window
        staleness = version - group.oldest_version
        require(0 <= staleness <= S, f"group {number} is {staleness} updates old, S = {S}")
        # Groups that the trainer gave back do not count: they were taken before.
        waiting = (GroupState.MAKING, GroupState.READY)
        live = coordinator._groups.groups.items()
        overtaken = [older for older, one in live if older < number and one.state in waiting]
        require(len(overtaken) < window, f"group {number} overtook {overtaken}, window = {window}")
        require(len(group.samples) == size, f"group {number} has {len(group.samples)} samples")
        for place, sample in enumerate(group.samples):
            made, name = sample.trajectory.value, sample.sample_id
            own = made.request.sample_id == name == f"g{number}.s{place}"
            require(own, f"{name} is {made.request.sample_id}")
            self.request(made.request)
            trained = tuple(made.versions[step] for step in group.window.steps) if group.window else made.versions
            said = tuple(sample.step_versions)
            require(said == trained, f"{name} says {said}, its engine used {made.versions}")

    def request(self, request: SampleRequest) -> None:
        """Checks that prompt, seed and window follow from the group's number alone, in every attempt."""
        if request.kind == "validation":
            return
        config, name, prompt = self._config, request.sample_id, request.prompt
        require(prompt == self._prompts[request.group], f"{name} of prompt {prompt.index}")
        expected = derive("sample", config.run.seed, prompt.index, request.group, request.sample)
        require(request.seed == expected, f"{name} with seed {request.seed}, its own is {expected}")
        require(request.window == window_of(request.group, config), f"{name} with window {request.window}")

    def _control_state(self, coordinator: Coordinator, kept: ControlState) -> None:
        complete = {group.number for group in coordinator._groups.groups.values() if group.state in COMPLETE}
        ready = {group.group for group in kept.ready}
        require(complete <= ready, f"groups {complete} are ready, {ready} are kept")
        rounds, last = coordinator._plane.validation.rounds, kept.validated
        repeated = last is None or all(version > last for version in rounds)
        require(repeated, f"rounds {[*rounds]} would not be repeated")

    # ---- of an attempt, and of all -----------------------------------------------------------------------------------

    def attempt(self, start: int, events: Iterable[Any]) -> None:
        """Checks `events` of one attempt, which began at version `start`."""
        updates = [event.data["version"] for event in events if event.kind == "update"]
        expected = [*range(start + 1, start + 1 + len(updates))]
        require(updates == expected, f"from version {start} on updates {updates} were made")
        rounds = [event.data["version"] for event in events if event.kind == "validation"]
        require(len(set(rounds)) == len(rounds), f"validation rounds {rounds}")
        self._rounds += rounds
        self._attempts += 1

    def goes_on(self, start: ControlState, lines: list[LedgerEntry]) -> None:
        """Checks a resume: `lines` of the ledger must equal the lines that the checkpoint counted."""
        size, digest = 0, ""
        for line in map(encode_line, lines):
            size, digest = size + len(line), extend(digest, line)
        counted = (start.ledger.size, start.ledger.digest)
        require((size, digest) == counted, "the ledger's lines are not those that the checkpoint counts")
        rewards = len(start.rewards)
        require(rewards == start.version, f"the checkpoint of update {start.version} has {rewards} rewards")

    def ledger(self, lines: list[LedgerEntry]) -> None:
        """Checks a job that is done: the lines that count, of all attempts."""
        trainer, S = self._config.trainer, self._config.staleness.max_updates
        numbers = sorted(line.group for line in lines)
        require(numbers == [*range(len(numbers))], f"groups {numbers} have a line: not each exactly once, or with gaps")
        trained = Counter(line.trained_version for line in lines if line.event == "trained")
        expected = dict.fromkeys(range(1, trainer.updates + 1), trainer.groups_per_update)
        require(trained == expected, f"groups by update: {dict(trained)}")
        for line in lines:
            why, age = line.reason, line.staleness
            require((line.event == "trained") == (why is None), f"{line.event} because {why}")
            require(not (why or "").startswith("run "), f"group {line.group} was admitted for nothing: {why}")
            require(age is None or 0 <= age <= S, f"group {line.group} was trained {age} updates old")
        if self._config.validation is not None:
            last = {trainer.updates}
            expected_rounds = {0} | last if self._attempts == 1 else last  # the first may have been cut short
            require(expected_rounds <= set(self._rounds), f"rounds of versions {self._rounds} only")

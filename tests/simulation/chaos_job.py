"""Draws a job from a seed: a small configuration, how the world around its roles behaves, and what breaks when. Runs
nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec

from omni_async.config import Config, check

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
    """Longest times in seconds (drawn anew each time), and the odds of what may happen to a message or a sample.

    `grain`: times are multiples of it, so that things happen in the same instant; 0 for any time. `shuffled`: what is
    ready together runs in any order. Some groups fail, are slow, or have equal rewards, each time they are made.
    """

    message_s: float
    step_s: float
    store_s: float
    train_s: float
    swap_s: float
    detection_s: float
    grain: float
    shuffled: bool
    duplicated: float
    lost_with_caller: float
    generation_fails: float
    score_fails: float
    equal_rewards: float
    lasting_failures: float
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
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": "model"},
        "data": {"prompts": "prompts.txt"},
        "run": {"runtime": "inprocess"},
        "rollout": {
            "engine": "emulated",
            "num_inference_steps": 3,
            "group_size": 2,
            "sde": {"window": {"size": 1, "range": [0, 2]}},
        },
        "reward": {"scorers": [{"name": "ocr"}]},
        "trainer": {"updates": 3, "groups_per_update": 2},
        "checkpoint": {"every": 1},
    }
    for path, value in changes.items():
        section, key = path.split("__")
        tree.setdefault(section, {})[key] = value
    config = msgspec.convert(tree, Config)
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
    max_updates, per_update, size = (
        dice.choice([0, 0, 1, 1, 2, 3]),
        dice.choice([1, 1, 2, 2, 3]),
        dice.choice([2, 2, 3]),
    )
    exact, in_step = dice.random() < 0.15, dice.random() < 0.25
    slots = (max_updates + 1) * per_update
    trajectories = dice.choice([1, 2, 4, 64])
    bound = per_update * size * SAMPLE_BYTES
    rounds = {
        "prompts": "validation.txt",
        "every": dice.randint(1, 3),
        "share": dice.choice([0.1, 0.5, 1.0]),
        "num_inference_steps": 2,
    }
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
        buffer__trajectories=max(trajectories, per_update * size) if in_step else trajectories,
        buffer__groups=max(dice.choice([1, per_update, slots, 32]), slots if exact else 1),
        buffer__window=dice.choice([1, 1, 2, 4]),
        buffer__max_bytes=None if exact else dice.choice([None, bound, bound * 3 // 2]),
        weights__publish_every=1 if exact else dice.randint(1, max_updates + 1),
        rollout__timeout_s=2000.0,  # longer than any sample of a healthy engine takes
        weights__timeout_s=6000.0,
        weights__swap=dice.choice(["step", "request", "drain"]),
        trainer__updates=dice.choice([1, 2, 2, 3, 4]),
        trainer__groups_per_update=per_update,
        trainer__steps_per_update=dice.choice([n for n in range(1, per_update + 1) if per_update % n == 0]),
        trainer__streaming=dice.choice(["auto", "auto", "off"]),
        checkpoint__every=dice.choice([1, 1, 2, 20]),
        **({"validation__" + key: value for key, value in rounds.items()} if dice.random() < 0.3 else {}),
    )


def _temper(dice: random.Random) -> Temper:
    def seconds() -> float:
        return dice.choice([0.0, 0.1, 1.0, 10.0])

    def odds(*values: float) -> float:
        return dice.choice(values)

    return Temper(
        message_s=dice.choice([0.0, 0.0, 0.01, 1.0, 5.0]),
        step_s=seconds(),
        store_s=seconds(),
        train_s=seconds(),
        swap_s=seconds(),
        detection_s=dice.choice([0.0, 1.0, 30.0]),
        grain=dice.choice([0.0, 0.0, 1.0]),
        shuffled=dice.random() < 0.5,
        duplicated=odds(0.0, 0.05, 0.3),
        lost_with_caller=odds(0.0, 0.5, 1.0),
        generation_fails=odds(0.0, 0.0, 0.02, 0.2),
        score_fails=odds(0.0, 0.0, 0.02, 0.2),
        equal_rewards=odds(0.0, 0.0, 0.1, 0.3),
        lasting_failures=odds(0.0, 0.0, 0.1),
        slow_groups=odds(0.0, 0.0, 0.3),
        store_dies=dice.random() < 0.6,
    )

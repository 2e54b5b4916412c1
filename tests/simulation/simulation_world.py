"""Builds configurations and profiles to simulate."""

from __future__ import annotations

from typing import Any

from omni_async.config import Config, check
from omni_async.performance.profile import Profile, ServiceTime
from tests.support.configs import build


def make_config(**changes: Any) -> Config:
    """Builds an allowed configuration with large buffers: `rollout__workers=2` sets rollout.workers."""
    config = build({"buffer": {"trajectories": 4096, "groups": 256}}, changes)
    assert check(config) is None, check(config)
    return config


def make_profile(**stages: float | tuple[float, ...]) -> Profile:
    """Builds a profile: a number is seconds per job, a pair also seconds per unit, a third its variation."""
    times = {"generate": 0.0, "score": 0.0, "train": 0.0, **stages}
    made = {name: ServiceTime(*(value if isinstance(value, tuple) else (value,))) for name, value in times.items()}
    return Profile(name="made", source="a test", **made)

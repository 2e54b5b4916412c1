"""Tests the stages of a start, and the lines that `--timing` shows."""

import pytest

from omni_async.runtime import start_times
from omni_async.runtime.start_times import Stage, StartClock, StartTiming


def test_stages_follow_one_another(monkeypatch):
    clock, now = StartClock(), [0.0]
    created = clock._process.create_time()
    monkeypatch.setattr(start_times.WallClock, "now", lambda self: created + now[0])
    monkeypatch.setattr(StartClock, "_cpu_s", lambda self: now[0] / 4)
    for name, now[0] in (("process", 2.0), ("build", 6.0)):
        clock.end(name)
    assert [*map(tuple, clock.stages)] == [
        ("process", *map(pytest.approx, (2.0, 0.5))),
        ("build", *map(pytest.approx, (4.0, 1.0))),
    ]


def test_the_worker_that_is_ready_last_is_on_the_slowest_path():
    timing, lines = StartTiming(wanted=True), list[str]()
    workers = {
        "trainer": [Stage("build", 3.0, 2.0), Stage("load", 1.0, 0.5)],
        "rollout-0": [Stage("build", 1.0, 1.0), Stage("load", 9.0, 8.0)],
        "coordinator": [Stage("build", 2.0, 2.0)],
    }
    for stage in ("check", "Ray", "workers"):
        timing.end(stage)
    for _ in range(2):
        timing.show("trackers", workers, lines.append)
    assert lines[2:-1] == [
        "trainer: build 3.0 s (2.0), load 1.0 s (0.5)",
        "rollout-0: build 1.0 s (1.0), load 9.0 s (8.0)",
        "coordinator: build 2.0 s (2.0)",
    ]
    slowest = [name.rsplit(" ", 2)[0] for name in lines[-1].removeprefix("slowest path: ").split(", ")]
    assert slowest == ["check", "Ray", "rollout-0", "trackers"]
    StartTiming().show("trackers", workers, lines.append)
    assert len(lines) == 6, "shown once, and only if wanted"

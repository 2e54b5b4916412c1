"""What holds for every sink: nobody waits for it, a failure is one warning, and its run is ended all the same."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from omni_async.tracking.sinks.base import Ended, Sink
from omni_async.tracking.sinks.feed import Sinks
from tests.patience import PATIENCE


class Stubborn(Sink):
    """Remembers how it ended; its metrics wait for `release`, and those of the step `fails_at` fail."""

    label = "Stubborn"

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.release = threading.Event()
        self.steps: list[int] = []
        self.ended: list[Ended | None] = []

    def metrics(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        assert self.release.wait(PATIENCE)
        if step == self.fails_at:
            raise OSError("token=hunter2hunter2 was refused\nTraceback")
        self.steps.append(step)

    def finish(self, status: Ended | None) -> None:
        self.ended.append(status)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("omni_async")]


def test_a_failure_is_one_warning_without_secrets_and_costs_neither_other_sinks_nor_the_end(caplog):
    failing, well = Stubborn(fails_at=13), Stubborn()
    sinks = Sinks([failing, well])
    sinks.begin(0)
    failing.release.set()
    well.release.set()
    for step in (1, 13, 2, 13):
        sinks.metrics({"x": 1.0}, step)
    sinks.artifact(Path("/nowhere"))
    with caplog.at_level(logging.WARNING):
        sinks.finish("failed")
    assert failing.steps == [1] and failing.ended == ["failed"], "nothing after the failure but the end"
    assert well.steps == [1, 13, 2, 13] and well.ended == ["failed"]
    said = "Stubborn logging stops here (OSError: token=*** was refused); the run goes on and its folder has everything"
    assert warnings(caplog) == [said]


def test_callers_never_wait_and_a_sink_that_is_far_behind_is_given_up(caplog):
    sink = Stubborn()
    sinks = Sinks([sink])
    sinks.begin(0)
    with caplog.at_level(logging.WARNING):
        for step in range(1500):
            sinks.metrics({"x": 1.0}, 100 + step)
    assert sink.steps == [], "it still waits, and no caller did"
    [said] = warnings(caplog)
    assert "1000 writes behind" in said
    sink.release.set()
    sinks.finish("interrupted")
    assert sink.ended == ["interrupted"]


def test_a_run_that_never_began_is_left_alone_and_an_end_does_not_wait_for_ever(caplog):
    sink, stuck = Stubborn(), Stubborn()
    Sinks([sink]).finish("done")
    assert sink.ended == [None]
    sinks = Sinks([stuck])
    sinks.begin(0)
    sinks.metrics({"x": 1.0}, 1)
    with caplog.at_level(logging.WARNING):
        sinks.finish("done", timeout_s=0.1)
    [said] = warnings(caplog)
    assert "it is still writing" in said
    stuck.release.set()

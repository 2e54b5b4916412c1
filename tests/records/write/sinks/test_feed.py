"""What holds for every sink: nobody waits for it, and a tracker that comes back lacks nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from omni_async.records.write.sinks import feed
from omni_async.records.write.sinks.base import Ended, Numbers, Sink, SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.late import LateSink
from tests.support.patience import PATIENCE, wait_for


class Stubborn(Sink):
    """Remembers its writes and its end; metrics wait for `release`, and each call fails while `down`."""

    label = "Stubborn"

    def __init__(self) -> None:
        self.release = threading.Event()
        self.down = False
        self.failures = 0
        self.refused: set[int] = set()
        self.begun: list[int] = []
        self.steps: list[int] = []
        self.calls: list[list[int]] = []
        self.ended: list[Ended | None] = []

    def begin(self, version: int) -> None:
        self._answer()
        self.begun.append(version)

    def metrics(self, rows: Sequence[Numbers]) -> None:
        assert self.release.wait(PATIENCE)
        self._answer()
        steps = [row.step for row in rows]
        self.calls.append(steps)
        if self.refused & {*steps}:
            raise ValueError("token=hunter2hunter2 has a wrong value\nTraceback")
        self.steps += steps

    def finish(self, status: Ended | None) -> None:
        self._answer()
        self.ended.append(status)

    def _answer(self) -> None:
        if self.down:
            self.failures += 1
            raise OSError("token=hunter2hunter2 was refused\nTraceback")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(feed, "_LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def sink() -> Stubborn:
    made = Stubborn()
    made.release.set()
    return made


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("omni_async")]


def begun(*sinks: Sink) -> Sinks:
    all_of_them = Sinks(sinks)
    all_of_them.begin(0)
    return all_of_them


def put(sinks: Sinks, steps: range) -> None:
    for step in steps:
        sinks.metrics({"x": 1.0}, step)


def test_outage(sink: Stubborn, caplog: pytest.LogCaptureFixture):
    """What waits is sent in order once the tracker answers; the other sink and the callers notice nothing."""
    well = Stubborn()
    well.release.set()
    sink.refused = {0}
    sinks = begun(sink, well)
    put(sinks, range(3))
    wait_for(lambda: sink.steps == [1, 2], "two writes, after a refusal")
    sink.down = True
    put(sinks, range(3, 200))
    wait_for(lambda: sink.failures > 3 and len(well.steps) == 200, "more tries")
    threading.Timer(0.1, lambda: setattr(sink, "down", False)).start()
    sinks.finish("done")
    assert well.steps == list(range(200)) and sink.steps == well.steps[1:] and sink.ended == well.ended == ["done"]
    _, down, up, _ = warnings(caplog)
    assert down == (
        "Stubborn: it does not answer; writes wait until it does (OSError: token=*** was refused); the run"
        " continues, and its folder has everything"
    )
    assert up.startswith("Stubborn answers again; ")


def test_down_until_the_end(sink: Stubborn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed, "_LAST_CHANCE_S", 0.2)
    sink.down = True
    sinks = begun(sink)
    put(sinks, range(3))
    wait_for(lambda: sink.failures > 0, "a failure")
    sinks.finish("done")
    assert sink.ended == [] and sink.steps == []
    assert "Stubborn: it lacks 4 writes of this run (OSError: token=*** was refused)" in warnings(caplog)[1]
    assert "Stubborn: it has no record of the run's end" in warnings(caplog)[2]


@pytest.mark.parametrize(
    ("refused", "written", "said", "lacks"),
    [
        ({13, 14}, [12, 15, 16], "it refused a write, which is left out (ValueError: token=*** has a wrong value)", 2),
        ({*range(100)}, [], "it refused 20 writes in a row and gets no more", 100),
    ],
)
def test_refused_writes(
    sink: Stubborn, caplog: pytest.LogCaptureFixture, refused: set[int], written: list[int], said: str, lacks: int
):
    sink.refused = refused
    sinks = begun(sink)
    put(sinks, range(12, 17) if written else range(100))
    sinks.finish("failed")
    assert sink.steps == written and sink.ended == ["failed"]
    assert any(said in one for one in warnings(caplog))
    assert f"it lacks {lacks} writes of this run" in warnings(caplog)[-1]


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError, IsADirectoryError, AttributeError, ImportError])
def test_a_write_that_always_fails_holds_up_no_other(error: type[Exception], caplog: pytest.LogCaptureFixture):
    """MLflow's server may have an artifact folder that this machine lacks: every image fails, and no number does."""

    class Reader(Stubborn):
        def artifact(self, path: Path) -> None:
            raise error(path)

    reader = Reader()
    reader.release.set()
    sinks = begun(reader)
    sinks.artifact(Path("/mlruns"))
    sinks.metrics({"x": 1.0}, 1)
    sinks.finish("done")
    assert reader.steps == [1] and reader.ended == ["done"]
    assert not any("does not answer" in said for said in warnings(caplog))


def test_too_far_behind(caplog: pytest.LogCaptureFixture):
    slow = Stubborn()
    sinks = begun(slow)
    put(sinks, range(1500))
    assert slow.steps == [], "it still waits, and no caller did"
    [said] = warnings(caplog)
    assert "1,000 writes wait, and later ones are left out" in said
    slow.release.set()
    sinks.finish("interrupted")
    assert len(slow.steps) >= 999 and slow.ended == ["interrupted"]
    assert f"it lacks {1500 - len(slow.steps)} writes" in warnings(caplog)[-1]


def test_gathered_metrics_go_together_in_order_and_refused_ones_alone():
    class Gathering(Stubborn):
        gathers_s = PATIENCE

    sink = Gathering()
    sink.release.set()
    sink.refused = {1}
    sinks = begun(sink)
    put(sinks, range(3))
    sinks.remark("not_scored", "one", 2)  # ends the wait
    wait_for(lambda: sink.steps == [0, 2], "the metrics before the remark")
    put(sinks, range(3, 5))
    sinks.finish("done")  # so does the end
    assert sink.calls == [[0, 1, 2], [0], [1], [2], [3, 4]] and sink.ended == ["done"]


def test_stuck_write(caplog: pytest.LogCaptureFixture):
    stuck = Stubborn()
    sinks = begun(stuck)
    sinks.metrics({"x": 1.0}, 1)
    sinks.finish("done", timeout_s=0.1)
    assert any("it lacks 1 write of this run (it is still writing)" in said for said in warnings(caplog))
    stuck.release.set()


def test_late_sink(sink: Stubborn, caplog: pytest.LogCaptureFixture):
    """A tracker that is down when the run resumes gets its run and all writes once it answers."""
    down = True

    def construct() -> Sink:
        if down:
            raise SinkUnusableError("tracking.x: cannot use it: connection refused", down=True)
        return sink

    late = LateSink("Late", construct)
    assert {name for name in vars(Sink) if name[0] != "_"} - {*vars(LateSink)} == {"label"}, "it passes all on"
    sinks = begun(late)
    put(sinks, range(3))
    wait_for(lambda: any("does not answer" in said for said in warnings(caplog)), "a warning")
    assert late.where == late.live == ""
    down = False
    sinks.finish("done")
    assert sink.begun == [0] and sink.steps == [0, 1, 2] and sink.ended == ["done"]


def test_a_run_that_never_begins(sink: Stubborn):
    opened: list[int] = []
    Sinks([sink, LateSink("Late", lambda: opened.append(1) or sink)]).finish("interrupted")
    assert sink.ended == [None] and opened == []

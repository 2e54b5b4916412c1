"""Tests what the benchmarks of weights and of publishes report, on a fake engine and on a real one."""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks import publish_loss, publish_loss_engine, weights
from benchmarks.publish_loss import Record, Way
from benchmarks.publish_loss_engine import BusyHost, Outcome
from benchmarks.weights_measure import PublishRecord, ThroughputRecord
from benchmarks.weights_report import Results, show
from omni_async.commands.bench.result import describe_machine
from tests.support.patience import PATIENCE


def publish(repeat: int, blocked: float, copy: float, transport: str = "disk") -> PublishRecord:
    return PublishRecord(
        "full", 10.0, transport, repeat, 10_000_000, copy, copy / 2, 3 * copy, blocked, 5 * blocked, 0.002, 0.003
    )


def window(arm: str, repeat: int, seconds: float, publishes: int = 0) -> ThroughputRecord:
    return ThroughputRecord(arm, repeat, 48, seconds, publishes)


def text(**records: Any) -> list[str]:
    given = {"publishes": [], "throughput": [], "notes": [], **records}
    console = Console(file=io.StringIO(), width=200)
    show(Results(describe_machine(), {}, **given), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def line_with(lines: list[str], word: str) -> str:
    [found] = [line for line in lines if word in line]
    return found


def test_blocked_time_is_compared_with_the_copy_of_its_own_repeat() -> None:
    # A machine that is ten times slower in the second repeat changes neither ratio.
    order = ["object_store", "disk", "collective"]
    lines = text(publishes=[publish(n, 0.0012 * 10**n, 0.001 * 10**n, name) for n in range(2) for name in order])
    assert [word for line in lines for word in line.split() if word in weights.TRANSPORTS] == order
    assert "1.2 (1.2..1.2)" in line_with(lines, "disk")
    assert "2.4 (2.4..2.4)" in line_with(lines, "disk")  # of the copy in blocks
    assert "!" not in line_with(lines, "disk")


def test_a_missed_target_is_marked() -> None:
    slowed = [window("quiet", 0, 1.0), window("periodic", 0, 1.06, 3)]
    lines = text(publishes=[publish(0, 0.0016, 0.001)], throughput=slowed)
    assert line_with(lines, "disk").count("!") == 1
    assert "!" in line_with(lines, "periodic") and "!" not in line_with(lines, "│ quiet")


def test_generation_is_compared_with_the_quiet_window_of_its_own_repeat() -> None:
    quiet = [window("quiet", repeat, seconds) for repeat, seconds in enumerate((1.0, 10.0))]
    publishing = [window("back_to_back", 0, 2.0, 8), window("back_to_back", 1, 20.0, 80)]
    line = line_with(text(throughput=quiet + publishing), "back to back")
    assert "0.5 (0.5..0.5)" in line and "4 (4..4)" in line


def test_sizes_that_do_not_fit_are_left_out_and_named() -> None:
    given = [100.0, 10.0, 1e9]
    fit, notes = weights._sizes(argparse.Namespace(sizes=given, max_mb=50.0))
    assert fit == [10.0]
    assert [note.split(" (")[0] for note in notes] == ["left out: 100 MB", "left out: 1e+09 MB"]
    assert weights._sizes(argparse.Namespace(sizes=given, max_mb=1e12))[0] == [10.0, 100.0]


# ---- publishes in mid-generation -------------------------------------------------------------------------------------


pytest.importorskip("ray")


class Steps:
    """An engine that takes a step of every sample each time the event loop comes round; `version` took it."""

    def __init__(self, failing: str = "") -> None:
        self.version, self.computed, self._failing = 0, 0, failing

    async def generate(self, request: Any) -> Any:
        versions = []
        for _ in range(request.steps):
            await asyncio.sleep(0)
            self.computed += 1
            versions.append(self.version)
        if request.name == self._failing:
            raise RuntimeError("this sample fails")
        return SimpleNamespace(versions=tuple(versions))

    async def _call(self, method: str) -> dict[str, int]:
        assert method == "steps_computed"
        return {"steps": self.computed}

    async def receive_weights(self, manifest: Any, parcel: Any) -> None:
        self.version += 1


@pytest.fixture(autouse=True)
def every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the probe look at every turn of the event loop, at which an engine here takes a step."""
    monkeypatch.setattr(publish_loss_engine, "_POLL_S", 0)


def draw(way: Way, failing: str = "") -> Outcome:
    """Draws five samples of 20 steps, three at a time, with a version after 10 and one after 50 of their steps."""
    engine = Steps(failing)
    host = object.__new__(BusyHost)
    host.__dict__ |= {
        "_engine": engine,
        "_config": SimpleNamespace(rollout=SimpleNamespace(max_inflight=3)),
        "_producers": {"any": engine},
    }

    async def main() -> Outcome:
        await host.begin(way, [SimpleNamespace(name=f"s{n}", steps=20) for n in range(5)])  # type: ignore[misc]
        for steps in (10, 50):
            assert await host.reach(steps)
            await host.receive("any", None, None)  # type: ignore[arg-type]
        assert not await host.reach(1000)
        return await host.outcome()

    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_samples_that_go_on_through_a_publish_lose_nothing_and_drained_ones_mix_no_versions() -> None:
    swapped, drained = draw("swap"), draw("drain")
    for outcome, mixed in ((swapped, 3), (drained, 0)):  # 3: those of the first 60 steps
        assert (outcome.asked, outcome.finished, outcome.mixed) == (5, 5, mixed)
        assert (outcome.lost_samples, outcome.lost_steps) == (0, 0)
    assert swapped.computed == swapped.used == 100
    assert publish_loss.what_was_lost(Record("swap", 2, 1.0, swapped)) == []


def test_what_is_thrown_away_at_a_publish_is_counted_and_drawn_again() -> None:
    outcome = draw("abort")
    assert (outcome.finished, outcome.used, outcome.mixed) == (5, 100, 0)
    assert outcome.aborted == 3 + 3  # all that ran, at both publishes
    assert outcome.lost_steps == outcome.computed - 100 >= 10


def test_what_was_lost_is_said_and_a_run_whose_publishes_met_nothing_under_way_is_no_measurement() -> None:
    failing = draw("swap", failing="s1")
    assert (failing.finished, failing.failed, failing.lost_samples, failing.lost_steps) == (4, 1, 1, 20)
    said = ["1 samples were lost, 4 of 5 finished", "20 denoising steps are in no trajectory"]
    assert publish_loss.what_was_lost(Record("swap", 2, 1.0, failing)) == said
    assert "samples were lost" in publish_loss.what_was_lost(Record("swap", 2, 1.0, draw("abort")))[0]
    idle = Outcome(asked=1, finished=1, aborted=0, failed=0, mixed=0, computed=9, used=9)
    [problem] = publish_loss.what_was_lost(Record("swap", 1, 1.0, idle))
    assert "no publish met a sample under way" in problem


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(280)
def test_a_real_engine_loses_nothing_at_publishes_in_mid_generation(tmp_path: Path) -> None:
    arguments = ["--family", "qwen_image", "--samples", "9", "--publishes", "3", "--out", str(tmp_path)]
    arguments += ["--sampling", "[{height: 64, width: 64}, {height: 32, width: 64}]"]
    arguments += ["--steps", "100"]  # samples of several seconds: a publish meets them on a busy machine, too
    assert publish_loss.main(arguments) == 0
    results = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=publish_loss.Results)
    outcomes = {record.way: record.outcome for record in results.records}
    assert [o.finished for o in outcomes.values()] == [9, 9, 9]
    assert len({o.used for o in outcomes.values()}) == 1
    assert outcomes["swap"].lost_steps == outcomes["drain"].lost_steps == 0
    assert outcomes["swap"].mixed > 0 and outcomes["drain"].mixed == outcomes["abort"].mixed == 0
    assert outcomes["abort"].lost_samples > 0 and outcomes["abort"].lost_steps > 0

"""Tests how the probe of publishes counts: on an engine whose steps are known, and on a real one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks import publish_loss, publish_loss_engine
from benchmarks.publish_loss import Record, Results, Way
from benchmarks.publish_loss_engine import BusyHost, Outcome

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

    return asyncio.run(asyncio.wait_for(main(), 10))


def test_samples_that_go_on_through_a_publish_lose_nothing() -> None:
    outcome = draw("swap")
    assert (outcome.asked, outcome.finished, outcome.lost_samples, outcome.lost_steps) == (5, 5, 0, 0)
    assert outcome.computed == outcome.used == 100
    assert outcome.mixed == 3  # those of the first 60 steps
    assert publish_loss.what_was_lost(Record("swap", 2, 1.0, outcome)) == []


def test_draining_loses_no_steps_and_mixes_no_versions() -> None:
    outcome = draw("drain")
    assert (outcome.finished, outcome.lost_samples, outcome.lost_steps, outcome.mixed) == (5, 0, 0, 0)


def test_what_is_thrown_away_at_a_publish_is_counted_and_drawn_again() -> None:
    outcome = draw("abort")
    assert outcome.finished == 5 and outcome.used == 100 and outcome.mixed == 0
    assert outcome.aborted == 3 + 3  # all that ran, at both publishes
    assert outcome.lost_steps == outcome.computed - 100 >= 10
    assert "samples were lost" in publish_loss.what_was_lost(Record("swap", 2, 1.0, outcome))[0]


def test_a_sample_that_fails_is_lost_and_not_drawn_again() -> None:
    outcome = draw("swap", failing="s1")
    assert (outcome.finished, outcome.failed, outcome.lost_samples, outcome.lost_steps) == (4, 1, 1, 20)
    assert publish_loss.what_was_lost(Record("swap", 2, 1.0, outcome)) == [
        "1 samples were lost, 4 of 5 finished",
        "20 denoising steps are in no trajectory",
    ]


def test_a_run_whose_publishes_met_nothing_under_way_is_no_measurement() -> None:
    outcome = Outcome(asked=1, finished=1, aborted=0, failed=0, mixed=0, computed=9, used=9)
    [problem] = publish_loss.what_was_lost(Record("swap", 1, 1.0, outcome))
    assert "no publish met a sample under way" in problem


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_real_engine_loses_nothing_at_publishes_in_mid_generation(tmp_path: Path) -> None:
    arguments = ["--family", "qwen_image", "--samples", "9", "--publishes", "3", "--out", str(tmp_path)]
    arguments += ["--sampling", "[{height: 64, width: 64}, {height: 32, width: 64}]"]
    arguments += ["--steps", "100"]  # samples of several seconds: a publish meets them on a busy machine, too
    assert publish_loss.main(arguments) == 0
    results = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=Results)
    outcomes = {record.way: record.outcome for record in results.records}
    assert [o.finished for o in outcomes.values()] == [9, 9, 9]
    assert len({o.used for o in outcomes.values()}) == 1
    assert outcomes["swap"].lost_steps == outcomes["drain"].lost_steps == 0
    assert outcomes["swap"].mixed > 0 and outcomes["drain"].mixed == outcomes["abort"].mixed == 0
    assert outcomes["abort"].lost_samples > 0 and outcomes["abort"].lost_steps > 0

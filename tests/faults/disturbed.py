"""Runs emulated jobs on real Ray actors whose processes are killed or stopped while they do what the profile makes them
do nearly all of the time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kill_everything import Job
from omni_async.driver.control_socket import ControlError, Request, ask
from omni_async.driver.train import train
from omni_async.performance.profile import Payload, Profile
from omni_async.performance.service import ServiceTime
from omni_async.preflight.check import preflight
from omni_async.tracking.attempts import Fault, read_faults
from omni_async.tracking.summary import Summary
from tests.e2e.emulation import write_recipe
from tests.runtime.runtime_world import RememberingConsole

_SHORT = ServiceTime(fixed_s=0.002)
SMALL = Payload(trajectory=20_000, media=3_000, weights=100_000)


def profile(slow: str, seconds: float, payload: Payload = SMALL) -> Profile:
    """Returns a profile in which everything is quick but for one stage."""
    stages = ("generate", "score", "proximal", "train", "step", "export", "publish", "swap", "switch")
    return Profile(
        name="small",
        source="made up",
        payload=payload,
        **{stage: ServiceTime(fixed_s=seconds) if stage == slow else _SHORT for stage in stages},
    )


class Disturbed:
    """A job in a thread of this process, on the Ray of this process or one of its own; `disturb` runs beside it."""

    def __init__(self, folder: Path, made: Profile, **sections: Any) -> None:
        usual: dict[str, Any] = {
            "run": {"runtime": "ray", "health_timeout_s": 3.0, "restarts": 20},
            "reward": {"workers": 2},
            "buffer": {"trajectories": 32, "groups": 16},
            "trainer": {"updates": 100_000, "groups_per_update": 2},
            "checkpoint": {"every": 3},
        }
        for name, section in sections.items():
            usual[name] = {**usual.get(name, {}), **section} if isinstance(section, dict) else section
        self._begin(write_recipe(folder, made, **usual), ())

    @classmethod
    def of(cls, recipe: Path, *overrides: str) -> Disturbed:
        """Makes one of any recipe."""
        run = cls.__new__(cls)
        run._begin(recipe, overrides)
        return run

    def _begin(self, recipe: Path, overrides: tuple[str, ...]) -> None:
        self.job = Job(recipe, [*overrides])
        self.console = RememberingConsole()
        self._summary: Summary | None = None

    def run(self, disturb: Callable[[Disturbed], None], timeout_s: float = 120.0) -> Summary:
        inputs = preflight(self.job.config)

        def work() -> None:
            self._summary = train(inputs, self.console)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            disturb(self)
        except BaseException:
            with contextlib.suppress(ControlError):
                ask(self.job.run / "control.sock", Request(stop=True), timeout_s=10)
            thread.join(20)
            raise
        thread.join(timeout_s)
        assert not thread.is_alive(), f"the run hangs: {self.console.phases[-1:]} {self.console.notes[-3:]}"
        assert self._summary is not None, "the run raised"
        return self._summary

    def wait_for(self, what: Callable[[], bool], timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < end, (
                f"it did not come to that: {self.console.phases[-1:]} {self.console.notes[-3:]}"
            )
            time.sleep(0.02)

    def updated(self, number: int, timeout_s: float = 60.0) -> None:
        """Waits until that many updates are made, in this attempt or before."""
        self.wait_for(lambda: any(update["update"] >= number for update in self.console.updates), timeout_s)

    def parts(self) -> dict[str, dict[str, Any]]:
        status: dict[str, dict[str, Any]] = ask(self.job.run / "control.sock", Request(), timeout_s=30)["parts"]
        return status

    def signal(self, part: str, number: int) -> None:
        os.kill(self.parts()[part]["pid"], number)

    def stop(self) -> None:
        """Stops the run as Ctrl-C would, after two more updates."""
        self.updated(self.console.updates[-1]["update"] + 2)
        ask(self.job.run / "control.sock", Request(stop=True), timeout_s=60)

    def scale(self, **workers: int) -> dict[str, Any]:
        return ask(self.job.run / "control.sock", Request(workers), timeout_s=60)

    @property
    def faults(self) -> list[Fault]:
        return read_faults(self.job.run / "faults.jsonl")

    def require_whole(self, summary: Summary) -> None:
        """Requires that the run ended on request, with every group in exactly one line and every update made of its
        groups."""
        assert summary.status == "interrupted" and summary.reason == "on request", summary.reason
        assert summary.conserved
        ledger = self.ledger()
        assert sorted(line["group"] for line in ledger) == [*range(summary.counters.admitted)]
        trained = Counter(line["trained_version"] for line in ledger if line["event"] == "trained")
        assert trained == dict.fromkeys(range(1, summary.updates + 1), 2)
        assert all(line["reason"].startswith("run interrupted") for line in ledger if line["event"] != "trained")
        assert all(line["staleness"] <= 2 for line in ledger if line["event"] == "trained")

    def ledger(self) -> list[dict[str, Any]]:
        return self.job.lines("ledger.jsonl")

"""Makes run folders with a known answer, and a `train` that leaves them behind in no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from omni_async.aio.clock import ManualClock
from omni_async.commands.bench.plan import stamp
from omni_async.config import Config
from omni_async.config.schedule import num_devices
from omni_async.performance.profile import Profile, ServiceTime, write_profile
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Summary, write_summary
from omni_async.records.write.timeline import write_trace
from omni_async.roles.inputs import RunInputs
from omni_async.types import Span
from tests.support.configs import make_summary, with_sections

ORIGIN = 1_700_000_000.0
GROUPS, SIZE = 4, 8
# Seconds of a synchronous update, one stage after the other; both engines generate for 3, then one of them for 1 more.
GENERATION, TAIL, REWARD, TRAINING, RECOMPUTE, EXPORT, PUBLISH, CONTROL = 3.0, 1.0, 2.0, 5.0, 0.75, 0.5, 1.5, 0.25
SYNC_STEP = GENERATION + TAIL + REWARD + RECOMPUTE + TRAINING + EXPORT + PUBLISH + CONTROL
PROFILE = Profile(
    name="toy",
    source="made up",
    generate=ServiceTime(unit_s=0.1, cv=0.1),
    score=ServiceTime(unit_s=0.05),
    train=ServiceTime(unit_s=0.15),
)

_RECIPE: dict[str, Any] = {
    "run": {"name": "toy", "seed": 7, "runtime": "inprocess"},
    "model": {"path": "nowhere"},
    "data": {},
    "rollout": {"workers": 2, "group_size": SIZE, "max_batch": SIZE},
    "reward": {"workers": 1},
    "trainer": {"updates": 12, "groups_per_update": GROUPS},
    "emulation": {"profile": "toy.json", "time_scale": 0.01},
}


def write_recipe(folder: Path, **sections: Any) -> Path:
    """Writes `folder/toy.yaml`, on emulated devices of `folder/toy.json`, at a hundredth of their time."""
    write_profile(folder / "toy.json", PROFILE)
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(with_sections(_RECIPE, sections)))
    return path


def sync_spans(updates: int) -> tuple[list[Span], dict[int, float]]:
    """Returns the spans of a synchronous run of two engines, in the clock's seconds, and when updates were finished."""
    spans, finished, now = [], {}, ORIGIN
    for version in range(updates + 1):
        spans.append(Span("trainer", "export", now, now + EXPORT, {"version": version}))
        now += EXPORT
        spans.append(Span("publisher", "publish", now, now + PUBLISH, {"version": version}))
        now += PUBLISH
        if version == updates:
            break
        waiting = now
        spans += [Span("rollout-0", "generate", now, now + GENERATION, {"sample": str(i)}) for i in range(SIZE)]
        spans.append(Span("rollout-1", "generate", now, now + GENERATION + TAIL))
        now += GENERATION + TAIL
        spans.append(Span("reward-0", "score", now, now + REWARD, {"samples": 1}))
        now += REWARD + CONTROL
        spans.append(Span("trainer", "starved", waiting, now))
        spans.append(Span("trainer", "proximal", now, now + RECOMPUTE, {"version": version}))
        now += RECOMPUTE
        for part in range(2):
            spans.append(Span("trainer", "train", now, now + TRAINING / 2, {"version": version, "step": part}))
            now += TRAINING / 2
        finished[version + 1] = now
    return spans, finished


def overlapped_spans(updates: int, step: float) -> tuple[list[Span], dict[int, float]]:
    """Returns the spans of a run whose trainer trains for `step` and never waits, nor do engines and scorers."""
    end = ORIGIN + step * updates
    spans = [Span(actor, "generate", ORIGIN, end) for actor in ("rollout-0", "rollout-1")]
    spans.append(Span("reward-0", "score", ORIGIN, end, {"samples": 1}))
    spans += [
        Span("trainer", "train", ORIGIN + step * v, ORIGIN + step * (v + 1), {"version": v}) for v in range(updates)
    ]
    return spans, {v + 1: ORIGIN + step * (v + 1) for v in range(updates)}


def write_run(
    inputs: RunInputs,
    spans: Sequence[Span],
    finished: dict[int, float],
    *,
    staleness: Sequence[int] = (0,),
    status: Any = "done",
    reason: str | None = None,
    memory: int | None = 2**30,
    profile: Profile | None = None,
) -> tuple[RunDirectory, Summary]:
    """Writes the folder such a run would have left."""
    run = RunDirectory.create(inputs.config, ManualClock(ORIGIN))
    for update, time in finished.items():
        run.append_metrics(update, {"reward": 0.5, "finished": time})
    run.append_metrics(1, {"validation/reward": 0.5})
    write_trace(run.trace, spans)
    times = {"started": ORIGIN, "finished": max(finished.values(), default=ORIGIN), "spans": spans}
    ended = {"run": run.run_id, "status": status, "reason": reason, "devices": num_devices(inputs.config)}
    made = {"rewards": [0.5] * len(finished), "staleness": staleness, "peak_memory_bytes": memory}
    summary = make_summary(**ended, **times, **made)
    write_summary(run.summary, summary)
    stamp(run.path, inputs)
    if profile is not None:
        write_profile(run.path / "profile.json", profile)
    return run, summary


class FakeTrain:
    """A `train` for the benchmark: a run of arm A takes `steps[A]` seconds per update (default 10), a little more in
    every round; sync is `sync_spans`. `ends` returns for (arm, round) a status with a reason, or an exception, in
    place of a finished run."""

    def __init__(
        self,
        steps: dict[str, float] | None = None,
        ends: Callable[[str, int], Any] = lambda arm, number: None,
        profile: Profile | None = None,
    ) -> None:
        self.steps = steps or {}
        self.ends = ends
        self.profile = profile
        self.ran: list[tuple[str, int]] = []

    def __call__(self, inputs: RunInputs, console: Any) -> Summary:
        config = inputs.config
        arm, number = config.run.name, config.run.seed - 7
        self.ran.append((arm, number))
        console.phase("starting")
        console.update({"update": 1})
        ending = self.ends(arm, number)
        if isinstance(ending, BaseException):
            raise ending
        if arm == "sync":
            spans, finished = sync_spans(config.trainer.updates)
        else:
            spans, finished = overlapped_spans(config.trainer.updates, self.steps.get(arm, 10.0) + number / 64)
        budget = config.staleness.max_updates
        ages = [min(version, budget) for version in range(config.trainer.updates) for _ in range(GROUPS)]
        status, reason = ending or ("done", None)
        return write_run(inputs, spans, finished, staleness=ages, status=status, reason=reason, profile=self.profile)[1]


def half_the_profile(config: Config, profile: Profile) -> float:
    """Simulates without a simulation: returns half the seconds that a sample takes to generate."""
    return profile.generate.unit_s / 2

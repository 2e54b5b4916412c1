"""Runs emulated jobs: a small recipe, a profile, and whole runs of the one-process runtime in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from omni_async.config import Config, load
from omni_async.control.events import RunEvent
from omni_async.performance.profile import Payload, Profile, write_profile
from omni_async.performance.service import ServiceTime
from omni_async.preflight.check import preflight
from omni_async.runtime.inprocess import InProcessCluster
from omni_async.runtime.inputs import RunInputs
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.simulation.virtual_time import run as run_in_virtual_time
from omni_async.tracking.rundir import RunDirectory
from omni_async.types import Span

PROFILE = Profile(
    name="small",
    source="made up",
    generate=ServiceTime(fixed_s=2.0, unit_s=1.0),
    score=ServiceTime(fixed_s=0.5, unit_s=0.25),
    proximal=ServiceTime(unit_s=0.2),
    train=ServiceTime(fixed_s=0.4, unit_s=0.4),
    step=ServiceTime(fixed_s=1.0),
    export=ServiceTime(fixed_s=0.5),
    publish=ServiceTime(fixed_s=1.5),
    swap=ServiceTime(fixed_s=0.25),
    switch=ServiceTime(fixed_s=2.0),
    payload=Payload(trajectory=20_000, media=3_000, weights=100_000),
)


def write_recipe(folder: Path, profile: Profile = PROFILE, **sections: Any) -> Path:
    """Writes a recipe whose model, prompts and scorers exist nowhere, with these changes of its sections."""
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(folder / "profile.json", profile)
    recipe: dict[str, Any] = {
        "run": {"name": "emulated", "dir": str(folder / "runs"), "runtime": "inprocess"},
        "model": {"pipeline": "no_such_family", "path": "no/such/model"},
        "data": {"prompts": "no/such/prompts.txt"},
        "rollout": {
            "workers": 2,
            "group_size": 4,
            "sampling": {"height": 32, "width": 32},
            "max_batch": 4,
            "max_inflight": 8,
        },
        "reward": {"workers": 1, "batch": 4, "scorers": [{"name": "no_such_scorer"}]},
        "buffer": {"trajectories": 64, "groups": 64},
        "trainer": {"updates": 12, "groups_per_update": 8},
        "validation": {"prompts": "no/such/validation.txt"},
        "tracking": {"mlflow": {"enabled": False}},
        "emulation": {"profile": "profile.json"},
    }
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section} if isinstance(section, dict) else section
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


@dataclass(frozen=True)
class Emulated:
    inputs: RunInputs
    events: Sequence[RunEvent]

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def spans(self) -> list[Span]:
        return [span for event in self.events if event.kind == "spans" for span in event.data["spans"]]

    @property
    def updates(self) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.kind == "update"]

    @property
    def ended(self) -> dict[str, Any]:
        (ended,) = (event.data for event in self.events if event.kind == "ended")
        return ended

    def steps(self, first: int, last: int) -> list[float]:
        """Returns the virtual seconds of updates `first` + 1 to `last`."""
        finished = [update["finished"] for update in self.updates]
        return [after - before for before, after in pairwise(finished[first - 1 : last])]


def emulate(recipe: Path, *overrides: str, folder: Path | None = None) -> Emulated:
    """Runs a job in virtual time; wall-clock seconds are only what its messages cost. What it leaves goes to `folder`
    or beside the recipe."""
    inputs = preflight(load(recipe, overrides))
    folder = folder or recipe.parent / f"run-{len(list(recipe.parent.iterdir()))}"
    folder.mkdir(exist_ok=True)
    events: list[RunEvent] = []

    async def watch(cluster: InProcessCluster) -> None:
        while not any(event.kind == "ended" for event in events):
            events.extend(await cluster.coordinator.events())

    async def main() -> None:
        cluster = InProcessCluster(inputs, RunDirectory(folder), VirtualClock())
        await cluster.start()
        services = [asyncio.create_task(work) for work in cluster.services().values()]
        await asyncio.gather(watch(cluster), *cluster.work().values(), *cluster.workers().values())
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        await cluster.coordinator.phase("over")  # so that there is an event to take
        events.extend(await cluster.coordinator.events())

    run_in_virtual_time(main())
    return Emulated(inputs, events)

"""Provides a recipe's files on disk without a model, a console that remembers, and a cluster whose roles a test writes
itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from omni_async.config import Config, load
from omni_async.control.admission import Pace
from omni_async.control.control_state import LedgerState
from omni_async.control.events import EventLog, RunEvent
from omni_async.control.ledger import Ledger
from omni_async.records.write.ledger_file import JsonlSink
from omni_async.records.write.sinks.base import Ended, Sink
from omni_async.records.write.summary import ValidationPoint
from omni_async.runtime.start_times import Stage
from omni_async.store import LocalStore, ObjectStore
from omni_async.types import LedgerEntry
from tests.support.configs import write_recipe_file
from tests.support.images import as_media


def write_world(folder: Path, *, overrides: tuple[str, ...] = (), **sections: Any) -> Config:
    """Writes a recipe into `folder` and returns its configuration, with the smallest checkpoint and prompt files that
    preflight accepts."""
    write_checkpoint(folder / "model")
    (folder / "prompts.txt").write_text("a cat\na dog\n")
    recipe: dict[str, Any] = {
        "run": {"name": "test", "runtime": "inprocess"},
        "model": {"path": "model"},
        "data": {"prompts": "prompts.txt"},
        "rollout": {"engine": "emulated", "group_size": 2, "sampling": {"height": 32, "width": 32}},
        "reward": {"scorers": [{"name": "jpeg_size"}]},
        "trainer": {"updates": 4, "groups_per_update": 2},
        "tracking": {"mlflow": {"enabled": False}, "images_every": 2, "images": 4},
    }
    return load(write_recipe_file(folder / "recipe.yaml", recipe, sections), overrides)


# Sections of a run on preferences, which are not on disk.
OFFLINE: dict[str, Any] = {
    "data": {"prompts": None, "preferences": "pairs.parquet"},
    "rollout": {"sde": None},
    "algorithm": {"name": "diffusion_dpo"},
    "reward": {"scorers": []},
}


def write_package(site: Path, name: str, group: str, **points: str) -> None:
    """Writes the metadata of an installed package with entry points of this group."""
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{point} = {made}\n" for point, made in points.items())
    (folder / "entry_points.txt").write_text(f"[{group}]\n{lines}")


def write_checkpoint(folder: Path, class_name: str = "QwenImagePipeline") -> None:
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    (folder / "transformer" / "config.json").write_text('{"num_attention_heads": 4}')
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    index = {"_class_name": class_name, "transformer": ["diffusers", "Denoiser"]}
    (folder / "model_index.json").write_bytes(msgspec.json.encode(index))


def write_ledger(run: Path, groups: int) -> list[LedgerState]:
    """Writes ledger lines of that many trained groups and returns the ledger's state before the first and after
    each."""
    ledger = Ledger(JsonlSink(run / "ledger.jsonl"))
    states = [ledger.state()]
    for group in range(groups):
        ledger.admit(group)
        ledger.end(LedgerEntry(run.name, group, group, "trained", None, 0, 1 + group // 2, 0, (0, 0), 1, 0.5))
        states.append(ledger.state())
    return states


NOTHING = dict.fromkeys(("admitted", "trained", "rejected", "dropped", "live"), 0)


class RememberingConsole:
    """A Console whose lines can be read afterwards."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.updates: list[dict[str, Any]] = []
        self.validations: list[tuple[int, float | None]] = []
        self.notes: list[str] = []
        self.closed = False

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def update(self, view: Any) -> None:
        self.updates.append(dict(view))

    def validation(self, point: ValidationPoint) -> None:
        self.validations.append((point.version, point.value))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, last_words: Sequence[str] = ()) -> None:
        self.notes.extend(last_words)
        self.closed = True


class RecordingSink(Sink):
    """A sink that remembers its calls, a file by its name."""

    label, where = "Recorded", "a list"

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def begin(self, version: int) -> None:
        self._calls.append(f"begin {version}")

    def metrics(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        self._calls.append("metrics")

    def image(self, image: Any, kind: str, step: int) -> None:
        self._calls.append(f"{kind} {step}")

    def media(self, path: Path, kind: str, step: int) -> None:
        assert path.is_file()
        self._calls.append(f"media {path.name}")

    def artifact(self, path: Path) -> None:
        assert path.is_file()
        self._calls.append(path.name)

    def finish(self, status: Ended | None) -> None:
        if status is not None:
            self._calls.append(status)


def update(version: int, started: float, finished: float, **metrics: float) -> RunEvent:
    """Makes the event of an update."""
    buffer, slots = {"capacity": 8, "reserved": 0, "ready": 0}, {"live": 0, "awaiting_publication": 0, "capacity": 4}
    held = {"capacity": None, "reserved": 300, "ready": 200, "most": 250}
    data = {
        **{"version": version, "started": started, "finished": finished, "metrics": metrics},
        **{"reward": 0.5, "parts": {}, "staleness": [0, 1], "images": 4 * version, "scorers": {}},
        **dict.fromkeys(("drawn", "encoded", "cached", "steps", "shared_steps"), 0),
        "admission": Pace(lead_s=1.0, work_s=2.0, reserve_s=0.5, starved_s=0.0),
        **{"conservation": NOTHING, "reasons": {}, "drop_reasons": {}},
        "buffers": {"slots": slots, "trajectories": buffer, "replay": buffer, "bytes": held},
    }
    return RunEvent("update", data)


class ImageStore(LocalStore):
    """A store in which every text is the reference of a small grey image, except `gone`."""

    async def get(self, reference: Any) -> Any:
        if reference == "gone":
            raise LookupError("object is gone")
        return as_media(np.full((32, 32, 3), 90, np.uint8)) if isinstance(reference, str) else reference


class Control:
    """The part of a coordinator that the driver uses: events, and an end."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.over = asyncio.Event()
        self.ended: tuple[str, str | None] | None = None

    def end(self, status: str, reason: str | None = None) -> None:
        if self.ended is None:
            self.ended = (status, reason)
            self.over.set()
            how = {"status": status, "reason": reason}
            self.log.add("closing", how)
            self.log.add("ended", how | {"images": 0, "conservation": NOTHING, "reasons": {}})

    async def events(self) -> list[RunEvent]:
        return await self.log.take()

    async def stop(self, reason: str) -> None:
        self.end("interrupted", reason)

    async def fail(self, reason: str) -> None:
        self.end("failed", reason)

    async def conclude(self) -> None:
        self.log.add("concluded", {})


Role = Callable[[Control], Coroutine[Any, Any, None]]


class HandCluster:
    """A Cluster of roles that are given as functions of the control.

    Those of the `workers` are replaced by others of the same kind. `starting`: what happens while it starts.
    """

    def __init__(
        self,
        work: dict[str, Role],
        services: dict[str, Role] | None = None,
        workers: dict[str, Role] | None = None,
        starting: Role | None = None,
    ) -> None:
        self._work, self._services, self._workers, self._starting = work, services or {}, workers or {}, starting
        self.lost: list[str] = []
        self.gone: str | None = None  # what `find_lost` finds
        self.coordinator: Any = Control()
        self.store: ObjectStore = LocalStore()
        self.closed = False
        self.starts: dict[str, list[Stage]] = {}
        self.tell: Callable[[str], None] = lambda text: None

    async def _nothing(self, *_: Any) -> None:
        """Does nothing: there is nothing to reach, and no role listens or has anything to give up."""

    connect = drain_worker = preempt = _nothing

    async def start(self) -> None:
        if self._starting is not None:
            await self._starting(self.coordinator)

    def _run(self, roles: dict[str, Role]) -> dict[str, Coroutine[Any, Any, Any]]:
        return {name: role(self.coordinator) for name, role in roles.items()}

    def workers(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return self._run(self._workers)

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return self._run(self._work)

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return self._run(self._services)

    async def remove_worker(self, name: str, reason: str) -> None:
        self.lost.append(name)

    async def start_worker(self, name: str) -> Coroutine[Any, Any, Any]:
        return self._workers[name.partition(".")[0]](self.coordinator)

    async def find_lost(self) -> str | None:
        return self.gone

    def parts(self) -> dict[str, dict[str, Any]]:
        return {name: {"pid": 0, "node": "local"} for name in (*self._work, *self._workers)}

    def sampled(self) -> list[Any]:
        return []

    async def close(self) -> None:
        self.closed = True


async def ends_well(control: Control) -> None:
    control.end("done")


async def until_the_end(control: Control) -> None:
    await control.over.wait()


async def forever(control: Control) -> None:
    await asyncio.Event().wait()


async def interrupted(control: Control) -> None:
    """Sends this process a Ctrl-C, and goes on for ever."""
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()


def fails(error: Exception, turns: int = 0) -> Role:
    """Makes a role that raises the error after so many turns of the loop."""

    async def role(control: Control) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise error

    return role


def fails_late(error: Exception) -> Role:
    """Makes a role that ends the run well, and raises the error when the driver has seen that."""

    async def role(control: Control) -> None:
        control.end("done")
        await fails(error, 50)(control)

    return role

"""Describes a generated sample on its way from the engine into the store.

Imports no torch: its contents may come from an emulated engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_async.media import Media
from omni_async.rollout.base import Trajectory
from omni_async.store import nbytes
from omni_async.types import SampleRequest, SampleResult
from omni_async.version_spans import VersionSpans


@dataclass(frozen=True)
class Finished:
    """A generated sample on its way into the store.

    `tensors` may be anything that has `nbytes`; `media` are `Media` of NumPy arrays, or mere bytes where a replayed
    profile made them."""

    request: SampleRequest
    tensors: Any
    media: Any
    versions: VersionSpans
    started: float
    finished: float

    @classmethod
    def of(cls, request: SampleRequest, trajectory: Trajectory, started: float, finished: float) -> Finished:
        found: Any = trajectory.media
        media = found.numpy() if isinstance(found, Media) else found
        return cls(request, trajectory.tensors, media, trajectory.versions, started, finished)

    @property
    def description(self) -> dict[str, Any]:
        """Return the sample's facts for the timeline, and for profiles that are made from it."""
        oldest, newest = self.versions.oldest, self.versions.newest
        return {
            "sample": self.request.sample_id,
            "versions": str(oldest) if oldest == newest else f"{oldest}..{newest}",
            "trajectory_bytes": nbytes(self.tensors),
            "media_bytes": nbytes(self.media),
        }

    def result(self, engine: str, trajectory: Any, media: Any) -> SampleResult:
        every_step = range(self.request.num_inference_steps if self.request.kind == "train" else 0)
        steps = self.request.window.steps if self.request.window else every_step
        return SampleResult(
            sample_id=self.request.sample_id,
            engine=engine,
            trajectory=trajectory,
            media=media,
            version=self.versions.first,
            step_versions=self.versions.of_steps(steps),
            started=self.started,
            finished=self.finished,
            nbytes=nbytes(self.tensors) + nbytes(self.media),
        )

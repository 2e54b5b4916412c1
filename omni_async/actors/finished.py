"""Describes a generated sample on its way from the engine into the store. Imports no torch: its contents may come from
an emulated engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_async.rollout.base import Trajectory
from omni_async.store import nbytes
from omni_async.types import SampleRequest, SampleResult


@dataclass(frozen=True)
class Finished:
    """A generated sample on its way into the store. `tensors` may be anything that has `nbytes`; `image` is uint8 (H,
    W, 3), or flat where an emulated engine made it."""

    request: SampleRequest
    tensors: Any
    image: NDArray[np.uint8]
    versions: tuple[int, ...]
    started: float
    finished: float

    @classmethod
    def of(cls, request: SampleRequest, trajectory: Trajectory, started: float, finished: float) -> Finished:
        found: Any = trajectory.image
        image = found if isinstance(found, np.ndarray) else found.permute(1, 2, 0).contiguous().numpy()
        return cls(request, trajectory.tensors, image, trajectory.versions, started, finished)

    @property
    def description(self) -> dict[str, Any]:
        """Returns the sample's facts for the timeline, and for profiles that are made from it."""
        oldest, newest = min(self.versions), max(self.versions)
        return {
            "sample": self.request.sample_id,
            "versions": str(oldest) if oldest == newest else f"{oldest}..{newest}",
            "trajectory_bytes": nbytes(self.tensors),
            "media_bytes": nbytes(self.image),
        }

    def result(self, engine: str, trajectory: Any, media: Any) -> SampleResult:
        every_step = range(self.request.num_inference_steps) if self.request.kind == "train" else ()
        steps = self.request.window.steps if self.request.window else every_step
        return SampleResult(
            sample_id=self.request.sample_id,
            engine=engine,
            trajectory=trajectory,
            media=media,
            version=self.versions[0],
            step_versions=tuple(self.versions[i] for i in steps),
            started=self.started,
            finished=self.finished,
            nbytes=nbytes(self.tensors) + nbytes(self.image),
        )

"""Counts, inside vLLM-Omni's worker, the denoising steps that it computes: what a trajectory says of its steps would
leave out those that were thrown away."""

from __future__ import annotations

from typing import Any

from omni_async.rollout.vllm_worker import RolloutWorkerExtension


class CountingExtension(RolloutWorkerExtension):
    def steps_computed(self) -> dict[str, Any]:
        """Returns the steps of single samples that were computed since the first call."""
        pipeline = self.model_runner.pipeline
        if not hasattr(self, "_num_steps"):
            self._num_steps = 0
            denoise = pipeline.denoise_step

            def counting(input_batch: Any, *, states: Any, **kwargs: Any) -> Any:
                moved = denoise(input_batch, states=states, **kwargs)
                self._num_steps += len(states)
                return moved

            pipeline.denoise_step = counting
        return {"steps": self._num_steps}

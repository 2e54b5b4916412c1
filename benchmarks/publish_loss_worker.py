"""Counts, inside vLLM-Omni's worker, the denoising steps that it computes.

A trajectory's own steps would not include discarded ones.
"""

from __future__ import annotations

from typing import Any

from omni_async.rollout.vllm_worker import RolloutWorkerExtension


class CountingExtension(RolloutWorkerExtension):
    def steps_computed(self) -> dict[str, Any]:
        """Return the steps of single samples computed since the first call."""
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

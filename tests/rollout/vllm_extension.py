from __future__ import annotations

from typing import Any

from omni_async.rollout.vllm_worker import RolloutWorkerExtension


class CountingExtension(RolloutWorkerExtension):
    def steps_taken(self) -> dict[str, Any]:
        return {"steps": max((state.step_index for state in self.model_runner.state_cache.values()), default=0)}

    def fail(self) -> dict[str, Any]:
        raise RuntimeError("this worker method always fails")

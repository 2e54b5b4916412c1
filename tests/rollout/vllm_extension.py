from typing import Any

from torch._dynamo.utils import counters

from omni_async.rollout.vllm_worker import RolloutWorkerExtension


class CountingExtension(RolloutWorkerExtension):
    def steps_taken(self, samples: int) -> dict[str, Any]:
        """Returns the steps that each of so many samples has taken at least; 0 until all of them have begun."""
        steps = [state.step_index for state in self.model_runner.state_cache.values()]
        return {"steps": min(steps) if len(steps) == samples else 0}

    def forget_batches(self) -> dict[str, Any]:
        """Begins to note the samples of each batch of request batching."""
        pipeline = self.model_runner.pipeline
        self.noted: list[int] = []
        forward = type(pipeline).forward

        def noting(batch: Any) -> Any:
            self.noted.append(len(batch.requests))
            return forward(pipeline, batch)

        pipeline.forward = noting
        return {}

    def batches(self) -> dict[str, Any]:
        return {"samples": self.noted}

    def note_rows(self) -> dict[str, Any]:
        """Begins to note the rows of each velocity."""
        pipeline = self.model_runner.pipeline
        self.rows: list[int] = []
        velocity = type(pipeline.policy).velocity

        def noting(components: Any, latents: Any, *arguments: Any, **options: Any) -> Any:
            self.rows.append(len(latents))
            return velocity(pipeline.policy, components, latents, *arguments, **options)

        pipeline.policy.velocity = noting
        return {}

    def noted_rows(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def graphs(self) -> dict[str, Any]:
        """Returns the number of graphs that torch has compiled in this process."""
        return {"graphs": counters["stats"]["unique_graphs"]}

    def fail(self) -> dict[str, Any]:
        raise RuntimeError("this worker method always fails")

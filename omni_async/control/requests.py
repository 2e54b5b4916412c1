"""Makes sample requests, and checks what comes back for them.

Only this module turns configuration, ids and the run seed into a request to an engine.
"""

from __future__ import annotations

from msgspec.structs import replace

from omni_async.config import Config
from omni_async.control.seeds import draw_bucket, initial_noise_seed, sample_seed, sample_seeds
from omni_async.control.windows import window_of
from omni_async.types import Prompt, SampleKind, SampleRequest, SampleResult, SdeWindow


def trained_steps(request: SampleRequest) -> tuple[int, ...]:
    """Return the numbers of step versions that a result of `request` may carry.

    A training sample without a window carries those of all its steps, or none if it comes from a dataset."""
    if request.window is not None:
        return (request.window.size,)
    return (request.num_inference_steps, 0) if request.kind == "train" else (0,)


def require_trained_steps(request: SampleRequest, result: SampleResult) -> None:
    """Raise ValueError unless the result has a version for every trained step of its request."""
    found, window = result.step_versions.num_steps, request.window
    if window is not None and found == window.size:  # nearly every sample: the rest need not be asked
        return
    expected = trained_steps(request)
    if found not in expected:
        raise ValueError(
            f"sample {result.sample_id} of {result.engine}: {found} step versions for {expected[0]} trained steps"
        )


class RequestFactory:
    """A maker of sample requests.

    `fields` are the trajectory tensors training samples carry, as the trainer's objective declares them; validation
    samples carry none."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.fields: tuple[str, ...] = ()

    def window(self, group: int) -> SdeWindow | None:
        return window_of(group, self._config)

    def bucket(self, group: int) -> int:
        """Return the number of the group's bucket; 0 where there are none."""
        weights = [bucket.weight for bucket in self._config.rollout.buckets]
        return draw_bucket(self._config.run.seed, group, weights) if weights else 0

    def training(self, group: int, prompt: Prompt, window: SdeWindow | None, bucket: int = 0) -> list[SampleRequest]:
        rollout, seed = self._config.rollout, self._config.run.seed
        shared = initial_noise_seed(seed, prompt.index, group) if rollout.share_initial_noise else None
        noise_level = rollout.sde.noise_level if rollout.sde else 0.0
        first = self._request("train", group, prompt, rollout.num_inference_steps, noise_level)
        spec = rollout.specs[bucket]
        first = replace(first, spec=spec, window=window, fields=self.fields, initial_seed=shared)
        seeds = sample_seeds(seed, prompt.index, group, rollout.group_size)
        # Copies of one request: of all that admission does, filling in every field of every sample would take longest.
        return [
            replace(first, sample_id=f"g{group}.s{sample}", sample=sample, seed=seeds[sample])
            for sample in range(rollout.group_size)
        ]

    def validation(self, version: int, prompts: tuple[Prompt, ...]) -> list[SampleRequest]:
        """Return the requests of a round.

        They have the same prompts and seeds every round, so that rounds differ by the policy alone."""
        validation, seed = self._config.validation, self._config.run.seed
        if validation is None:
            return []
        return [
            replace(
                self._request("validation", version, prompt, validation.num_inference_steps, 0.0),
                sample_id=f"v{version}.p{prompt.index}.s{sample}",
                sample=sample,
                seed=sample_seed(seed, prompt.index, "validation", sample),
            )
            for prompt in prompts
            for sample in range(validation.samples_per_prompt)
        ]

    def _request(
        self, kind: SampleKind, group: int, prompt: Prompt, num_inference_steps: int, noise_level: float
    ) -> SampleRequest:
        """Return a request with what all samples of a prompt share; the caller fills in the rest."""
        rollout = self._config.rollout
        return SampleRequest(
            sample_id="",
            kind=kind,
            group=group,
            sample=0,
            prompt=prompt,
            seed=0,
            spec=rollout.sampling,
            num_inference_steps=num_inference_steps,
            noise_level=noise_level,
            sde_kind=rollout.sde.kind if rollout.sde else "flow",
            window=None,
        )

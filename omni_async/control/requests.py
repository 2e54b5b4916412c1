"""Makes sample requests: the one place that turns configuration, ids and the run seed into what an engine is asked for."""

from __future__ import annotations

from omni_async.config import Config
from omni_async.control.seeds import initial_noise_seed, sample_seed
from omni_async.control.windows import window_of
from omni_async.types import Prompt, SampleRequest, SdeWindow


class RequestFactory:
    """`fields` are the trajectory tensors training samples carry, as the trainer's objective declares them; validation samples carry none."""

    def __init__(self, config: Config) -> None:
        self._config = config
        sde = config.rollout.sde
        self._noise_level, self._sde_kind = (sde.noise_level, sde.kind) if sde else (0.0, "flow")
        self.fields: tuple[str, ...] = ()

    def window(self, group: int) -> SdeWindow | None:
        return window_of(group, self._config)

    def training(self, group: int, prompt: Prompt, window: SdeWindow | None) -> list[SampleRequest]:
        rollout, seed = self._config.rollout, self._config.run.seed
        shared = initial_noise_seed(seed, prompt.index, group) if rollout.share_initial_noise else None
        return [
            SampleRequest(
                sample_id=f"g{group}.s{sample}",
                kind="train",
                group=group,
                sample=sample,
                prompt=prompt,
                seed=sample_seed(seed, prompt.index, group, sample),
                initial_seed=shared,
                height=rollout.height,
                width=rollout.width,
                num_inference_steps=rollout.num_inference_steps,
                true_cfg_scale=rollout.true_cfg_scale,
                negative_prompt=rollout.negative_prompt,
                noise_level=self._noise_level,
                sde_kind=self._sde_kind,
                window=window,
                fields=self.fields,
            )
            for sample in range(rollout.group_size)
        ]

    def validation(self, version: int, prompts: tuple[Prompt, ...]) -> list[SampleRequest]:
        """The same prompts and seeds every round, so that rounds differ by the policy alone."""
        rollout, validation = self._config.rollout, self._config.validation
        if validation is None:
            return []
        return [
            SampleRequest(
                sample_id=f"v{version}.p{prompt.index}.s{sample}",
                kind="validation",
                group=version,
                sample=sample,
                prompt=prompt,
                seed=sample_seed(self._config.run.seed, prompt.index, "validation", sample),
                height=rollout.height,
                width=rollout.width,
                num_inference_steps=validation.num_inference_steps,
                true_cfg_scale=rollout.true_cfg_scale,
                negative_prompt=rollout.negative_prompt,
                noise_level=0.0,
                sde_kind=self._sde_kind,
                window=None,
            )
            for prompt in prompts
            for sample in range(validation.samples_per_prompt)
        ]

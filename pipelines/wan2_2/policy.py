"""Computes conditioning, latent shape and velocity of Wan2.2 text-to-video.

They are those of diffusers' `WanPipeline` with `FlowMatchEulerDiscreteScheduler` in place of its multistep solver.

Latents are (C, (F - 1) / 4 + 1, H / s, W / s) of F frames; s = 8 and C = 16 for the 14B models, 16 and 48 for TI2V-5B.
The 14B models have two experts: `transformer` takes sigma >= boundary_ratio, `transformer_2` what is below, each with a
guidance scale of its own. TI2V-5B (`expand_timesteps`) has one, which is given a time per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.conditioning import stack_rows
from omni_async.media import Media, require_media
from omni_async.policy import SequencePlan
from omni_async.sde.schedules import static_shift
from omni_async.types import Prompt
from pipelines.parts import DiffusersPolicy, branches, guided, load_part, load_tokenizer, read_config, to_uint8
from pipelines.wan2_2.sampling import TEMPORAL, Wan22Sampling

HIGH, LOW = "transformer", "transformer_2"
CONDITIONING = ("prompt_embeds", "negative_prompt_embeds")


class Wan22Policy(DiffusersPolicy):
    """A policy, see `omni_async.policy.Policy`.

    Conditioning: `prompt_embeds` (max_sequence_length, E), zeros after the prompt, and with an unconditional branch
    `negative_prompt_embeds`."""

    denoiser = "WanTransformer3DModel"
    sequence_plan: SequencePlan | None = SequencePlan()

    def __init__(self, path: str) -> None:
        super().__init__(path)
        index = read_config(path, "", "model_index.json")
        transformer, vae = read_config(path, HIGH), read_config(path, "vae")
        self.components = (HIGH, LOW) if (index.get(LOW) or [None])[0] else (HIGH,)
        self.boundary = float(index.get("boundary_ratio") or 0.0)
        if len(self.components) > 1 and not 0 < self.boundary < 1:
            raise ValueError(f"model.path: {path}: two experts need a boundary_ratio in (0, 1), got {self.boundary}")
        self.expand_timesteps = bool(index.get("expand_timesteps"))
        self.channels = int(transformer["in_channels"])
        self.text_width = int(transformer["text_dim"])
        self.patch = tuple(transformer["patch_size"])
        self.spatial = int(vae.get("scale_factor_spatial", 8))
        self.shift = float(read_config(path, "scheduler", "scheduler_config.json").get("flow_shift", 1.0))

    def component_of(self, sigma: float) -> str:
        return HIGH if len(self.components) == 1 or 1000 * sigma >= 1000 * self.boundary else LOW

    def latent_shape(self, spec: Wan22Sampling) -> tuple[int, ...]:
        n = self.spatial * self.patch[1]
        if spec.height % n or spec.width % n:
            raise ValueError(f"height and width must be multiples of {n}, got {spec.height} x {spec.width}")
        frames = (spec.num_frames - 1) // TEMPORAL + 1
        return self.channels, frames, spec.height // self.spatial, spec.width // self.spatial

    def sigmas(self, num_inference_steps: int, spec: Wan22Sampling) -> Tensor:
        return static_shift(self.shift, num_inference_steps)

    def velocity(
        self,
        components: Mapping[str, nn.Module],
        latents: Tensor,
        sigma: Tensor,
        conditioning: TensorDict,
        spec: Wan22Sampling,
        *,
        unconditional_gradient: bool = True,
    ) -> Tensor:
        """Compute the velocity of rows that one expert takes; the caller keeps those of different experts apart."""
        name = self.component_of(sigma[0].item())
        expert = components[name]
        inputs = latents.to(next(expert.parameters()).dtype)
        timestep = sigma.to(inputs.device) * 1000
        if self.expand_timesteps:
            tokens = inputs.shape[2] * (inputs.shape[3] // self.patch[1]) * (inputs.shape[4] // self.patch[2])
            timestep = timestep[:, None].expand(-1, tokens)

        def predict(branch: str) -> Tensor:
            embeds = conditioning[f"{branch}_embeds"].to(inputs.device, inputs.dtype)
            v: Tensor = expert(
                hidden_states=inputs, timestep=timestep, encoder_hidden_states=embeds, return_dict=False
            )[0]
            return v.float()

        scale = spec.guidance_scale
        if name == LOW and spec.guidance_scale_2 is not None:
            scale = spec.guidance_scale_2
        return guided(predict, conditioning, "guidance_scale", scale, unconditional_gradient)

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        """Stack conditioning, which has one length for every prompt of a spec."""
        return stack_rows(rows, dict.fromkeys(CONDITIONING, "same"))

    def blank_conditioning(self, spec: Wan22Sampling) -> TensorDict:
        blank = torch.zeros(spec.max_sequence_length, self.text_width)
        return TensorDict({f"{branch}_embeds": blank.clone() for branch in branches(spec.guided)}, batch_size=[])

    def load_codec(self, dtype: torch.dtype) -> Wan22Codec:
        from diffusers import AutoencoderKLWan
        from transformers import AutoTokenizer, UMT5EncoderModel

        return Wan22Codec(
            tokenizer=load_tokenizer(AutoTokenizer, self.path),
            text_encoder=load_part(UMT5EncoderModel, self.path, "text_encoder", dtype),
            vae=load_part(AutoencoderKLWan, self.path, "vae", dtype),
        )


class Wan22Codec:
    """A codec, see `omni_async.policy.Codec`, around diffusers' pipeline, which encodes prompts.

    The parts may be diffusers' or vLLM-Omni's: they have the same interface."""

    def __init__(self, *, tokenizer: Any, text_encoder: Any, vae: Any) -> None:
        from diffusers import WanPipeline

        self.vae, self.text_encoder = vae, text_encoder
        self._encoder: Any = WanPipeline(
            tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=None, transformer=None
        )
        self._mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)

    def to(self, device: Any) -> Self:
        self.vae.to(device)
        self.text_encoder.to(device)
        return self

    @torch.no_grad()
    def encode(self, prompt: Prompt, spec: Wan22Sampling) -> TensorDict:
        embeds, negative_embeds = self._encoder.encode_prompt(
            prompt.text,
            spec.negative_prompt,
            spec.guided,
            max_sequence_length=spec.max_sequence_length,
            device=self.vae.device,
        )
        fields = {"prompt_embeds": embeds[0]} | ({"negative_prompt_embeds": negative_embeds[0]} if spec.guided else {})
        return TensorDict(fields, batch_size=[])

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: Wan22Sampling) -> list[Media]:
        mean, std = (t.to(self.vae.device, self.vae.dtype) for t in (self._mean, self._std))
        maps = latents.to(self.vae.device, self.vae.dtype) * std + mean
        videos = to_uint8(self.vae.decode(maps, return_dict=False)[0]).transpose(1, 2).cpu()
        return [Media(video=video.contiguous(), fps=spec.fps) for video in videos]

    @torch.no_grad()
    def encode_media(self, media: list[Media], spec: Wan22Sampling) -> Tensor:
        require_media(media, spec)
        videos = torch.stack([torch.as_tensor(one.video) for one in media]).transpose(1, 2).float() / 127.5 - 1.0
        maps: Tensor = self.vae.encode(videos.to(self.vae.device, self.vae.dtype)).latent_dist.mode().float()
        return (maps - self._mean.to(maps.device)) / self._std.to(maps.device)

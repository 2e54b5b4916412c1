"""Implements Qwen-Image's policy.

Conditioning, latent shape and velocity, as diffusers' `QwenImagePipeline` computes them.

Latents are packed: T = (H / 16) * (W / 16) tokens of C = 64 channels (2 x 2 patches of 16 VAE channels). The
transformer is fed sigma itself (timestep / 1000). diffusers and transformers, which take seconds to import, are
imported when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from tensordict import TensorDict

from omni_async.conditioning import stack_rows
from omni_async.media import Media
from omni_async.policy import SequencePlan
from omni_async.sde.schedules import scheduler_sigmas
from omni_async.types import Prompt
from pipelines.parts import (
    DiffusersPolicy,
    as_images,
    branches,
    guided,
    linear_guidance,
    load_part,
    load_tokenizer,
    read_config,
    stack_images,
)
from pipelines.qwen_image import single_frame
from pipelines.qwen_image.sampling import QwenImageSampling

PROMPT_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial"
    " relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
# The template's system part: its hidden states are dropped, whatever the tokenizer made of it.
NUM_TEMPLATE_TOKENS = 34
MAX_TEXT_TOKENS = 1024
CONDITIONING = ("prompt_embeds", "prompt_mask", "negative_prompt_embeds", "negative_prompt_mask")
PATCH = 2
# The VAE saves no time on more pixels than this at once, and takes memory for them.
_PIXELS_AT_ONCE = 1024 * 1024


def combine_guidance(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """Apply true classifier-free guidance, rescaled per token to the norm of the conditional prediction.

    All (B, T, C) float32."""
    combined = linear_guidance(cond, uncond, scale)
    return combined * (torch.norm(cond, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True))


class QwenImagePolicy(DiffusersPolicy):
    """The `omni_async.policy.Policy` of Qwen-Image.

    Conditioning: `prompt_embeds` (L, E) and `prompt_mask` (L,) bool, and with an unconditional branch
    `negative_prompt_embeds` and `negative_prompt_mask`."""

    denoiser = "QwenImageTransformer2DModel"
    sequence_plan: SequencePlan | None = SequencePlan(
        masked_text={"encoder_hidden_states": "encoder_hidden_states_mask"}
    )

    def __init__(self, path: str) -> None:
        super().__init__(path)
        transformer = read_config(path, "transformer")
        self.in_channels = int(transformer["in_channels"])
        self.text_width = int(transformer["joint_attention_dim"])
        self.pixels_per_token = PATCH * 2 ** len(read_config(path, "vae")["temperal_downsample"])
        self.scheduler_config = read_config(path, "scheduler", "scheduler_config.json")

    def latent_shape(self, spec: QwenImageSampling) -> tuple[int, ...]:
        rows, columns = self._grid(spec)
        return (rows * columns, self.in_channels)

    def sigmas(self, num_inference_steps: int, spec: QwenImageSampling) -> torch.Tensor:
        return scheduler_sigmas(num_inference_steps, self.latent_shape(spec)[0], self.scheduler_config)

    def velocity(
        self,
        components: Mapping[str, torch.nn.Module],
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: TensorDict,
        spec: QwenImageSampling,
        *,
        unconditional_gradient: bool = True,
    ) -> torch.Tensor:
        transformer = components["transformer"]
        inputs = latents.to(next(transformer.parameters()).dtype)
        shapes = [[(1, *self._grid(spec))]] * len(latents)

        def predict(branch: str) -> torch.Tensor:
            embeds = conditioning[f"{branch}_embeds"].to(inputs.device, inputs.dtype)
            mask = conditioning[f"{branch}_mask"].to(inputs.device)
            v: torch.Tensor = self.call(
                transformer,
                hidden_states=inputs,
                timestep=sigma.to(inputs.device),
                encoder_hidden_states=embeds,
                # Without padding there is nothing to mask, and attention may take a faster kernel.
                encoder_hidden_states_mask=None if bool(mask.all()) else mask,
                img_shapes=shapes,
                return_dict=False,
            )[0]
            return v.float()

        scale = spec.true_cfg_scale
        return guided(predict, conditioning, "true_cfg_scale", scale, unconditional_gradient, combine_guidance)

    def call(self, transformer: torch.nn.Module, **inputs: Any) -> Any:
        """Run the denoiser; where it takes other arguments than diffusers', a subclass adds them."""
        return transformer(**inputs)

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        """Right-pads with zeros and a False mask.

        Text positions count from the left, so padding moves no rotary position."""
        return stack_rows(rows, dict.fromkeys(CONDITIONING, "pad"))

    def blank_conditioning(self, spec: QwenImageSampling) -> TensorDict:
        embeds, mask = torch.zeros(1, self.text_width), torch.ones(1, dtype=torch.bool)
        parts = {"embeds": embeds, "mask": mask}
        fields = {f"{branch}_{name}": part.clone() for branch in branches(spec.guided) for name, part in parts.items()}
        return TensorDict(fields, batch_size=[])

    def load_codec(self, dtype: torch.dtype) -> QwenImageCodec:
        from diffusers import AutoencoderKLQwenImage
        from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

        return QwenImageCodec(
            tokenizer=load_tokenizer(Qwen2Tokenizer, self.path),
            text_encoder=load_part(Qwen2_5_VLForConditionalGeneration, self.path, "text_encoder", dtype),
            vae=load_part(AutoencoderKLQwenImage, self.path, "vae", dtype),
        )

    def _grid(self, spec: QwenImageSampling) -> tuple[int, int]:
        """Return latent tokens per column and per row."""
        n, height, width = self.pixels_per_token, spec.height, spec.width
        if height % n or width % n or height <= 0 or width <= 0:
            raise ValueError(f"height and width must be positive multiples of {n}, got {height} x {width}")
        return height // n, width // n


class QwenImageCodec:
    """The `omni_async.policy.Codec` of Qwen-Image.

    The parts may be diffusers' or vLLM-Omni's: they have the same interface."""

    def __init__(self, *, tokenizer: Any, text_encoder: Any, vae: Any) -> None:
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.vae = vae
        # Text-to-image has no image inputs: the vision tower would only take memory.
        if hasattr(text_encoder.model, "visual"):
            del text_encoder.model.visual
        single_frame.specialise(vae)
        self._mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
        self._std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
        self._pixels_per_token = PATCH * 2 ** len(vae.temperal_downsample)

    def to(self, device: Any) -> Self:
        self.text_encoder.to(device)
        self.vae.to(device)
        return self

    @torch.no_grad()
    def encode(self, prompt: Prompt, spec: QwenImageSampling) -> TensorDict:
        texts = {"prompt": prompt.text} | ({"negative_prompt": spec.negative_prompt} if spec.guided else {})
        tensors = {}
        for branch, text in texts.items():
            embeds = self._hidden_states(text)
            tensors[f"{branch}_embeds"] = embeds
            tensors[f"{branch}_mask"] = torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)
        return TensorDict(tensors, batch_size=[])

    def _hidden_states(self, text: str) -> torch.Tensor:
        """Return (L, E): the last layer's states of everything after the template's system part."""
        tokens = self.tokenizer(PROMPT_TEMPLATE.format(text), return_tensors="pt").to(self.text_encoder.device)
        num_tokens = tokens.input_ids.shape[1] - NUM_TEMPLATE_TOKENS
        if num_tokens > MAX_TEXT_TOKENS:
            raise ValueError(
                f"prompt of {num_tokens} tokens, Qwen-Image takes at most {MAX_TEXT_TOKENS}: {text[:80]!r}..."
            )
        # The decoder alone: the language-model head would only compute unused logits.
        states: torch.Tensor = self.text_encoder.model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
        ).hidden_states[-1]
        return states[0, NUM_TEMPLATE_TOKENS:].clone()

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, spec: QwenImageSampling) -> list[Media]:
        height, width = spec.height, spec.width
        rows, columns = height // self._pixels_per_token, width // self._pixels_per_token
        maps = latents.view(len(latents), rows, columns, -1, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
        maps = maps.reshape(len(latents), -1, 1, rows * PATCH, columns * PATCH).to(self.vae.device, self.vae.dtype)
        mean, std = (t.to(maps.device, maps.dtype) for t in (self._mean, self._std))
        at_once = max(1, _PIXELS_AT_ONCE // (height * width))
        pixels = torch.cat([single_frame.decode(self.vae, part * std + mean) for part in torch.split(maps, at_once)])
        return as_images(pixels)

    @torch.no_grad()
    def encode_media(self, media: list[Media], spec: QwenImageSampling) -> torch.Tensor:
        n, height, width = self._pixels_per_token, spec.height, spec.width
        parts = []
        for part in torch.split(stack_images(media, spec), max(1, _PIXELS_AT_ONCE // (height * width))):
            frames = part.to(self.vae.device)
            parts.append(single_frame.encode(self.vae, frames.to(self.vae.dtype)).float())
        maps = torch.cat(parts)
        mean, std = (t.to(maps.device, maps.dtype) for t in (self._mean, self._std))
        maps = ((maps - mean) / std).reshape(len(media), -1, height // n, PATCH, width // n, PATCH)
        return maps.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

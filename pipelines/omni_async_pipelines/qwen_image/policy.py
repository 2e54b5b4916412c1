"""Computes conditioning, latent shape and velocity of Qwen-Image.

All three follow diffusers' `QwenImagePipeline`.

Latents are packed: T = (H / 16) * (W / 16) tokens of C = 64 channels (2 x 2 patches of 16 VAE channels). The
transformer takes sigma itself (timestep / 1000).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_async.diffusion.policy import SequencePlan
from omni_async.diffusion.sde.schedules import scheduler_sigmas
from omni_async.media import Media
from omni_async_pipelines import single_frame
from omni_async_pipelines.parts import (
    DiffusersCodec,
    DiffusersPolicy,
    as_images,
    latent_grid,
    latent_statistics,
    pack_patches,
    stack_pixels,
    unpack_patches,
)
from omni_async_pipelines.qwen_image.sampling import (
    MAX_TEXT_TOKENS,
    NUM_TEMPLATE_TOKENS,
    PROMPT_TEMPLATE,
    QwenImageSampling,
)
from omni_async_pipelines.sampling import read_config

PATCH = 2


class QwenImageCodec(DiffusersCodec):
    """The `omni_async.diffusion.policy.Codec` of Qwen-Image.

    sees_images: whether prompts carry images; otherwise the text encoder's vision tower would only take memory."""

    sees_images = False

    def __init__(self, *, tokenizer: Any, text_encoder: Any, vae: Any) -> None:
        super().__init__(vae=vae, text_encoder=text_encoder)
        self.tokenizer, self.text_encoder = tokenizer, text_encoder
        if not self.sees_images and hasattr(text_encoder.model, "visual"):
            del text_encoder.model.visual
        single_frame.specialise(vae)
        self._pixels_per_token = PATCH * 2 ** len(vae.temperal_downsample)

    def encode_text(self, text: str, spec: QwenImageSampling) -> dict[str, Tensor]:
        """Return the last layer's states of everything after the template's system part, `embeds` (L, E), and a mask.

        ValueError for more than 1024 tokens."""
        return self.encode_tokens(self.tokenize(PROMPT_TEMPLATE, text, NUM_TEMPLATE_TOKENS), NUM_TEMPLATE_TOKENS)

    def tokenize(self, template: str, text: str, num_dropped: int) -> Any:
        """Return the tokens of the template with the text. ValueError for more than 1024 without the dropped ones."""
        tokens = self.tokenizer(template.format(text), return_tensors="pt")
        num_tokens = tokens.input_ids.shape[1] - num_dropped
        if num_tokens > MAX_TEXT_TOKENS:
            raise ValueError(
                f"prompt of {num_tokens} tokens, Qwen-Image takes at most {MAX_TEXT_TOKENS}: {text[:80]!r}..."
            )
        return tokens

    def encode_tokens(self, tokens: Any, num_dropped: int) -> dict[str, Tensor]:
        """Return the last layer's states of one text's tokens except the first `num_dropped`, and a mask."""
        # The decoder alone: the language-model head would only compute unused logits.
        states: Tensor = self.text_encoder.model(
            **tokens.to(self.text_encoder.device), output_hidden_states=True
        ).hidden_states[-1]
        embeds = states[0, num_dropped:].clone()
        return {"embeds": embeds, "mask": torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)}

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: QwenImageSampling) -> list[Media]:
        rows, columns = latent_grid(spec, self._pixels_per_token)
        maps = unpack_patches(latents, rows, columns)[:, :, None].to(self.vae.device, self.vae.dtype)
        mean, std = latent_statistics(self.vae, maps)
        batches = maps.split(self.most_at_once(spec))
        return [m for batch in batches for m in as_images(single_frame.decode(self.vae, batch * std + mean))]

    @torch.no_grad()
    def encode_media(self, media: list[Media], spec: QwenImageSampling) -> Tensor:
        batches = stack_pixels(media, spec).split(self.most_at_once(spec))
        return pack_patches(torch.cat([self.encode_pixels(batch) for batch in batches]))

    def encode_pixels(self, pixels: Tensor) -> Tensor:
        """Encode pixels (B, 3, H, W) in [-1, 1] to latents (B, 16, H / 8, W / 8) float32."""
        maps = single_frame.encode(self.vae, pixels.to(self.vae.device, self.vae.dtype)).float()
        mean, std = latent_statistics(self.vae, maps)
        return ((maps - mean) / std)[:, :, 0]


class QwenImagePolicy(DiffusersPolicy):
    """The `omni_async.diffusion.policy.Policy` of Qwen-Image.

    Conditioning: `embeds` (L, E) and `mask` (L,) bool of the prompt and the negative one. Texts are padded on the right
    with zeros and a False mask; text positions count from the left, so padding moves no rotary position."""

    denoiser = "QwenImageTransformer2DModel"
    parts: ClassVar = {
        "tokenizer": "transformers.Qwen2Tokenizer",
        "text_encoder": "transformers.Qwen2_5_VLForConditionalGeneration",
        "vae": "diffusers.AutoencoderKLQwenImage",
    }
    codec: type[DiffusersCodec] = QwenImageCodec
    text_rules: ClassVar = {"embeds": "pad", "mask": "pad"}
    guidance = "true_cfg_scale"
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
        rows, columns = latent_grid(spec, self.pixels_per_token)
        return rows * columns, self.in_channels

    def sigmas(self, num_inference_steps: int, spec: QwenImageSampling) -> Tensor:
        return scheduler_sigmas(num_inference_steps, self.latent_shape(spec)[0], self.scheduler_config)

    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: QwenImageSampling) -> dict[str, Any]:
        return {
            "timestep": sigma,
            "encoder_hidden_states": text["embeds"],
            # Without padding there is nothing to mask, and attention may use a faster kernel.
            "encoder_hidden_states_mask": None if bool(text["mask"].all()) else text["mask"],
            "img_shapes": [[(1, *latent_grid(spec, self.pixels_per_token))]] * len(latents),
        }

    def combine(self, cond: Tensor, uncond: Tensor, scale: float, spec: QwenImageSampling) -> Tensor:
        """Apply true classifier-free guidance, rescaled per token to the norm of the conditional prediction.

        All (B, T, C) float32."""
        combined = super().combine(cond, uncond, scale, spec)
        return combined * (torch.norm(cond, dim=-1, keepdim=True) / torch.norm(combined, dim=-1, keepdim=True))

    def blank_text(self, spec: QwenImageSampling) -> dict[str, Tensor]:
        return {"embeds": torch.zeros(1, self.text_width), "mask": torch.ones(1, dtype=torch.bool)}

"""Computes conditioning, latent shape and velocity of Z-Image.

All three follow diffusers' `ZImagePipeline`.

Latents are (C, H / 8, W / 8), C = 16. The transformer takes lists, of images and of captions of any lengths, and its
time is reversed: it takes 1 - sigma and returns x0 - eps.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from omni_async.diffusion.sde.schedules import scheduler_sigmas
from omni_async_pipelines.parts import DiffusersPolicy, ImageCodec, latent_grid
from omni_async_pipelines.sampling import read_config
from omni_async_pipelines.z_image.sampling import PIXELS_PER_TOKEN, ZImageSampling

PATCH = 2


class ZImageCodec(ImageCodec):
    """A codec, see `omni_async.diffusion.policy.Codec`."""

    def __init__(self, *, tokenizer: Any, text_encoder: Any, vae: Any) -> None:
        super().__init__(vae=vae, text_encoder=text_encoder)
        self.tokenizer, self.text_encoder = tokenizer, text_encoder

    def encode_text(self, text: str, spec: ZImageSampling) -> dict[str, Tensor]:
        """Return the states before the last layer, `embeds` (L, E), of the text in the chat template."""
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        tokens = self.tokenizer(chat, truncation=True, max_length=spec.max_sequence_length, return_tensors="pt")
        # Without padding, which causal attention never reads, and without the language-model head.
        states = self.text_encoder.model(tokens.input_ids.to(self.vae.device), output_hidden_states=True).hidden_states
        return {"embeds": states[-2][0].clone()}


class ZImagePolicy(DiffusersPolicy):
    """A policy, see `omni_async.diffusion.policy.Policy`.

    Conditioning: `embeds` (L, E) of the prompt and the negative one, without padding."""

    denoiser = "ZImageTransformer2DModel"
    parts: ClassVar = {
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.AutoModelForCausalLM",
        "vae": "diffusers.AutoencoderKL",
    }
    codec = ZImageCodec
    text_rules: ClassVar = {"embeds": "jagged"}

    def __init__(self, path: str) -> None:
        super().__init__(path)
        transformer = read_config(path, "transformer")
        self.channels = int(transformer["in_channels"])
        self.text_width = int(transformer["cap_feat_dim"])
        self.scheduler_config = read_config(path, "scheduler", "scheduler_config.json")

    def latent_shape(self, spec: ZImageSampling) -> tuple[int, ...]:
        rows, columns = latent_grid(spec, PIXELS_PER_TOKEN)
        return self.channels, rows * PATCH, columns * PATCH

    def sigmas(self, num_inference_steps: int, spec: ZImageSampling) -> Tensor:
        rows, columns = latent_grid(spec, PIXELS_PER_TOKEN)
        return scheduler_sigmas(num_inference_steps, rows * columns, self.scheduler_config, torch_spacing=True)

    def scale(self, spec: ZImageSampling, component: str) -> float:
        return 1 + spec.guidance_scale

    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: ZImageSampling) -> dict[str, Any]:
        return {"t": 1 - sigma, "cap_feats": text["embeds"]}

    def call(self, denoiser: nn.Module, **inputs: Any) -> Any:
        """Run the denoiser on lists, one image of one frame for each row."""
        images = list(inputs["hidden_states"].unsqueeze(2))
        return (-torch.stack(denoiser(images, inputs["t"], inputs["cap_feats"])[0]).squeeze(2),)

    def blank_text(self, spec: ZImageSampling) -> dict[str, Tensor]:
        return {"embeds": torch.zeros(1, self.text_width)}

"""Computes conditioning, latent shape and velocity of Wan2.2 image-to-video.

All three follow diffusers' `WanImageToVideoPipeline` with one image, the first frame, and
`FlowMatchEulerDiscreteScheduler` in place of its multistep solver. Latents, schedule and experts are as in Wan2.2
text-to-video. An expert takes 4 + C more channels, which are the same at every step: a mask of the given frames, and
the latents of a video whose first frame is the image and whose other frames are grey.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_async.data.image_files import read_prompt_image
from omni_async.types import Prompt
from omni_async_pipelines.sampling import read_config
from omni_async_pipelines.wan2_2.policy import Wan22Codec, Wan22Policy
from omni_async_pipelines.wan2_2_i2v.sampling import MASK, Wan22I2VSampling, require_channels


class Wan22I2VCodec(Wan22Codec):
    """A `Codec` that also encodes a prompt's image, at the size of the video."""

    def conditioning_key(self, spec: Wan22I2VSampling) -> Hashable:
        return super().conditioning_key(spec), spec.height, spec.width, spec.num_frames

    def encode_shared(self, prompt: Prompt, spec: Wan22I2VSampling) -> dict[str, Tensor]:
        from PIL.Image import fromarray

        if len(prompt.images) != 1:
            raise ValueError(f"the model makes a video of one image, but the prompt has {len(prompt.images)}")
        image = fromarray(read_prompt_image(prompt.images[0]).image.transpose(1, 2, 0))
        first = self._encoder.video_processor.preprocess(image, height=spec.height, width=spec.width)
        grey = first.new_zeros(1, 3, spec.num_frames - 1, spec.height, spec.width)
        [latents] = self.encode_videos(torch.cat([first.unsqueeze(2), grey], dim=2))
        given = latents.new_zeros(MASK, *latents.shape[1:])
        given[:, 0] = 1
        return {"condition": torch.cat([given, latents])}


class Wan22I2VPolicy(Wan22Policy):
    """A policy, see `omni_async.diffusion.policy.Policy`.

    Conditioning: as in Wan2.2, and `condition` (4 + C, (F - 1) / 4 + 1, H / 8, W / 8): the mask and the image's
    latents."""

    codec = Wan22I2VCodec
    shared_rules: ClassVar = {"condition": "same"}

    def __init__(self, path: str) -> None:
        require_channels(path)
        super().__init__(path)
        self.channels = int(read_config(path, "vae").get("z_dim", 16))

    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: Any) -> dict[str, Any]:
        given = torch.cat([latents, text["condition"]], dim=1)
        return super().inputs(latents, sigma, text, spec) | {"hidden_states": given}

    def blank_shared(self, spec: Any) -> dict[str, Tensor]:
        return {"condition": torch.zeros(MASK + self.channels, *self.latent_shape(spec)[1:])}

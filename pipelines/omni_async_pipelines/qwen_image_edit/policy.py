"""Computes conditioning and velocity of Qwen-Image-Edit, as diffusers' `QwenImageEditPipeline` does.

The text encoder reads the prompt's image with the text. The denoiser gets the image's latents as further tokens after
the sample's; only the output of the sample's tokens counts. A prompt without an image is handled as in Qwen-Image: with
its template, and no further tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.data.image_files import read_prompt_image
from omni_async.diffusion.components import Rule
from omni_async.types import Prompt, PromptImage
from omni_async_pipelines.parts import branch_text, make_conditioning, pack_patches
from omni_async_pipelines.qwen_image.policy import QwenImageCodec, QwenImagePolicy
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from omni_async_pipelines.qwen_image_edit.sampling import (
    EDIT_TEMPLATE,
    NUM_EDIT_TEMPLATE_TOKENS,
    QwenImageEditSampling,
    sides_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image


class QwenImageEditCodec(QwenImageCodec):
    """The `omni_async.diffusion.policy.Codec` of Qwen-Image-Edit."""

    sees_images = True

    def __init__(self, *, processor: Any, **parts: Any) -> None:
        super().__init__(**parts)
        self.processor = processor

    @torch.no_grad()
    def encode(self, prompt: Prompt, spec: QwenImageEditSampling) -> TensorDict:
        if not prompt.images:
            return super().encode(prompt, spec)
        if len(prompt.images) > 1:
            raise ValueError(f"Qwen-Image-Edit takes one image, the prompt has {len(prompt.images)}")
        picture = fitted(prompt.images[0], spec.image_area)

        def encode_branch(branch: str) -> dict[str, Tensor]:
            return self.encode_seeing(branch_text(prompt, spec, branch), picture)

        return make_conditioning(spec.guided, encode_branch, {"image": self.encode_picture(picture)})

    def encode_shared(self, prompt: Prompt, spec: QwenImageEditSampling) -> dict[str, Tensor]:
        """Return no image."""
        return {"image": torch.zeros(0, 0, 4 * self.vae.config.z_dim, device=self.vae.device)}

    def encode_seeing(self, text: str, picture: Image) -> dict[str, Tensor]:
        """Return the result of `encode_text` for a text that the text encoder reads together with the picture."""
        for token in (self.processor.image_token, self.processor.video_token):
            if token in text:
                raise ValueError(f"the prompt holds {token}, where the model would look for another image")
        self.tokenize(EDIT_TEMPLATE, text, NUM_EDIT_TEMPLATE_TOKENS)  # for its bound, which ignores image tokens
        # Whole, with the types of the tokens: transformers 5 uses them to place an image's tokens in rows and columns.
        tokens = self.processor(text=[EDIT_TEMPLATE.format(text)], images=[picture], return_tensors="pt")
        return self.encode_tokens(tokens, NUM_EDIT_TEMPLATE_TOKENS)

    def encode_picture(self, picture: Image) -> Tensor:
        """Return the picture's latents (H / 16, W / 16, C), a token for every 2 x 2 of them."""
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1
        maps = self.encode_pixels(pixels)
        return pack_patches(maps)[0].unflatten(0, (maps.shape[2] // 2, maps.shape[3] // 2))


class QwenImageEditPolicy(QwenImagePolicy):
    """The `omni_async.diffusion.policy.Policy` of Qwen-Image-Edit.

    Conditioning: as in Qwen-Image, and `image` (rows, columns, C), the tokens of the prompt's image, empty without
    one."""

    parts: ClassVar = {**QwenImagePolicy.parts, "processor": "transformers.Qwen2VLProcessor"}
    codec = QwenImageEditCodec
    shared_rules: ClassVar[Mapping[str, Rule]] = {"image": "jagged"}

    def velocity(
        self,
        components: Mapping[str, nn.Module],
        latents: Tensor,
        sigma: Tensor,
        conditioning: TensorDict,
        spec: Any,
        *,
        unconditional_gradient: bool = True,
    ) -> Tensor:
        """Compute the velocity, in one call for all rows whose images have the same shape.

        The denoiser has one table of positions for all of its rows. A trainer's micro-batch has rows of one prompt and
        one call of its samples, so of one shape, and its ranks call the denoiser equally often; only engines mix
        shapes."""
        shapes = [image.shape for image in cast(Any, conditioning).get("image", as_list=True)]
        found: Tensor | None = None
        for shape in dict.fromkeys(shapes):
            rows = [row for row, its in enumerate(shapes) if its == shape]
            every = len(rows) == len(shapes)
            given = (latents, sigma, conditioning) if every else (latents[rows], sigma[rows], conditioning[rows])
            v = super().velocity(components, *given, spec, unconditional_gradient=unconditional_gradient)
            if every:
                return v
            found = v.new_zeros(latents.shape) if found is None else found
            found = found.index_put((torch.tensor(rows, device=v.device),), v)
        assert found is not None
        return found

    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: QwenImageSampling) -> dict[str, Any]:
        made, image = super().inputs(latents, sigma, text, spec), torch.stack(text["image"])
        if not image.numel():
            return made
        grid = (1, *image.shape[1:3])
        tokens = torch.cat([latents, image.flatten(1, 2)], dim=1)
        return made | {"hidden_states": tokens, "img_shapes": [[*own, grid] for own in made["img_shapes"]]}

    def call(self, denoiser: nn.Module, **inputs: Any) -> Any:
        """Return the denoiser's output for the sample's own tokens."""
        output = super().call(denoiser, **inputs)[0]
        return (output[:, : math.prod(inputs["img_shapes"][0][0])],)

    def blank_shared(self, spec: QwenImageEditSampling) -> dict[str, Tensor]:
        return {"image": torch.zeros(0, 0, self.in_channels)}

    def long_shared(self, spec: QwenImageEditSampling) -> dict[str, Tensor]:
        side = math.ceil(math.sqrt(spec.image_area) / self.pixels_per_token)
        return {"image": torch.zeros(side, side, self.in_channels)}


def fitted(image: PromptImage, area: int) -> Image:
    """Read a prompt's image and resize it to about `area` pixels, as diffusers' pipeline does.

    ValueError if it cannot be read, or is so narrow that a side would vanish."""
    from PIL import Image

    pixels = np.asarray(read_prompt_image(image).image).transpose(1, 2, 0)
    height, width = pixels.shape[:2]
    try:
        sides = sides_of(width, height, area)
    except ValueError as error:
        raise ValueError(f"the prompt's image {image.path} {error}") from None
    return Image.fromarray(pixels).resize((sides[0], sides[1]), Image.Resampling.LANCZOS)

"""Defines the keys of `rollout.sampling` for Wan2.2 image-to-video, the same as for text-to-video."""

from __future__ import annotations

from pathlib import Path

from omni_async_pipelines.sampling import read_config
from omni_async_pipelines.wan2_2.sampling import TEMPORAL, Wan22Sampling

MASK = TEMPORAL  # channels that mark which of the frames of a latent one are given


class Wan22I2VSampling(Wan22Sampling, frozen=True, kw_only=True):
    def problem(self, checkpoint: Path) -> str | None:
        """Find the same problems as Wan2.2. ValueError for a model that takes its image in another way."""
        require_channels(checkpoint)
        return super().problem(checkpoint)


def require_channels(checkpoint: str | Path) -> None:
    """Raise ValueError for a checkpoint whose experts do not take the image purely as channels next to the latents."""
    index, transformer = read_config(checkpoint, "", "model_index.json"), read_config(checkpoint, "transformer")
    channels = int(read_config(checkpoint, "vae").get("z_dim", 16))
    if transformer.get("image_dim") is not None or (index.get("image_encoder") or [None])[0] is not None:
        raise ValueError(
            f"model.path: {checkpoint} also reads the image by a CLIP encoder, as Wan2.1 does; expected Wan2.2-I2V-A14B"
        )
    expected = MASK + 2 * channels
    if index.get("expand_timesteps") or transformer["in_channels"] != expected:
        raise ValueError(
            f"model.path: {checkpoint} does not take the image as channels: transformer/config.json has in_channels"
            f" {transformer['in_channels']}, expected {expected} (and no expand_timesteps)"
        )

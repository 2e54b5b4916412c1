"""Tests that the VAE of no family is given more samples at once than fit, and that this changes no sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omni_async_pipelines import parts

from tests.pipelines.families import NAMES, first_of

SAMPLES = 5
QUICK = ("stable_diffusion_3", "qwen_image", "wan2_2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.thorough]) for name in NAMES]
)
def test_a_batch_that_does_not_fit_is_decoded_in_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    family = first_of(name)
    policy = family.policy(family.build(tmp_path))
    spec, codec = family.specs[0], policy.load_codec(torch.float32)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(SAMPLES, *policy.latent_shape(spec), generator=generator)
    sizes: list[int] = []
    decoder: Any = codec.vae.decoder  # type: ignore[attr-defined]
    decoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))

    def decoded() -> list[dict[str, np.ndarray]]:
        sizes.clear()
        made = [media.numpy() for media in codec.decode(latents, spec)]
        assert len(made) == SAMPLES
        return [{part: getattr(media, part) for part in media.parts} for media in made]

    whole = decoded()
    at_once = 1 if name == "hunyuan_video_15" else SAMPLES  # whose VAE takes one video
    assert set(sizes) == {at_once}
    [pixels] = [np.prod(shape.shape) // 3 for shape in spec.media() if shape.part != "audio"]
    monkeypatch.setattr(parts, "_PIXELS_AT_ONCE", 2 * int(pixels) + 1)
    in_parts = decoded()
    assert max(sizes) == min(2, at_once)
    monkeypatch.setattr(parts, "_PIXELS_AT_ONCE", 1)
    one_by_one = decoded()
    assert set(sizes) == {1}
    for cut in (in_parts, one_by_one):
        for before, after in zip(whole, cut, strict=True):
            for part, values in before.items():
                # A batch of another size may round otherwise, which is a level of 255 at most.
                bound = 1e-4 if part == "audio" else 1
                assert np.abs(values.astype(float) - after[part].astype(float)).max() <= bound

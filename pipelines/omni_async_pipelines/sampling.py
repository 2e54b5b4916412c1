"""Contains the sampling code shared by several families, and reads their configuration files; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText, MediaShape, SamplingSpec


class ImageSampling(SamplingSpec, frozen=True, kw_only=True):
    """The spec of one image."""

    height: Annotated[int, doc("Image height in pixels.", ge=16, most=16_384, multiple_of=16)] = 512
    width: Annotated[int, doc("Image width in pixels.", ge=16, most=16_384, multiple_of=16)] = 512

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("image", (3, self.height, self.width)),)


def clip_texts(text: str, *folders: str) -> tuple[EncodedText, ...]:
    """Return a text as input of CLIP's encoders, whose tokenizers are in these folders."""
    return tuple(EncodedText(tokenizer=folder, cls="CLIPTokenizer", text=text, most=None) for folder in folders)


def require_frames(num_frames: int, temporal: int) -> None:
    """Raise ValueError for a number of frames that a causal video VAE cannot encode to a whole number of latents.

    Args:
        num_frames: of a video.
        temporal: how many become one latent frame, after the first, which becomes one alone."""
    if num_frames % temporal != 1:
        below = (num_frames - 1) // temporal * temporal + 1
        raise ValueError(f"num_frames must be {temporal}k + 1, got {num_frames}; take {below} or {below + temporal}")


def other_layout(checkpoint: Path, layout: Iterable[tuple[str, str, Any]]) -> str | None:
    """Return the first difference of a checkpoint's configuration from its family's, in words; None without one.

    Args:
        checkpoint: its folder.
        layout: the expected configuration, as folder, key and value; a missing key is fine."""
    for part, key, expected in layout:
        found = read_config(checkpoint, part).get(key)
        if found is not None and found != expected:
            return f"{part} has {key} {found!r}, not {expected!r}"
    return None


def read_config(checkpoint: str | Path, part: str, name: str = "config.json") -> dict[str, Any]:
    """Return the content of a part's configuration file.

    Args:
        checkpoint: its folder.
        part: the part's folder in it; empty: the checkpoint itself.
        name: the file's.

    Raises:
        ValueError: the checkpoint has no such file."""
    file = Path(checkpoint) / part / name
    if not file.is_file():
        raise ValueError(
            f"model.path: {checkpoint} is no checkpoint of this family in diffusers layout, {file} is missing"
        )
    config: dict[str, Any] = json.loads(file.read_bytes())
    return config

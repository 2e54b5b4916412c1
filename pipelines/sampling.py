"""Holds what the sampling keys of several families have in common, and reads their configuration files; no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from omni_async.config.section import doc
from omni_async.families import MediaShape, SamplingSpec


class ImageSampling(SamplingSpec, frozen=True, kw_only=True):
    """The spec of one image."""

    height: Annotated[int, doc("Image height in pixels.", ge=16, most=16_384, multiple_of=16)] = 512
    width: Annotated[int, doc("Image width in pixels.", ge=16, most=16_384, multiple_of=16)] = 512

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("image", (3, self.height, self.width)),)


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

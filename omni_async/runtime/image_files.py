"""Reads image files that a user gives, as the first part of media: those of preference pairs and of prompts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.config import ConfigError

if TYPE_CHECKING:
    from omni_async.media import Media

FORMATS = ("PNG", "JPEG", "WEBP")  # named, so that no bytes reach Pillow's rarer decoders
MAX_PIXELS = 64_000_000
MAX_IMAGE_BYTES = 2**28  # of an encoded image


def read_image(source: Path | io.BytesIO, where: str) -> Media:
    """Decodes an image, uint8 (3, height, width) RGB in its own size, upright as its EXIF data say; of an animation the
    first frame. Raises ConfigError, one line that begins with `where`, if it cannot be decoded or has more than 64
    million pixels."""
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    from omni_async.media import Media

    try:
        with Image.open(source, formats=FORMATS) as image:
            width, height = image.size  # of the header: nothing is decoded yet
            if width * height > MAX_PIXELS:
                raise ConfigError(f"{where}: the image has {width} x {height} pixels, at most {MAX_PIXELS} are decoded")
            if image.mode[0] in "IF":
                raise ConfigError(
                    f"{where}: the image has mode {image.mode}; expected 8 bits a channel, which more would be cut"
                    " off to"
                )
            pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
            return Media(image=np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    except ConfigError:
        raise
    except UnidentifiedImageError:
        raise ConfigError(f"{where}: not a PNG, JPEG or WebP image") from None
    except Exception as error:  # noqa: BLE001 (decoders raise any exception on foreign bytes)
        raise ConfigError(f"{where}: the image cannot be decoded: {type(error).__name__}: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())

"""Makes media of images as scorers see them."""

from __future__ import annotations

import numpy as np

from omni_async.media import Media


def as_media(pixels: np.ndarray) -> Media:
    """Makes the media of an image (height, width, 3) uint8."""
    return Media(image=np.ascontiguousarray(pixels.transpose(2, 0, 1)))

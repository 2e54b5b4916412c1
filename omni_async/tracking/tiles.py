"""Makes an image of any media, for a grid."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omni_async.media import Media, evenly

_FRAMES = 3
_WIDTH, _HEIGHT = 384, 96  # of a waveform
_BACKGROUND, _WAVE = 32, 200  # grey levels


def tile(media: Media) -> NDArray[np.uint8]:
    """Return an image of the media, uint8 (height, width, 3).

    Of a video it is the first, the middle and the last frame, side by side; of sound alone the waveform."""
    if media.image is not None:
        return media.pixels
    if media.video is not None:
        return np.concatenate(list(evenly(media.frames, _FRAMES)), axis=1)
    return _waveform(media.waveform)


def _waveform(samples: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Draw all channels over each other: in every column the range of values in its share of the time."""
    drawn = np.full((_HEIGHT, _WIDTH, 3), _BACKGROUND, np.uint8)
    rows = ((1 - np.nan_to_num(samples).clip(-1, 1)) / 2 * (_HEIGHT - 1)).round().astype(int)
    for column, part in enumerate(np.array_split(rows, _WIDTH)):
        if part.size:
            drawn[part.min() : part.max() + 1, column] = _WAVE
    return drawn

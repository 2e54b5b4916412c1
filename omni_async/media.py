"""Defines the media of a sample: an image, a video, audio, a text, or several of them.

A codec converts tensors to `Media`; a token policy answers with a text. Media are stored, scored and shown as NumPy
arrays, so none of this needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from omni_async.plugins.families import ARRAYS, PARTS, MediaShape, SamplingSpec

_AXES = {"image": 3, "video": 4, "audio": 2}
_DTYPES = {"image": "uint8", "video": "uint8", "audio": "float32"}
_LAYOUTS = {
    "image": "uint8 (3, height, width)",
    "video": "uint8 (frames, 3, height, width)",
    "audio": "float32 (channels, n)",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """The media of one sample, in named parts; at least one is present.

    Parts are tensors on the CPU or NumPy arrays. Do not write to them: readers share them. Raises ValueError if a
    part's dtype or shape differs from this table:

    image  uint8 (3, height, width), RGB
    video  uint8 (frames, 3, height, width), RGB, `fps` frames a second
    audio  float32 (channels, n) in [-1, 1], `sample_rate` samples a second

    `text` is a str without a layout; `finish` says how it ended: `stop`, or `length` at the largest number of
    tokens. `tokens` is its number of tokens, the end token included; None if unknown."""

    image: Any = None
    video: Any = None
    fps: float | None = None
    audio: Any = None
    sample_rate: int | None = None
    text: str | None = None
    finish: Literal["stop", "length"] | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("media without a part: expected an image, a video, audio or a text")
        for part in self.arrays:
            _require_layout(part, getattr(self, part))
        if (self.video is None) != (self.fps is None) or not (self.fps is None or self.fps > 0):
            raise ValueError(f"a video goes with fps > 0, got fps = {self.fps}")
        if (self.audio is None) != (self.sample_rate is None) or not (self.sample_rate is None or self.sample_rate > 0):
            raise ValueError(f"audio goes with sample_rate > 0, got sample_rate = {self.sample_rate}")
        if not isinstance(self.text, str | None) or (self.text is None) != (self.finish is None):
            raise ValueError(f"a text is a str with a finish, got {type(self.text).__name__} and {self.finish!r}")
        if self.tokens is not None and (self.text is None or self.tokens < 0):
            raise ValueError(f"tokens are a text's, at least 0, got {self.tokens}")

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that are present."""
        return tuple(part for part in PARTS if getattr(self, part) is not None)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the present parts that are arrays: all but a text."""
        return tuple(part for part in ARRAYS if getattr(self, part) is not None)

    @property
    def nbytes(self) -> int:
        text = 0 if self.text is None else len(self.text.encode("utf-8", "surrogatepass"))
        return text + sum(int(getattr(self, part).nbytes) for part in self.arrays)

    def numpy(self) -> Media:
        """Return the same media as contiguous NumPy arrays."""
        arrays: dict[str, Any] = {part: _array(getattr(self, part)) for part in self.arrays}
        return replace(self, **arrays)

    def copy(self) -> Media:
        """Return the same media with copied arrays."""
        arrays: dict[str, Any] = {part: _array(getattr(self, part)).copy() for part in self.arrays}
        return replace(self, **arrays)

    # ---- in the layouts of Pillow, PyAV and soundfile, as copies -----------------------------------------------------

    @property
    def pixels(self) -> NDArray[np.uint8]:
        """The image, uint8 (height, width, 3)."""
        return _moved(self, "image", (1, 2, 0))

    @property
    def frames(self) -> NDArray[np.uint8]:
        """The video, uint8 (frames, height, width, 3)."""
        return _moved(self, "video", (0, 2, 3, 1))

    @property
    def waveform(self) -> NDArray[np.float32]:
        """The audio, float32 (n, channels)."""
        return _moved(self, "audio", (1, 0))


def evenly(frames: NDArray[np.uint8], count: int | None) -> NDArray[np.uint8]:
    """Return `count` frames, evenly spaced from first to last; the middle one for 1. All for None, or if fewer."""
    if count is None:
        return frames
    last = len(frames) - 1
    if count == 1:
        return frames[last // 2 : last // 2 + 1]
    count = min(count, len(frames))
    return frames[[round(i * last / max(1, count - 1)) for i in range(count)]]


def shape_of(media: Media) -> tuple[MediaShape, ...]:
    """Return the parts' shapes as a spec names them."""
    rates = {"video": media.fps, "audio": media.sample_rate}
    shapes = {part: tuple(getattr(media, part).shape) if part in media.arrays else () for part in media.parts}
    return tuple(MediaShape(part, shape, rates.get(part)) for part, shape in shapes.items())  # type: ignore[arg-type]


def require_media(media: Sequence[Media], spec: SamplingSpec) -> None:
    """Raise ValueError with what was expected, unless all media have the parts and shapes of the spec's samples."""
    expected = spec.media()
    for one in media:
        if (found := shape_of(one)) != expected:
            raise ValueError(f"expected {_described(expected)}, got {_described(found)}")


def _described(shapes: Sequence[MediaShape]) -> str:
    return " and ".join(
        f"{one.part} {one.shape}" + (f" at {one.rate:g} a second" if one.rate else "") for one in shapes
    )


def _require_layout(part: str, value: Any) -> None:
    shape = tuple(getattr(value, "shape", ()))
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    colour = part == "audio" or (len(shape) == _AXES[part] and shape[-3] == 3)
    if dtype != _DTYPES[part] or len(shape) != _AXES[part] or 0 in shape or not colour:
        raise ValueError(f"{part}: expected {_LAYOUTS[part]}, got {dtype} {shape}")


def _array(part: Any) -> NDArray[Any]:
    if not isinstance(part, np.ndarray):
        part = part.detach().cpu().numpy()
    return np.ascontiguousarray(part)


def _moved(media: Media, part: str, axes: tuple[int, ...]) -> NDArray[Any]:
    value = getattr(media, part)
    if value is None:
        raise ValueError(f"media has no {part}, only {', '.join(media.parts)}")
    return np.ascontiguousarray(np.transpose(np.asarray(value), axes))

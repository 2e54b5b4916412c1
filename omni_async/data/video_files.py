"""Checks and reads video files that prompts carry.

Frames are decoded one at a time. Frames between the model's points in time are dropped. Sound is not read.

Errors are a ConfigError of one line that begins with `where`. PyAV is imported when a file is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_async.config import ConfigError
from omni_async.data.image_files import content_of, digest_of, encoded_bytes
from omni_async.data.media_files import decoded_frames, decoding, opened_video, require_room
from omni_async.types import PromptVideo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_PIXELS = 2**23  # of a frame: decoders keep up to 17 of them
_MOST_DECODED = 2**35  # pixels of all frames: some two minutes on one core
_SAME_S = 1e-6  # times closer than this are equal


class Frames(NamedTuple):
    """The frames of a video that a model reads: uint8 (F, height, width, 3) RGB, upright, `step` seconds apart."""

    pixels: NDArray[np.uint8]
    step: float


def prompt_video(
    file: Path | PromptVideo, where: str, decode: bool = True, within: Path | None = None
) -> tuple[PromptVideo, int]:
    """Check that a file is a video, and describe it.

    Args:
        file: found by `find_image`, or a carried video.
        where: the place that names it; the beginning of an error.
        decode: decode all of its frames; otherwise only the first.
        within: a folder that the file must not leave, links included.

    Returns:
        The video, and the number of decoded pixels.

    Raises:
        ConfigError: it cannot be read, is no video, or is too large or too long."""
    content = content_of(file if isinstance(file, Path) else file.content or b"", where, within)
    decoded = 0
    with _shown(content, where) as shown:
        for frame, _ in shown:
            decoded += frame.width * frame.height
            if not decode:
                break
    if isinstance(file, Path):
        return PromptVideo(str(file), digest_of(content)), decoded
    return PromptVideo(file.path, digest_of(content), content), decoded


def read_prompt_videos(videos: Sequence[PromptVideo], step: float, most_frames: int, most_pixels: int) -> list[Frames]:
    """Decode the videos of a prompt: the frames shown at 0, `step`, 2 `step`, ... seconds of each.

    While a video would have more frames than allowed, the step of all is doubled.

    Args:
        videos: of the prompt.
        step: in seconds.
        most_frames: of a video.
        most_pixels: of a frame; larger ones are reduced, in proportion.

    Raises:
        ValueError: a file is gone, has changed since the run began, or cannot be decoded."""
    found = [_read(video, step, most_frames, most_pixels) for video in videos]
    longest = max((one.step for one in found), default=step)
    return [Frames(one.pixels[:: round(longest / one.step)], longest) for one in found]


def _read(video: PromptVideo, step: float, most_frames: int, most_pixels: int) -> Frames:
    import numpy as np

    kept: list[NDArray[np.uint8]] = []
    with _shown(encoded_bytes(video), video.path) as shown:
        for frame, until in shown:
            pixels = None
            while len(kept) * step < until - _SAME_S:
                pixels = _reduced(frame, most_pixels) if pixels is None else pixels
                kept.append(pixels)
                if len(kept) > most_frames:
                    kept, step = kept[::2], 2 * step
    return Frames(np.stack(kept), step)


def _reduced(frame: Any, most_pixels: int) -> NDArray[np.uint8]:
    """Return a decoded frame upright, uint8 (height, width, 3) RGB."""
    import numpy as np
    from PIL import Image

    pixels = frame.to_ndarray(format="rgb24")
    if (scale := (most_pixels / (frame.width * frame.height)) ** 0.5) < 1:
        size = max(1, int(frame.width * scale)), max(1, int(frame.height * scale))
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90))


@contextmanager
def _shown(content: bytes, where: str) -> Iterator[Iterator[tuple[Any, float]]]:
    """Yield an iterator over the frames of a video, each with the second at which it ends; the first begins at 0."""
    with decoding(content, "video", where) as opened, opened_video(opened, _MOST_PIXELS) as (container, video, rate):
        yield _ends(decoded_frames(container, video), float(1 / rate))


def _ends(frames: Iterable[Any], usual_s: float) -> Iterator[tuple[Any, float]]:
    """Yield frames with the second at which each ends. `usual_s`: of the last one, and of all if times are missing."""
    before, first, decoded, at, number = None, None, 0, 0.0, 0
    for number, frame in enumerate(frames):
        decoded += frame.width * frame.height
        if decoded > _MOST_DECODED:
            raise ConfigError(f"more than {_MOST_DECODED} pixels in all frames; cut it into parts")
        if before is not None and (frame.width, frame.height) != (before.width, before.height):
            raise ConfigError("its frames have different sizes")
        time = number * usual_s if frame.time is None else float(frame.time)
        first = time if first is None else first
        at = max(at, time - first)
        require_room(0, number + 1, at)
        if before is not None:
            yield before, at
        before = frame
    if before is None:
        raise ConfigError("the video has no frames")
    require_room(0, number + 1, at + usual_s)
    yield before, at + usual_s

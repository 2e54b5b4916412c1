"""Writes video and audio files, for people to watch and listen to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omni_async.media import Media

_QUALITY = "18"  # constant rate factor of H.264: hard to tell from the frames


def write_media(media: Media, path: Path) -> list[Path]:
    """Write video and audio to `path` with the suffixes .mp4 (H.264, without sound) and .wav (32-bit float).

    Returns the files, none for an image. Raises OSError, and then leaves no half of a file."""
    written = []
    if media.video is not None and media.fps is not None:
        written.append(path.with_name(f"{path.name}.mp4"))
        with _whole(written[-1]) as file:
            _write_mp4(file, media.frames, media.fps)
    if media.audio is not None:
        import soundfile

        written.append(path.with_name(f"{path.name}.wav"))
        with _whole(written[-1]) as file:
            soundfile.write(file, media.waveform, media.sample_rate, subtype="FLOAT", format="WAV")
    return written


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Delete the file again if it cannot be finished. Raises OSError, whatever a library raises."""
    try:
        yield path
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) or not isinstance(error, Exception):
            raise
        raise OSError(f"{path.name} could not be written: {error}") from error


def _write_mp4(path: Path, frames: NDArray[np.uint8], fps: float) -> None:
    import av

    _, height, width, _ = frames.shape
    # H.264 stores colour at half the resolution, and so has no odd sides.
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001), options={"crf": _QUALITY})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.codec_context.thread_count = 1
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())

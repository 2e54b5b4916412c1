"""Reads the media files that a user names: images, videos with their sound, and sound.

Errors are a ConfigError of one line that begins with the file. Pillow, PyAV and soundfile are imported when a file of
their kind is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.config import ConfigError
from omni_async.config.reading import require_file
from omni_async.data.image_files import one_line, read_image
from omni_async.media import Media

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIXES = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp"), "image"),
    **dict.fromkeys((".mp4", ".mov", ".mkv", ".webm", ".avi"), "video"),
    **dict.fromkeys((".wav", ".flac", ".ogg", ".mp3"), "audio"),
}
_MOST_BYTES = 2**32  # of a decoded video or sound


def part_of(file: Path) -> str | None:
    """Return which part of media a file holds, by its suffix; None if it holds none."""
    return SUFFIXES.get(file.suffix.lower())


def read_media(files: dict[str, Path]) -> Media:
    """Decode the parts of one sample.

    Args:
        files: by part. The sound of a video is its own unless there is a file of it.

    Raises:
        ConfigError: one of them cannot be read or decoded."""
    parts: dict[str, Any] = {}
    for part, file in files.items():
        try:
            require_file(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or one_line(error)}") from None
        if part == "image":
            parts["image"] = read_image(file, str(file)).image
            continue
        try:
            parts |= _video(file, sound="audio" not in files) if part == "video" else _sound(file)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 (decoders raise any exception on foreign bytes)
            why = f"{type(error).__name__}: {one_line(error)}"
            raise ConfigError(f"{file}: the {part} cannot be decoded: {why}") from None
    return Media(**parts)


def _video(file: Path, sound: bool) -> dict[str, Any]:
    import av
    import numpy as np

    with av.open(str(file)) as container:
        if not container.streams.video:
            raise ConfigError(f"{file}: holds no video")
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        frames: list[NDArray[Any]] = []
        for frame in container.decode(stream):
            frames.append(frame.to_ndarray(format="rgb24").transpose(2, 0, 1))
            _require_room(file, sum(one.nbytes for one in frames[:1]) * len(frames))
        if not frames or not rate:
            raise ConfigError(f"{file}: the video has no {'frame rate' if frames else 'frames'}")
        has_sound = sound and bool(container.streams.audio)
    found: dict[str, Any] = {"video": np.stack(frames), "fps": float(rate)}
    return found | (_sound_of_video(file) if has_sound else {})


def _sound_of_video(file: Path) -> dict[str, Any]:
    import av
    import numpy as np

    with av.open(str(file)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="fltp", layout=stream.layout, rate=stream.rate)
        pieces: list[NDArray[Any]] = []
        for frame in container.decode(stream):
            pieces += [piece.to_ndarray() for piece in resampler.resample(frame)]
            _require_room(file, sum(piece.nbytes for piece in pieces[:1]) * len(pieces))
        pieces += [piece.to_ndarray() for piece in resampler.resample(None)]
        rate = stream.rate
    return {"audio": np.concatenate(pieces, axis=1), "sample_rate": rate} if pieces else {}


def _sound(file: Path) -> dict[str, Any]:
    import numpy as np
    import soundfile

    with soundfile.SoundFile(file) as sound:
        _require_room(file, 4 * sound.frames * sound.channels)
        waveform = sound.read(dtype="float32", always_2d=True)
        return {"audio": np.ascontiguousarray(waveform.T), "sample_rate": sound.samplerate}


def _require_room(file: Path, held: int) -> None:
    if held > _MOST_BYTES:
        raise ConfigError(f"{file}: more than {_MOST_BYTES} bytes when decoded; cut it into parts")

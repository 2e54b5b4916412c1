"""Reads media files that a user, a table or a folder names: images, videos with their sound, and sound.

A file is opened once and decoded only through that handle: no library opens a path, another file or an address.
Decoding is bounded in bytes, pixels, seconds, streams, frames and packets. A truncated file is refused.

Errors are a ConfigError of one line that begins with the file. Pillow, PyAV and soundfile are imported when the first
file of their kind is opened.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from omni_async.config import ConfigError
from omni_async.config.reading import OutsideError, open_file
from omni_async.data.containers import require_whole
from omni_async.data.image_files import one_line, read_image
from omni_async.media import Media
from omni_async.plugins.extras import missing_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIXES = {
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp"), "image"),
    **dict.fromkeys((".mp4", ".mov", ".mkv", ".webm", ".avi"), "video"),
    **dict.fromkeys((".wav", ".flac", ".ogg", ".mp3"), "audio"),
}
_MOST_BYTES = 2**32  # of a decoded video or sound
_MOST_FRAMES = 2**16
_MOST_PIXELS = 2**25  # of a frame
_MOST_PACKETS = 2**20
_MOST_STREAMS = 16
_LONGEST_S = 3600
_FASTEST = 1000  # frames a second
_SLOWEST_SOUND, _FASTEST_SOUND, _MOST_CHANNELS = 1000, 768_000, 32
_LOUDEST = 1000.0  # times full scale
_BLOCK = 2**18  # samples decoded at a time
_SOUND_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG")
# No demuxer that opens other files, no protocol to open them with, no unbounded list of streams.
_CONTAINER = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi",
    "protocol_whitelist": "none",
    "max_streams": str(_MOST_STREAMS),
    "enable_drefs": "0",
}
_SOUND_CODEC = {"max_samples": str(2**22)}


def part_of(file: Path) -> str | None:
    """Return the part of media that a file holds, by its suffix; None for other suffixes."""
    return SUFFIXES.get(file.suffix.lower())


def read_media(files: Mapping[str, Path], within: Path | None = None) -> Media:
    """Decode the parts of one sample.

    Args:
        files: by part. A video's own sound is used unless there is an audio file.
        within: the folder that the files must not leave, links included; None if the user named them.

    Raises:
        ConfigError: a file cannot be read or decoded."""
    parts: dict[str, Any] = {}
    for part, file in files.items():
        if part == "image":
            parts["image"] = read_image(file, str(file), within).image
            continue
        try:
            with open_file(file, within) as opened:
                require_whole(opened)
                decoded = _video(opened, sound="audio" not in files) if part == "video" else _sound(opened)
        except OutsideError:
            raise ConfigError(f"{file}: it leads out of its folder; copy the file into it") from None
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.filename == str(file):
                raise ConfigError(f"{file}: {error.strerror or one_line(error)}") from None
            raise ConfigError(f"{file}: the {part} cannot be decoded: {one_line(error)}") from None
        except Exception as error:  # noqa: BLE001 (decoders raise any exception on foreign bytes)
            why = f"{type(error).__name__}: {one_line(error)}"
            raise ConfigError(f"{file}: the {part} cannot be decoded: {why}") from None
        parts |= decoded
    return Media(**parts)


def read_audio(content: bytes, where: str) -> Media:
    """Decode the bytes of a sound file. A ConfigError begins with `where`."""
    with decoding(content, "audio", where) as opened:
        return Media(**_sound(opened))


@contextmanager
def decoding(content: bytes, part: str, where: str) -> Iterator[BinaryIO]:
    """Open the bytes of a file of sound or video. Any failure while it is open is a ConfigError."""
    opened = io.BytesIO(content)
    try:
        require_whole(opened)
        yield opened
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where}: {missing_extra(error.name) or one_line(error)}") from None
    except Exception as error:  # noqa: BLE001 (decoders raise any exception on foreign bytes)
        why = getattr(error, "strerror", None) or one_line(error)  # of FFmpeg's errors, without its number
        raise ConfigError(f"{where}: the {part} cannot be decoded: {why}") from None


def _video(file: BinaryIO, sound: bool) -> dict[str, Any]:
    """Decode the first video stream and, if `sound`, the first sound stream of a file, in one pass."""
    import av
    import numpy as np

    with opened_video(file, _MOST_PIXELS) as (container, video, rate):
        audio = container.streams.audio[0] if sound and container.streams.audio else None
        pieces: list[NDArray[Any]] = []
        resampler = None
        if audio is not None:
            _require_sound(audio.rate, audio.channels)
            audio.codec_context.options = _SOUND_CODEC
            resampler = av.AudioResampler(format="fltp", layout=audio.layout, rate=audio.rate)
        frames, shape, num_frames, num_samples = bytearray(), None, 0, 0
        for frame in decoded_frames(container, *filter(None, (video, audio))):
            if isinstance(frame, av.VideoFrame):
                pixels = np.ascontiguousarray(frame.to_ndarray(format="rgb24").transpose(2, 0, 1))
                if pixels.shape != (shape := shape or pixels.shape):
                    raise ConfigError("its frames have different sizes")
                num_frames += 1
                frames += pixels.data
                require_room(len(frames), num_frames, float(num_frames / rate))
            elif resampler is not None and audio is not None and isinstance(frame, av.AudioFrame):
                pieces += [one.to_ndarray() for one in resampler.resample(frame)]
                num_samples += frame.samples
                require_room(4 * num_samples * audio.channels, 0, num_samples / audio.rate)
        if resampler is not None:
            pieces += [one.to_ndarray() for one in resampler.resample(None)]
        if shape is None:
            raise ConfigError("the video has no frames")
        found: dict[str, Any] = {"video": np.frombuffer(frames, np.uint8).reshape(num_frames, *shape)}
        found["fps"] = float(rate)
        if pieces and audio is not None:
            found |= _heard(np.concatenate(pieces, axis=1), audio.rate)
    return found


@contextmanager
def opened_video(file: BinaryIO, most_pixels: int) -> Iterator[tuple[Any, Any, Fraction]]:
    """Open a video. Yields its container, its first video stream and its frames a second.

    Args:
        file: `require_whole` has accepted it.
        most_pixels: of a frame.

    Raises:
        ConfigError: it has no video, or no usable frame rate. PyAV's errors pass."""
    import av

    codec = {"max_pixels": str(most_pixels)} | _SOUND_CODEC
    with av.open(file, "r", options=codec, container_options=_CONTAINER) as container:
        if not container.streams.video:
            raise ConfigError("holds no video")
        video = container.streams.video[0]
        rate = video.average_rate or video.guessed_rate
        if not rate or not 0 < rate <= _FASTEST:
            raise ConfigError(f"the video has no frame rate, or one beyond {_FASTEST}: {rate}")
        decoder = video.codec_context
        if decoder.width * decoder.height > most_pixels:
            raise ConfigError(f"a frame of {decoder.width} x {decoder.height} pixels, at most {most_pixels}")
        decoder.options = codec  # refuses frames that are larger than the header declares
        yield container, video, rate


def decoded_frames(container: Any, *streams: Any) -> Iterator[Any]:
    """Yield PyAV's frames of streams of an open container. ConfigError for too many packets, or a damaged one."""
    for number, packet in enumerate(container.demux(*streams)):
        if number >= _MOST_PACKETS:
            raise ConfigError(f"more than {_MOST_PACKETS} packets; cut it into parts")
        if packet.is_corrupt:
            raise ConfigError("cut off or damaged: a packet is not whole")
        yield from packet.decode()


def _sound(file: BinaryIO) -> dict[str, Any]:
    import numpy as np
    import soundfile

    file.seek(0)
    with soundfile.SoundFile(file) as sound:
        if sound.format not in _SOUND_FORMATS:
            raise ConfigError(f"expected WAV, FLAC, Ogg or MP3, got {sound.format}")
        _require_sound(sound.samplerate, sound.channels)
        blocks: list[NDArray[Any]] = []
        samples = 0
        while len(block := sound.read(_BLOCK, dtype="float32", always_2d=True)):
            blocks.append(block)
            samples += len(block)
            require_room(4 * samples * sound.channels, 0, samples / sound.samplerate)
        if not blocks:
            raise ConfigError("the audio has no samples")
        if sound.format in ("WAV", "WAVEX", "RF64", "FLAC") and samples < sound.frames < 2**62:
            raise ConfigError(f"cut off: it has {samples} of {sound.frames} samples; copy it again")
        return _heard(np.concatenate(blocks).T, sound.samplerate)


def _heard(waveform: NDArray[Any], rate: int) -> dict[str, Any]:
    import numpy as np

    if not np.isfinite(waveform).all() or np.abs(waveform).max(initial=0) > _LOUDEST:
        raise ConfigError(f"the audio holds values that are not finite, or beyond {_LOUDEST:g} times full scale")
    return {"audio": np.ascontiguousarray(waveform), "sample_rate": rate}


def _require_sound(rate: int, channels: int) -> None:
    if not _SLOWEST_SOUND <= rate <= _FASTEST_SOUND:
        raise ConfigError(f"{rate} samples a second, expected {_SLOWEST_SOUND} to {_FASTEST_SOUND}")
    if not 1 <= channels <= _MOST_CHANNELS:
        raise ConfigError(f"{channels} channels, expected 1 to {_MOST_CHANNELS}")


def require_room(held: int, frames: int, seconds: float) -> None:
    if held > _MOST_BYTES or frames > _MOST_FRAMES or seconds > _LONGEST_S:
        most = f"{_MOST_BYTES} bytes when decoded, {_MOST_FRAMES} frames or {_LONGEST_S} seconds"
        raise ConfigError(f"more than {most}; cut it into parts")

"""Checks and reads sound files that prompts carry.

Errors are a ConfigError of one line that begins with `where`. soundfile and PyAV are imported when a file is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.data.image_files import content_of, digest_of, encoded_bytes
from omni_async.data.media_files import read_audio
from omni_async.media import Media
from omni_async.types import PromptAudio

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LONGEST_S = 1200


def prompt_audio(file: Path | PromptAudio, where: str, within: Path | None = None) -> PromptAudio:
    """Check that a file is sound, by decoding it, and describe it.

    Args:
        file: found by `find_image`, or carried sound.
        where: the place that names it; the beginning of an error.
        within: a folder that the file must not leave, links included.

    Raises:
        ConfigError: it cannot be read, or is no sound."""
    content = content_of(file if isinstance(file, Path) else file.content or b"", where, within)
    read_audio(content, where)
    if isinstance(file, Path):
        return PromptAudio(str(file), digest_of(content))
    return PromptAudio(file.path, digest_of(content), content)


def read_prompt_audio(audio: PromptAudio, rate: int) -> NDArray[np.float32]:
    """Decode a prompt's audio, as `mono_at` returns it.

    Raises ValueError if the file is gone, or has changed since the run began."""
    return mono_at(rate, read_audio(encoded_bytes(audio), audio.path))


def mono_at(rate: int, media: Media) -> NDArray[np.float32]:
    """Return the mean of the channels of its audio, float32 (n,), at `rate` samples a second.

    Raises ValueError for sound of more than 20 minutes: at 1 Hz, a few bytes would become gigabytes."""
    import numpy as np

    assert media.sample_rate is not None
    sound = np.asarray(media.audio)
    if (seconds := sound.shape[1] / media.sample_rate) > _LONGEST_S:
        raise ValueError(f"the sound lasts {seconds:g} s, expected {_LONGEST_S} at most")
    mono = sound.mean(axis=0, dtype=np.float32)
    if media.sample_rate == rate:
        return mono
    import av

    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(mono[None]), format="fltp", layout="mono")
    frame.sample_rate = media.sample_rate
    resampler = av.AudioResampler(format="fltp", layout="mono", rate=rate)
    made = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray()[0] for part in made])

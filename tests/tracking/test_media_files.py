"""Tests the files of samples that are no images, by reading them back."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile

from omni_async.media import Media
from omni_async.tracking import images
from omni_async.tracking.images import tile, write_media


def fading(frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Returns frames (F, 3, H, W) that go from dark red to bright red."""
    video = np.zeros((frames, 3, height, width), np.uint8)
    video[:, 0] = np.linspace(40, 220, frames).astype(np.uint8)[:, None, None]
    return video


@pytest.mark.parametrize(("height", "width", "fps"), [(32, 48, 16), (33, 47, 12.5)])
def test_a_video_is_an_mp4_of_its_frames_at_its_rate(tmp_path: Path, height: int, width: int, fps: float) -> None:
    video = fading(9, height, width)
    (file,) = write_media(Media(video=video, fps=fps), tmp_path / "train-000010-03")
    assert file.name == "train-000010-03.mp4"
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        assert (stream.average_rate, stream.codec_context.name) == (Fraction(fps), "h264")
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    assert frames.shape == (9, height + height % 2, width + width % 2, 3)
    assert abs(frames[:, :height, :width].astype(int) - video.transpose(0, 2, 3, 1)).mean() < 3


def test_audio_is_a_wav_of_the_same_numbers(tmp_path: Path) -> None:
    audio = np.random.default_rng(0).uniform(-1, 1, (2, 500)).astype(np.float32)
    media = Media(video=fading(3), fps=8, audio=audio, sample_rate=16_000)
    assert [file.name for file in write_media(media, tmp_path / "v.1")] == ["v.1.mp4", "v.1.wav"]
    samples, rate = soundfile.read(tmp_path / "v.1.wav", dtype="float32")
    assert rate == 16_000 and np.array_equal(samples.T, audio)


def test_an_image_has_no_file_of_its_own(tmp_path: Path) -> None:
    assert write_media(Media(image=fading(1)[0]), tmp_path / "x") == [] and not [*tmp_path.iterdir()]


def test_a_file_that_cannot_be_finished_is_an_oserror_and_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *args: object) -> None:
        path.write_bytes(b"half")
        raise av.error.FFmpegError(28, "No space left on device")

    monkeypatch.setattr(images, "_write_mp4", full)
    with pytest.raises(OSError, match="No space left"):
        write_media(Media(video=fading(3), fps=8), tmp_path / "x")
    assert not [*tmp_path.iterdir()]


def test_a_tile_shows_the_image_three_frames_or_the_waveform() -> None:
    video = fading(5)
    assert np.array_equal(tile(Media(image=video[0])), video[0].transpose(1, 2, 0))
    shown = tile(Media(video=video, fps=8))
    assert np.array_equal(shown, np.concatenate(video[[0, 2, 4]].transpose(0, 2, 3, 1), axis=1))
    tone = np.zeros((1, 3840), np.float32)
    tone[0, 1920:] = 1.0
    wave = tile(Media(audio=tone, sample_rate=8000))
    bright = wave[..., 0] > 100
    assert bright[:10, :192].sum() == 0 and bright[0, 192:].all() and bright[:, :192].sum() == 192

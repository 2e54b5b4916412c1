"""Tests the parts of a sample's media, what is refused and what readers are given; and the store of one process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from omni_async.media import Media, require_media
from omni_async.plugins.families import MediaShape, SamplingSpec
from omni_async.store import LocalStore, nbytes

IMAGE = torch.arange(24, dtype=torch.uint8).view(3, 2, 4)
VIDEO = torch.arange(120, dtype=torch.uint8).view(5, 3, 2, 4)
AUDIO = torch.linspace(-1, 1, 12).view(2, 6)


class Spec(SamplingSpec, frozen=True):
    shapes: tuple[MediaShape, ...]

    def media(self) -> tuple[MediaShape, ...]:
        return self.shapes


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({}, "without a part"),
        ({"image": IMAGE.float()}, r"image: expected uint8 \(3, height, width\), got float32 \(3, 2, 4\)"),
        ({"image": IMAGE.numpy().transpose(1, 2, 0)}, r"got uint8 \(2, 4, 3\)"),
        ({"image": IMAGE[:, :0]}, r"got uint8 \(3, 0, 4\)"),
        ({"image": [1, 2]}, "got list"),
        ({"video": IMAGE, "fps": 8}, r"video: expected uint8 \(frames, 3, height, width\)"),
        ({"video": VIDEO}, "a video goes with fps > 0, got fps = None"),
        ({"video": VIDEO, "fps": 0.0}, "fps = 0"),
        ({"image": IMAGE, "fps": 8}, "a video goes with fps"),
        ({"audio": AUDIO.double(), "sample_rate": 8000}, r"audio: expected float32 \(channels, n\), got float64"),
        ({"audio": AUDIO}, "audio goes with sample_rate > 0"),
        ({"text": "a"}, "a text is a str with a finish, got str and None"),
        ({"text": b"a", "finish": "stop"}, "a text is a str with a finish, got bytes"),
        ({"text": "a", "finish": "stop", "tokens": -1}, "tokens are a text's, at least 0, got -1"),
        ({"image": IMAGE, "tokens": 1}, "tokens are a text's, at least 0, got 1"),
    ],
)
def test_wrong_layouts(parts: dict, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Media(**parts)


def test_stored_media(tmp_path: Path) -> None:
    made = Media(image=IMAGE, video=VIDEO.transpose(2, 3), fps=8, audio=AUDIO, sample_rate=8000)
    stored = pickle.loads(pickle.dumps(made.numpy(), protocol=5))
    assert stored.parts == ("image", "video", "audio") and (stored.fps, stored.sample_rate) == (8, 8000)
    for part in stored.parts:
        found = getattr(stored, part)
        assert isinstance(found, np.ndarray) and found.flags.c_contiguous
        assert np.array_equal(found, getattr(made, part).numpy())
    assert stored.nbytes == made.nbytes == 24 + 120 + 4 * 12
    (tmp_path / "media").write_bytes(pickle.dumps(stored))
    code = f"import pickle, sys; pickle.load(open({str(tmp_path / 'media')!r}, 'rb')); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_readers_get_channels_last() -> None:
    media = Media(image=IMAGE, video=VIDEO, fps=8, audio=AUDIO, sample_rate=8000).numpy()
    assert np.array_equal(media.pixels[1, 2], IMAGE[:, 1, 2].numpy()) and media.pixels.shape == (2, 4, 3)
    assert np.array_equal(media.frames[4, 1, 2], VIDEO[4, :, 1, 2].numpy()) and media.frames.shape == (5, 2, 4, 3)
    assert np.array_equal(media.waveform[3], AUDIO[:, 3].numpy()) and media.waveform.shape == (6, 2)
    with pytest.raises(ValueError, match="media has no video, only image"):
        _ = Media(image=IMAGE).frames


def test_media_match_their_spec() -> None:
    spec = Spec((MediaShape("video", (5, 3, 2, 4), 8), MediaShape("audio", (2, 6), 8000)))
    right = Media(video=VIDEO, fps=8, audio=AUDIO, sample_rate=8000)
    require_media([right, right], spec)
    for wrong, got in (
        (Media(video=VIDEO, fps=8), r"video \(5, 3, 2, 4\) at 8 a second$"),
        (Media(video=VIDEO, fps=9, audio=AUDIO, sample_rate=8000), "at 9 a second and audio"),
        (Media(video=VIDEO[:4], fps=8, audio=AUDIO, sample_rate=8000), r"video \(4, 3, 2, 4\)"),
    ):
        with pytest.raises(ValueError, match=r"^expected video .* and audio \(2, 6\) at 8000 a second, got .*" + got):
            require_media([right, wrong], spec)


async def test_local_store() -> None:
    store, value = LocalStore(), np.zeros((2, 3), np.uint8)
    assert await store.get(await store.put(value)) is value
    references = await store.put_all([value, "text"])
    assert await store.get(references[0]) is value and await store.get(references[1]) == "text"
    inner = TensorDict({"mask": torch.ones(3, dtype=torch.bool)}, [])
    assert nbytes(TensorDict({"latents": torch.zeros(2, 5), "conditioning": inner}, [])) == 2 * 5 * 4 + 3
    assert nbytes(torch.zeros(4, dtype=torch.float64)) == 32 and nbytes(value) == 6
    with pytest.raises(AttributeError):
        nbytes(object())


def test_a_text_is_a_part_without_an_array() -> None:
    answer = Media(text="né", finish="length")
    assert (answer.parts, answer.arrays, answer.nbytes) == (("text",), (), 3)
    assert answer.numpy().text == answer.copy().text == "né" and answer.numpy().finish == "length"
    assert pickle.loads(pickle.dumps(answer)).text == "né"
    spec = Spec((MediaShape("text", ()),))
    require_media([answer, Media(text="", finish="stop")], spec)
    with pytest.raises(ValueError, match=r"expected text \(\), got image \(3, 2, 4\)"):
        require_media([Media(image=IMAGE)], spec)
    for wrong in ({"text": "x"}, {"finish": "stop", "image": IMAGE}, {"text": b"x", "finish": "stop"}):
        with pytest.raises(ValueError, match="a text is a str with a finish"):
            Media(**wrong)

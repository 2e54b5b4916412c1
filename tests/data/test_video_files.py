"""Tests which frames of a prompt's videos a model gets, and the bounds of decoding them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from omni_async.config import ConfigError
from omni_async.data.video_files import prompt_video, read_prompt_videos
from omni_async.types import PromptVideo

GREYS = range(8, 248, 8)  # of the frames: far enough apart to differ after encoding


def film(
    path: Path, times: list[float], size: tuple[int, int] = (32, 48), rotation: int = 0, rate: int = 100
) -> PromptVideo:
    """Writes frames, each of one grey, that begin at these times in seconds; columns get darker to the right."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(rotation)
        for number, time in enumerate(times):
            pixels = np.full((*size, 3), GREYS[number % len(GREYS)], np.uint8)
            pixels[:, size[1] // 2 :] //= 2 if rotation else 1
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(1000 * time), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return prompt_video(path, path.name)[0]


def shown(video: PromptVideo, step: float, most: int) -> tuple[list[int], float]:
    [frames] = read_prompt_videos([video], step, most, 2**20)
    greys = frames.pixels.reshape(len(frames.pixels), -1).mean(axis=1)
    return [int(np.abs(np.array(GREYS) - grey).argmin()) for grey in greys], frames.step


@pytest.mark.parametrize(
    ("times", "step", "most", "expected"),
    [
        ([0, 0.25, 0.5, 0.75, 1.0, 1.25], 0.5, 8, ([0, 2, 4], 0.5)),
        ([5, 5.25, 5.5, 5.75, 6.0, 6.25], 0.5, 8, ([0, 2, 4], 0.5)),  # the first frame begins the video
        # Uneven: the frame that is shown at the time. The last one lasts as long as the others on average.
        ([0, 0.7, 0.9, 2.1], 0.5, 8, ([0, 0, 2, 2, 2, 3], 0.5)),
        ([k / 10 for k in range(30)], 0.5, 8, ([0, 5, 10, 15, 20, 25], 0.5)),
        ([k / 10 for k in range(30)], 0.5, 6, ([0, 5, 10, 15, 20, 25], 0.5)),
        ([k / 10 for k in range(30)], 0.5, 5, ([0, 10, 20], 1.0)),  # the step is doubled
        ([k / 10 for k in range(30)], 0.5, 2, ([0, 20], 2.0)),
        ([0], 0.5, 2, ([0], 0.5)),
    ],
)
def test_frames_are_those_shown_at_equal_distances(tmp_path, times, step, most, expected):
    assert shown(film(tmp_path / "a.mp4", times), step, most) == expected


def test_videos_of_a_prompt_have_one_step(tmp_path):
    long, short = (film(tmp_path / f"{n}.mkv", [k / 4 for k in range(n)]) for n in (20, 8))
    both = read_prompt_videos([long, short], 0.5, 6, 2**20)
    assert [(len(one.pixels), one.step) for one in both] == [(5, 1.0), (2, 1.0)]


def test_frames_are_reduced_and_upright(tmp_path):
    video = film(tmp_path / "a.mp4", [0.0, 0.5], size=(64, 128), rotation=90)
    [frames] = read_prompt_videos([video], 0.5, 4, 64 * 128)
    assert frames.pixels.shape == (2, 128, 64, 3) and frames.pixels.dtype == np.uint8
    top, bottom = frames.pixels[1, 10].mean(), frames.pixels[1, -10].mean()
    assert top < bottom, "the right side is turned to the top"
    [smaller] = read_prompt_videos([video], 0.5, 4, 32 * 64)
    assert smaller.pixels.shape == (2, 64, 32, 3)
    assert abs(smaller.pixels.mean() - frames.pixels.mean()) < 1


@pytest.mark.parametrize(
    ("bound", "value", "why"),
    [
        ("_MOST_PIXELS", 99, "a frame of 48 x 32 pixels, at most 99"),
        ("_MOST_DECODED", 3 * 32 * 48, "more than 4608 pixels in all frames; cut it into parts"),
    ],
)
def test_a_video_has_bounds(tmp_path, monkeypatch, bound, value, why):
    film(tmp_path / "a.mp4", [0, 1, 2, 3])
    monkeypatch.setattr(f"omni_async.data.video_files.{bound}", value)
    with pytest.raises(ConfigError, match=f"^row 2: video: {why}$"):
        prompt_video(tmp_path / "a.mp4", "row 2: video")


def test_a_video_of_more_than_an_hour_is_refused_at_its_first_late_frame(tmp_path):
    with pytest.raises(ConfigError, match=r"^a\.mkv: more than .* 3600 seconds; cut it into parts$"):
        film(tmp_path / "a.mkv", [0, 1, 3601])


def test_without_decoding_only_the_first_frame_is_read(tmp_path):
    film(tmp_path / "a.mp4", [0, 1, 2, 3])
    found, decoded = prompt_video(tmp_path / "a.mp4", "a.mp4")
    assert prompt_video(tmp_path / "a.mp4", "a.mp4", decode=False) == (found, decoded // 4)
    carried = PromptVideo("cell", "", (tmp_path / "a.mp4").read_bytes())
    assert prompt_video(carried, "cell")[0] == PromptVideo("cell", found.digest, carried.content)
    with pytest.raises(ConfigError, match=r"^cell: cut off: it has 900 bytes"):
        prompt_video(PromptVideo("cell", "", carried.content[:900]), "cell")

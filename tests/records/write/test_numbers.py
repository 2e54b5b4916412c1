"""Tests summary, images, files of videos and sound, memory, and the warning of a vanished gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
import soundfile
from PIL import Image

from omni_async.control.rounds import Round
from omni_async.media import Media
from omni_async.records.write import images, usage
from omni_async.records.write.images import Typeface, _wrap, caption, image_grid, tile, write_media
from omni_async.records.write.summary import Counters, read_summary, write_summary
from omni_async.records.write.usage import CpuAccount, UsageSampler, family_of, pss_of
from omni_async.records.write.vanishing import GradientWatch
from omni_async.types import Prompt, Score, Span
from tests.support.configs import make_summary
from tests.support.patience import wait_for


def test_a_summary_goes_through_its_file(tmp_path: Path) -> None:
    work = (("rollout-0", "generate", 10, 20), ("trainer", "train", 15, 25), ("reward-0", "score", 15, 16))
    summary = make_summary(
        **{"images": 40, "rewards": [0.0] * 5 + [0.5] + [1.0] * 5, "staleness": [0, 1, 1], "peak_memory_bytes": 5},
        cpu_s={"rollout": 3.14159, "driver": 1.0},
        counters=Counters(admitted=6, trained=3, rejected=1, dropped=1, live=1),
        spans=[Span(*each) for each in work],
        rounds=[Round(5, 0.5), Round(0, 0.1, {"ocr": 0.1})],
        reject_reasons={"zero variance": 1},
    )
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path / "summary.json") == summary
    assert summary.cpu_s == {"rollout": 3.14, "driver": 1.0}
    assert (summary.images_per_s, summary.images_per_s_per_device) == (4.0, 2.0)
    assert summary.conserved and summary.updates == 11 and summary.overlap_fraction == pytest.approx(0.5)
    assert (summary.first_reward, summary.last_reward) == (0.0, 1.0)
    assert summary.staleness == {0: 1, 1: 2} and summary.staleness_max == 1
    assert [p.version for p in summary.validation] == [0, 5]
    assert summary.busy["trainer"]["busy"] == 0.5


@pytest.mark.parametrize("devices", [2, 0])
def test_a_summary_of_no_updates_counts_the_images_of_attempts_whose_time_is_known(devices: int) -> None:
    nothing = {"counters": Counters(admitted=1, trained=0, rejected=0, dropped=0, live=0), "devices": devices}
    summary = make_summary(**nothing, images=90, wall_before=5.0, untimed_images=60)
    assert (summary.images, summary.wall_s) == (90, 15.0)
    assert (summary.images_per_s, summary.images_per_s_per_device) == (2.0, 1.0 if devices else 2.0)
    assert summary.first_reward is None and summary.staleness_max is None and not summary.conserved
    assert make_summary(**nothing, started=20.0).images_per_s == 0.0


def test_a_grid_scales_images_and_writes_captions_below() -> None:
    red = np.full((64, 64, 3), (200, 0, 0), np.uint8)
    prompt = Prompt(index=0, text="the digit " + "very " * 60 + "unbreakable" * 20)
    text = caption(prompt, Score(value=0.5, text="größe\n"))
    assert text.startswith("reward 0.50  read 'größe\\n'\nthe digit"), "what was read is shown unchanged"
    grid = image_grid([(red, text), (red, "short"), (red, "")], columns=2)
    pixels = np.asarray(grid)
    assert grid.width == 2 * (192 + 6) + 6 and grid.height > 2 * 192
    assert (pixels[6:198, 6:198] == (200, 0, 0)).all()
    assert (pixels[200:260, 6:198].max(axis=2) > 200).any(), "a caption is drawn"
    lines = _wrap("x" * 600, Typeface(12), 192)
    assert len(lines) == 4 and lines[-1].endswith("x...")
    assert all(Typeface(12).length(line) <= 192 for line in lines)
    assert image_grid([(np.zeros((512, 1024, 3), np.uint8), "x")]).width == 384 + 12
    with pytest.raises(ValueError, match="at least one"):
        image_grid([])
    with pytest.raises(ValueError, match=r"expected a uint8 image .*float32"):
        image_grid([(np.zeros((8, 8, 3), np.float32), "x")])


def test_captions_in_other_scripts_are_drawn_and_nothing_is_a_box() -> None:
    face = Typeface(12)
    for text in ("größe, naïve", "Ελλάδα", "Привет, мир", "שלום", "→ ☃"):
        assert face.text(text) == text
        drawn = [bytes(font.getmask(one)) for font, run in face._runs(text) for one in run if one != " "]
        missing = {bytes(font.getmask("\U0010ffff")) for font, _ in face._runs(text)}
        assert drawn and missing.isdisjoint(drawn)


def test_characters_that_no_font_has_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_wide", list)
    images._fonts.cache_clear()
    try:
        assert Typeface(12).text("says 你好!") == "says U+4F60 U+597D!"
        assert Typeface(12).text("a 🚀, \x07 and \ud800") == "a [rocket], U+0007 and U+D800"
    finally:
        images._fonts.cache_clear()


def test_memory_counts_descendants_once_and_only_while_they_live() -> None:
    sampler = UsageSampler(interval_s=0.05)
    sampler.start()
    alone = pss_of(family_of(os.getpid()))
    hog = "import sys; x = bytearray(200 << 20); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == b"up\n"
        both = pss_of(family_of(os.getpid()))
        assert both - alone > 190 << 20
        wait_for(lambda: sampler.peak_bytes >= alone + (190 << 20), "the sampler measures the child")
        child.stdin.close()
    assert family_of(child.pid) == []
    sampler.stop()
    assert sampler.peak_bytes >= alone + (190 << 20)
    assert sampler.cpu_s["driver"] > 0


def test_the_proportional_size_is_read_after_growth_and_every_fifth_time(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    monkeypatch.setattr(usage, "family_of", lambda pid: [])
    sampler = UsageSampler()
    for number, resident in enumerate((100, 100, 50, 101, 102, 102, 102, 102, 102, 102)):
        monkeypatch.setattr(usage, "sum", lambda sizes, resident=resident: resident, raising=False)
        monkeypatch.setattr(usage, "pss_of", lambda family, number=number: reads.append(number) or number)
        sampler.measure()
    assert reads == [0, 4, 9] and sampler.peak_bytes == 9


def test_cpu_seconds_of_a_role_include_lost_workers_and_their_children() -> None:
    account = CpuAccount()
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint('up', flush=True); input()"
    worker = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    command: dict[str, Any] = {
        "args": [sys.executable, "-c", worker],
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
    }
    with subprocess.Popen(**command) as first, subprocess.Popen(**command) as other:
        for one in (first, other):
            assert one.stdout is not None and one.stdout.readline() == b"up\n"
        family = [psutil.Process(), *family_of(first.pid), *family_of(other.pid)]
        account.measure(family, {first.pid: "rollout"})
        for one in (first, other):
            assert one.stdin is not None
            one.stdin.close()
    before = account.by_role()
    assert before["rollout"] >= 0.2 and before["ray"] >= 0.2, "the child's seconds are its worker's"
    account.measure(family, {})
    after = account.by_role()
    assert (after["rollout"], after["ray"]) == (before["rollout"], before["ray"]), "the last seconds of the ended stay"
    assert after["driver"] >= before["driver"] > 0


# ---- videos and sound, by reading them back --------------------------------------------------------------------------


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


@pytest.mark.parametrize(("rate", "channels"), [(24_000, 2), (10_000, 1)])  # 10 kHz is none of AAC's rates
def test_a_video_with_sound_has_both_as_long_as_they_were_and_a_wav_of_the_same_numbers(
    tmp_path: Path, rate: int, channels: int
) -> None:
    time = np.arange(rate) / rate  # a second
    audio = np.stack([0.5 * np.sin(2 * np.pi * pitch * time) for pitch in (440, 880)[:channels]]).astype(np.float32)
    file, wav = write_media(Media(video=fading(25), fps=25, audio=audio, sample_rate=rate), tmp_path / "v.1")
    assert (file.name, wav.name) == ("v.1.mp4", "v.1.wav")
    samples, found = soundfile.read(wav, dtype="float32", always_2d=True)
    assert found == rate and np.array_equal(samples.T, audio)
    with av.open(str(file)) as container:
        picture, sound = container.streams.video[0], container.streams.audio[0]
        assert (picture.frames, picture.average_rate, sound.codec_context.name) == (25, 25, "aac")
        assert (sound.rate, sound.channels) == (rate if rate > 10_000 else 48_000, channels)
        assert float(sound.duration * sound.time_base) == pytest.approx(1, abs=0.001)
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(sound)], axis=1)
    loudest = np.abs(np.fft.rfft(heard[:, : sound.rate], axis=1)).argmax(axis=1)
    assert loudest == pytest.approx([440, 880][:channels], abs=2)


def test_a_file_that_cannot_be_finished_is_an_oserror_and_is_not_left(tmp_path, monkeypatch):
    def full(path: Path, *args: object) -> None:
        path.write_bytes(b"half")
        raise av.error.FFmpegError(28, "No space left on device")

    monkeypatch.setattr(images, "_write_mp4", full)
    with pytest.raises(OSError, match="No space left"):
        write_media(Media(video=fading(3), fps=8), tmp_path / "x")
    assert not [*tmp_path.iterdir()]
    image = Media(image=fading(1)[0])
    [file] = write_media(image, tmp_path / "x")
    assert file.name == "x.png" and np.array_equal(np.asarray(Image.open(file)), image.pixels), "without loss"


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


def test_a_tile_of_a_text_has_its_first_lines(tmp_path: Path) -> None:
    short, long, none = (tile(Media(text=text, finish="stop")) for text in ("4", "word " * 5000, ""))
    assert short.dtype == np.uint8 and short.shape == (28, 384, 3) and long.shape == (204, 384, 3)
    assert (short > 100).any() and (long[-20:] > 100).any() and (none > 100).sum() > (short > 100).sum()
    assert not np.array_equal(short, tile(Media(text="7", finish="stop")))
    assert image_grid([(short, "a caption"), (long, "another")]).width > 2 * 384
    assert write_media(Media(text="4", finish="stop"), tmp_path / "x") == [] == [*tmp_path.iterdir()]


# ---- a vanished gradient ---------------------------------------------------------------------------------------------


def warnings(norms: list[float], **metrics: float) -> list[tuple[int, str]]:
    watch = GradientWatch()
    found = [(n, watch.take(n, {"grad_norm": norm, **metrics})) for n, norm in enumerate(norms, start=1)]
    return [(version, text) for version, text in found if text is not None]


def test_a_gradient_that_most_of_the_newest_updates_lack_is_reported_with_its_cause() -> None:
    [(version, text)] = warnings([80, 70, 90, 75, 60, 40, 0.01, 0.02, 0.0, 0.01], accuracy=1.0, margin=24.7)
    assert version == 9, "the median of five"
    vanished = "the gradient has vanished (median norm of the last 5 updates 0.02, where it began at 75)"
    satisfied = "the preferences are satisfied (accuracy 1.00, margin 24.7), so these pairs teach nothing more"
    way_out = "stop here, give other pairs, or lower algorithm.dpo.beta"
    assert text == f"warning: update 9: {vanished}: {satisfied}; {way_out}"
    assert warnings([80, 70, 90, 75, 60, 0.0, 50, 0.0, 60, 40, 0.0, 70]) == [], "batches without a gradient"
    assert warnings([3e-5] * 20) == [], "small from the start: that is the model's scale"
    assert [version for version, _ in warnings([1.0] * 5 + [0.0] * 10 + [1.0] * 5 + [0.0] * 5)] == [8, 23]
    [(version, text)] = warnings([0.0] * 8)
    assert version == 5 and "updates 0)" in text and "hardly differ" in text
    vanishing = [1.0] * 5 + [0.0] * 5
    assert "97% of the rows are outside the clip range" in warnings(vanishing, clip_fraction=0.97)[0][1]
    assert "masks 90% of the rows" in warnings(vanishing, masked=0.9)[0][1]

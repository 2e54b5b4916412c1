"""Makes samples visible: grids of tiles with captions, and files of images, videos and sound.

A grid has the images side by side, each with its prompt, the text that a scorer read in it, and its reward. Captions
support any script: each character uses the first font that has it, or is spelled out. The first font is DejaVu Sans,
which is installed with matplotlib (Latin, Greek, Cyrillic, Arabic, Hebrew and many symbols). Fonts of East Asian
scripts follow, if the machine has any.
"""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from omni_async.config.writing import replacing
from omni_async.data.image_files import read_prompt_image
from omni_async.media import Media, evenly
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.packet import Packet

_CELL_MIN, _CELL_MAX = 192, 384
_FONT_SIZE, _LINE_HEIGHT, _BASELINE, _MAX_LINES, _PADDING = 12, 16, 12, 4, 6
_BACKGROUND, _INK = (24, 24, 27), (228, 228, 231)


def caption(prompt: Prompt, score: Score) -> str:
    """Return `reward 0.81`, then the text that was read (if the scorer reads), then the prompt."""
    read = "" if score.text is None else f"  read {score.text!r}"
    return f"reward {score.value:.2f}{read}\n{prompt.text}"


def image_grid(items: Sequence[tuple[np.ndarray, str]], columns: int | None = None) -> Image.Image:
    """Draw a grid, row by row, of (uint8 (height, width, 3) image, caption) pairs, about square by default.

    Small images are enlarged by a whole factor without smoothing, to cells wide enough for their captions; large ones
    are reduced."""
    if not items:
        raise ValueError("an image grid needs at least one image")
    font = Typeface(_FONT_SIZE)
    tiles = [_fit(array) for array, _ in items]
    columns = min(len(items), columns or math.ceil(math.sqrt(len(items))))
    width, height = max(tile.width for tile in tiles), max(tile.height for tile in tiles)
    captions = [_wrap(text, font, width) for _, text in items]
    cell_width = width + _PADDING
    cell_height = height + _LINE_HEIGHT * max(len(lines) for lines in captions) + 2 * _PADDING
    rows = math.ceil(len(items) / columns)
    grid = Image.new("RGB", (columns * cell_width + _PADDING, rows * cell_height + _PADDING), _BACKGROUND)
    draw = ImageDraw.Draw(grid)
    for i, (tile, lines) in enumerate(zip(tiles, captions, strict=True)):
        left, top = _PADDING + (i % columns) * cell_width, _PADDING + (i // columns) * cell_height
        grid.paste(tile, (left, top))
        for n, line in enumerate(lines):
            font.draw(draw, (left, top + height + 2 + n * _LINE_HEIGHT + _BASELINE), line, _INK)
    return grid


def _fit(array: np.ndarray) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"expected a uint8 image (height, width, 3), got {array.dtype} {array.shape}")
    image = Image.fromarray(array)
    if image.width < _CELL_MIN and image.height <= _CELL_MAX:  # a column of pixels would become a billion
        factor = math.ceil(_CELL_MIN / image.width)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if max(image.size) > _CELL_MAX:
        image.thumbnail((_CELL_MAX, _CELL_MAX), Image.Resampling.LANCZOS)
    return image


def _wrap(text: str, font: Typeface, width: int, most: int = _MAX_LINES) -> list[str]:
    """Wrap a text into at most `most` lines no wider than `width` pixels; the rest is cut with dots.

    Lines are broken between words, and within a word that fills more than a line (not every script has spaces)."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in font.text(" ".join(paragraph.split())).split():
            joined = f"{line} {word}" if line else word
            if line and font.length(joined) > width:
                lines.append(line)
                line = word
            else:
                line = joined
            while len(lines) <= most and font.length(line) > width:
                fitting = _fitting(line, font, width)
                lines.append(line[:fitting])
                line = line[fitting:]
        lines.append(line)
    if len(lines) > most:
        last = lines[most - 1]
        lines = [*lines[: most - 1], last[: _fitting(last, font, width - font.length("..."))] + "..."]
    return lines


def _fitting(line: str, font: Typeface, width: float) -> int:
    """Count the characters of `line` that fit into `width` pixels; at least one."""
    return max(1, bisect_right(range(1, len(line) + 1), width, key=lambda count: font.length(line[:count])))


# ---- fonts -----------------------------------------------------------------------------------------------------------

_FOLDERS = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), Path("~/.local/share/fonts"), Path("~/.fonts"))
_WIDE = ("*CJK*.[ot]t[cf]", "SourceHan*.[ot]t[cf]", "wqy*.tt[cf]", "DroidSansFallback*.ttf", "unifont*.[ot]tf")
_MOST_WIDE = 2
_NOTHING = "\U0010ffff"  # in no font: drawn as a missing character

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Typeface:
    """One size of all fonts. `text` returns a drawable text; `length` and `draw` take that text."""

    def __init__(self, size: int) -> None:
        self._fonts = _fonts(size)

    def text(self, text: str) -> str:
        """Spell out characters that no font has as `[cat face]`, if they are symbols, or as `U+4F60`."""
        parts = []
        for missing, run in groupby(text, lambda character: self._font_of(character) is None):
            characters = list(run)
            parts.append(" ".join(map(_spelled, characters)) if missing else "".join(characters))
        return "".join(parts)

    def length(self, text: str) -> float:
        """Return the width of the text in pixels."""
        return sum(font.getlength(run) for font, run in self._runs(text))

    def draw(self, draw: ImageDraw.ImageDraw, position: tuple[float, float], text: str, fill: tuple[int, ...]) -> None:
        """Draw a text of one line.

        Args:
            draw: Pillow's pen of the image.
            position: (x, y) of the left end and the baseline, in pixels.
            text: as `text` returned it.
            fill: its colour, RGB."""
        left, baseline = position
        for font, run in self._runs(text):
            anchor = "ls" if isinstance(font, ImageFont.FreeTypeFont) else None
            draw.text((left, baseline), run, font=font, fill=fill, anchor=anchor)
            left += font.getlength(run)

    def _runs(self, text: str) -> list[tuple[Font, str]]:
        """Split the text into runs of characters that one font draws."""
        runs = groupby(text, lambda character: self._font_of(character) or self._fonts[0])
        return [(font, "".join(run)) for font, run in runs]

    def _font_of(self, character: str) -> Font | None:
        return next((font for font in self._fonts if _has(font, character)), None)


@lru_cache
def _fonts(size: int) -> tuple[Font, ...]:
    matplotlib = find_spec("matplotlib")  # only locates the file: importing it takes a while
    data = Path(matplotlib.origin or "").parent / "mpl-data" if matplotlib else Path()
    dejavu = data / "fonts" / "ttf" / "DejaVuSans.ttf"
    paths = [dejavu] * dejavu.is_file() + _wide()
    return tuple(ImageFont.truetype(path, size) for path in paths) or (ImageFont.load_default(size),)


def _wide() -> list[Path]:
    folders = [folder for one in _FOLDERS if (folder := one.expanduser()).is_dir()]
    return [path for folder in folders for pattern in _WIDE for path in sorted(folder.rglob(pattern))][:_MOST_WIDE]


@lru_cache(maxsize=4096)
def _has(font: Font, character: str) -> bool:
    if character == " ":
        return True
    if not character.isprintable():
        return False
    return bytes(font.getmask(character)) != bytes(font.getmask(_NOTHING))


def _spelled(character: str) -> str:
    if unicodedata.category(character).startswith("S") and (name := unicodedata.name(character, "")):
        return f"[{name.lower()}]"
    return f"U+{ord(character):04X}"


# ---- tiles -----------------------------------------------------------------------------------------------------------

_FRAMES = 3
_WAVE_WIDTH, _WAVE_HEIGHT = 384, 96  # of a waveform
_SILENCE, _WAVE = 32, 200  # grey levels
_TEXT_WIDTH, _TEXT_LINES, _TEXT_CHARACTERS = 384, 12, 2000


def tile(media: Media) -> NDArray[np.uint8]:
    """Return an image of the media, uint8 (height, width, 3).

    A video becomes its first, middle and last frame side by side; audio alone becomes its waveform; a text alone is
    written, its first lines."""
    if media.image is not None:
        return media.pixels
    if media.video is not None:
        return np.concatenate(list(evenly(media.frames, _FRAMES)), axis=1)
    return _written(media.text) if media.text is not None else _waveform(media.waveform)


def _written(text: str) -> NDArray[np.uint8]:
    font = Typeface(_FONT_SIZE)
    lines = _wrap(text[:_TEXT_CHARACTERS], font, _TEXT_WIDTH - 2 * _PADDING, _TEXT_LINES) or ["(no text)"]
    image = Image.new("RGB", (_TEXT_WIDTH, _LINE_HEIGHT * len(lines) + 2 * _PADDING), (_SILENCE,) * 3)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        font.draw(draw, (_PADDING, _PADDING + number * _LINE_HEIGHT + _BASELINE), line, _INK)
    return np.asarray(image)


def _waveform(samples: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Draw all channels over each other: each column shows the range of values in its share of the time."""
    drawn = np.full((_WAVE_HEIGHT, _WAVE_WIDTH, 3), _SILENCE, np.uint8)
    rows = ((1 - np.nan_to_num(samples).clip(-1, 1)) / 2 * (_WAVE_HEIGHT - 1)).round().astype(int)
    for column, part in enumerate(np.array_split(rows, _WAVE_WIDTH)):
        if part.size:
            drawn[part.min() : part.max() + 1, column] = _WAVE
    return drawn


# ---- videos and sound ------------------------------------------------------------------------------------------------

_QUALITY = "18"  # constant rate factor of H.264: hard to distinguish from the original
_SOUND_RATE = 48_000  # of AAC if it does not support the audio's rate


def write_media(media: Media, path: Path) -> list[Path]:
    """Write media to `path` with the suffixes .png, .mp4 (H.264, AAC of any sound) and .wav (32-bit float).

    Returns the files; none for a text, which is in the table of samples. Raises OSError, and then leaves no partial
    file."""
    written = []
    if media.image is not None:
        written.append(path.with_name(f"{path.name}.png"))
        with _whole(written[-1]) as file:
            Image.fromarray(media.pixels).save(file, compress_level=1)
    if media.video is not None and media.fps is not None:
        written.append(path.with_name(f"{path.name}.mp4"))
        with _whole(written[-1]) as file:
            _write_mp4(file, media)
    if media.audio is not None:
        import soundfile

        written.append(path.with_name(f"{path.name}.wav"))
        with _whole(written[-1]) as file:
            soundfile.write(file, media.waveform, media.sample_rate, subtype="FLOAT", format="WAV")
    return written


def write_question(prompt: Prompt, path: Path) -> Path | None:
    """Write the first image of an answer's prompt, reduced, to `path` with the suffix -question.png.

    Returns the file; None if the prompt has no image, or it can no longer be read. Raises OSError, and then leaves no
    partial file."""
    if not prompt.images:
        return None
    try:
        image = Image.fromarray(read_prompt_image(prompt.images[0]).pixels)
    except ValueError:  # ConfigError as well
        return None
    image.thumbnail((_CELL_MAX, _CELL_MAX))
    file = path.with_name(f"{path.name}-question.png")
    with _whole(file) as unfinished:
        image.save(unfinished, compress_level=1)
    return file


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a new file to fill, which then replaces `path`. Turns a library's errors into OSError."""
    try:
        with replacing(path) as unfinished:
            yield unfinished
    except BaseException as error:
        if isinstance(error, OSError) or not isinstance(error, Exception):
            raise
        raise OSError(f"{path.name} could not be written: {error}") from error


def _write_mp4(path: Path, media: Media) -> None:
    import av

    frames, sound = media.frames, media.audio
    _, height, width, _ = frames.shape
    # H.264 stores colour at half the resolution, so both sides must be even.
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    with av.open(str(path), "w") as container:
        rate = Fraction(media.fps or 0).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"crf": _QUALITY})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        stream.codec_context.thread_count = 1
        packets = [] if sound is None else _encoded(container, np.ascontiguousarray(sound), media.sample_rate or 0)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
        container.mux(packets)


def _encoded(container: OutputContainer, sound: NDArray[np.float32], rate: int) -> list[Packet[Any]]:
    """Add an AAC stream to a file and return its packets of sound (channels, n) with `rate` samples a second."""
    import av

    known = av.codec.Codec("aac", "w").audio_rates or []
    layout = {1: "mono", 2: "stereo"}.get(len(sound), f"{len(sound)}c")
    stream = container.add_stream("aac", rate=rate if rate in known else _SOUND_RATE, layout=layout)
    frame = av.AudioFrame.from_ndarray(sound, format="fltp", layout=layout)
    frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=stream.rate)
    pieces = [*resampler.resample(frame), *resampler.resample(None)]
    return [packet for piece in [*pieces, None] for packet in stream.encode(piece)]

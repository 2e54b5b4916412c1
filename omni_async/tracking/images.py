"""Draws sample grids: images side by side, each with its prompt, the text a scorer read in it, and its reward."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from omni_async.tracking.fonts import Typeface
from omni_async.types import Prompt, Score

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
    if image.width < _CELL_MIN:
        factor = math.ceil(_CELL_MIN / image.width)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if max(image.size) > _CELL_MAX:
        image.thumbnail((_CELL_MAX, _CELL_MAX), Image.Resampling.LANCZOS)
    return image


def _wrap(text: str, font: Typeface, width: int) -> list[str]:
    """Wrap a text into at most `_MAX_LINES` lines no wider than `width` pixels; the rest is cut with dots.

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
            while len(lines) <= _MAX_LINES and font.length(line) > width:
                fitting = _fitting(line, font, width)
                lines.append(line[:fitting])
                line = line[fitting:]
        lines.append(line)
    if len(lines) > _MAX_LINES:
        last = lines[_MAX_LINES - 1]
        lines = [*lines[: _MAX_LINES - 1], last[: _fitting(last, font, width - font.length("..."))] + "..."]
    return lines


def _fitting(line: str, font: Typeface, width: float) -> int:
    """Count the characters of `line` that fit into `width` pixels; at least one."""
    return max(1, bisect_right(range(1, len(line) + 1), width, key=lambda count: font.length(line[:count])))

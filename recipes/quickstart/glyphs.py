"""Renders the images of the quickstart task: one bright digit on a dark background, 64x64.

The font is the one bundled with Pillow, so nothing is downloaded. Size, position, tilt and brightness vary a little,
enough for the VAE and the DiT to learn a distribution instead of ten images, and little enough that OCR reads every
clean glyph.
"""

from __future__ import annotations

import functools
import math
import random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

IMAGE_SIZE = 64
DIGITS = "0123456789"

_FONT_SIZES = range(46, 55)
_MAX_SHIFT_PX = 3.0
_MAX_TILT_DEGREES = 5.0
_NUM_STROKES = (2, 3)
_STROKE_WIDTHS = (4, 5, 6)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def render_digit(digit: str, rng: random.Random) -> NDArray[np.uint8]:
    """Draws ``digit`` with jitter taken from ``rng``. Returns a grey image, (64, 64) uint8."""
    background = rng.randint(0, 30)
    canvas = Image.new("L", (IMAGE_SIZE, IMAGE_SIZE), background)
    draw = ImageDraw.Draw(canvas)
    font = _font(rng.choice(_FONT_SIZES))
    left, top, right, bottom = draw.textbbox((0, 0), digit, font=font)
    x = (IMAGE_SIZE - (right - left)) / 2 - left + rng.uniform(-_MAX_SHIFT_PX, _MAX_SHIFT_PX)
    y = (IMAGE_SIZE - (bottom - top)) / 2 - top + rng.uniform(-_MAX_SHIFT_PX, _MAX_SHIFT_PX)
    draw.text((x, y), digit, font=font, fill=rng.randint(200, 255))
    tilt = rng.uniform(-_MAX_TILT_DEGREES, _MAX_TILT_DEGREES)
    return np.asarray(canvas.rotate(tilt, resample=Image.Resampling.BILINEAR, fillcolor=background))


def scribble_over(image: NDArray[np.uint8], rng: random.Random) -> NDArray[np.uint8]:
    """Crosses a (64, 64) uint8 image out with a few thick strokes as bright as its glyph, so that no reader makes it
    out."""
    canvas = Image.fromarray(image)
    draw = ImageDraw.Draw(canvas)
    middle, reach = IMAGE_SIZE / 2, IMAGE_SIZE * 0.4
    turn = rng.uniform(0, math.pi)
    for stroke in range(rng.choice(_NUM_STROKES)):
        angle = turn + stroke * math.pi / 3 + rng.uniform(-0.2, 0.2)
        x, y = middle + rng.uniform(-4, 4), middle + rng.uniform(-4, 4)
        dx, dy = reach * math.cos(angle), reach * math.sin(angle)
        draw.line((x - dx, y - dy, x + dx, y + dy), fill=int(image.max()), width=rng.choice(_STROKE_WIDTHS))
    return np.asarray(canvas)


def render_dataset(num_images: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Renders ``num_images`` random digits. Returns images (N, 64, 64) uint8 and their labels (N,) int64."""
    rng = random.Random(seed)
    labels = [rng.randrange(len(DIGITS)) for _ in range(num_images)]
    images = np.stack([render_digit(DIGITS[label], rng) for label in labels])
    return images, np.asarray(labels, dtype=np.int64)

"""Draws the images of this recipe, two noisy digits each, and writes its prompts.

The font is bundled with Pillow, so nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from omni_async.config.writing import write_atomic

TEXT = "Read the digits."
SIDE, HALF = 56, 28  # pixels: an image has two digits, each 28 wide
GREY, CONTRAST = 128, 32  # a glyph is as much brighter than the mean as the background is darker


def random_number(rng: random.Random) -> str:
    """Returns two digits."""
    return f"{rng.randrange(100):02d}"


def draw(number: str, noise: float, rng: random.Random) -> Image.Image:
    """Draws two digits, each in its half, and adds Gaussian noise of `noise` times the contrast."""
    glyphs = Image.new("L", (SIDE, SIDE), 0)
    font = ImageFont.load_default(36)
    pen = ImageDraw.Draw(glyphs)
    for place, digit in enumerate(number):
        left, top, right, bottom = pen.textbbox((0, 0), digit, font=font)
        x = HALF * place + (HALF - (right - left)) / 2 - left + rng.uniform(-2, 2)
        y = (SIDE - (bottom - top)) / 2 - top + rng.uniform(-4, 4)
        pen.text((x, y), digit, font=font, fill=255)
    levels = np.random.default_rng(rng.getrandbits(63)).normal(0, noise, (SIDE, SIDE))
    pixels = GREY + CONTRAST * (np.asarray(glyphs) / 127.5 - 1 + levels)
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).convert("RGB")


def write_prompts(folder: Path, name: str, each: int, noise: float, seed: int) -> None:
    """Writes `each` images of every number from 00 to 99, and a table of prompts with the number as `target`."""
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for copy in range(each):
        for number in (f"{value:02d}" for value in range(100)):
            image = f"images/{name}_{number}_{copy}.png"
            draw(number, noise, rng).convert("L").save(folder / image, optimize=True)
            rows.append({"prompt": TEXT, "image": image, "target": number})
    write_atomic(folder / f"prompts_{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

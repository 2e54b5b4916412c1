"""Draws the images of this recipe, two noisy digits each, and writes its prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from PIL import Image

from omni_async.config.writing import write_atomic

TEXT = "Read the digits."
SIDE, HALF = 56, 28  # pixels: an image has two digits, each in its half
GREY, CONTRAST = 128, 32  # a glyph is as much brighter than the mean as the background is darker
# Seven rows of five dots for each digit; a dot is 5 pixels high and 4 wide.
_DOTS = (
    ("01110", "10001", "10011", "10101", "11001", "10001", "01110"),
    ("00100", "01100", "00100", "00100", "00100", "00100", "01110"),
    ("01110", "10001", "00001", "00110", "01000", "10000", "11111"),
    ("01110", "10001", "00001", "00110", "00001", "10001", "01110"),
    ("00010", "00110", "01010", "10010", "11111", "00010", "00010"),
    ("11111", "10000", "11110", "00001", "00001", "10001", "01110"),
    ("00110", "01000", "10000", "11110", "10001", "10001", "01110"),
    ("11111", "00001", "00010", "00100", "01000", "01000", "01000"),
    ("01110", "10001", "10001", "01110", "10001", "10001", "01110"),
    ("01110", "10001", "10001", "01111", "00001", "00010", "01100"),
)
_GLYPHS = [np.kron([[int(dot) for dot in row] for row in rows], np.ones((5, 4))) for rows in _DOTS]


def random_number(rng: random.Random) -> str:
    """Returns two digits."""
    return f"{rng.randrange(100):02d}"


def draw(number: str, noise: float, rng: random.Random) -> Image.Image:
    """Draws two digits, each in its half, and adds Gaussian noise of `noise` times the contrast."""
    glyphs = np.zeros((SIDE, SIDE))
    for place, digit in enumerate(number):
        y, x = rng.randint(9, 12), HALF * place + rng.randint(3, 5)
        glyphs[y : y + 35, x : x + 20] = _GLYPHS[int(digit)]
    levels = np.random.default_rng(rng.getrandbits(63)).normal(0, noise, (SIDE, SIDE))
    pixels = GREY + CONTRAST * (2 * glyphs - 1 + levels)
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

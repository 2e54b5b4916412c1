"""Shows samples over time: the validation samples of every round, with the same prompts and seeds in all.

Media become data URIs in a report. Small images are shown unchanged and larger ones are reduced. A page has a bounded
number of rounds and bytes; a note reports what is left out.
"""

from __future__ import annotations

import base64
import errno
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from omni_async.commands.report.blocks import Block, Frame, Samples, Section, Strip, Text
from omni_async.commands.report.shown import Shown, tabs
from omni_async.config.reading import read_file
from omni_async.records.read.record import Grid, Run, Tile
from omni_async.types import finite

Address = Callable[[Path], str]  # the file's address for a browser; empty if it has none

_MOST_BYTES = 6_000_000  # of a run's media on a page, as files
_MOST_ROUNDS, _MOST_STRIPS = 24, 16
_MOST_PIXELS = 50_000_000  # of an image; a run's largest grid has 46 million
_MOST_DECODED = 2**29  # pixels of a run
_LARGEST = 2**26  # bytes of a file
# Pillow's errors for a damaged image, another file type, or an image made to fill the memory.
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
_KEPT_SIDE, _REDUCED_SIDE = 160, 320
_LONGEST_TEXT = 2000  # characters of a sample that is a text
_LEFT_OUT = "Some media are left out, to keep the page small; the samples folder has them."
_TYPES = {".png": "image/png", ".mp4": "video/mp4", ".wav": "audio/wav", ".webp": "image/webp"}


def samples(shown: Sequence[Shown], address: Callable[[Run], Address] | None = None) -> Section:
    """Return the section of samples over time.

    Args:
        shown: the runs.
        address: returns addresses for a run's files; by default the files become part of the page."""
    is_paired = all(any(grid.kind == "validation" for grid in one.run.grids) for one in shown)
    lead = "The same prompts and seeds in every round: what training changed."

    def one(run: Shown) -> list[Block]:
        return _one(run.run, _Embedded(run.run.folder.samples) if address is None else address(run.run))

    return Section("samples", "Samples over time", lead if is_paired else "", tabs=tabs(shown, one))


def _one(run: Run, address: Address) -> list[Block]:
    rounds = [grid for grid in run.grids if grid.kind == "validation"]
    if rounds:
        return [_strips(run, rounds, address)]
    grids = [grid for grid in run.grids if grid.kind == "train" and run.is_there(grid.image)]
    if grids:
        return [_training(grids, address)]
    return [Text("No samples were written: emulated media are noise, and a young run has none yet.", tone="nothing")]


def _strips(run: Run, rounds: Sequence[Grid], address: Address) -> Samples:
    chosen = [rounds[i] for i in _evenly(len(rounds), _MOST_ROUNDS)]
    keyed = [_by_prompt(grid) for grid in chosen]
    keys = [*dict.fromkeys(key for tiles in keyed for key in tiles)]
    kept = [keys[i] for i in _evenly(len(keys), _MOST_STRIPS)]
    means = {line["update"]: finite(line["validation/reward"]) for line in run.rounds}
    strips, sides, full = [], list[int](), False
    for key in kept:
        frames = []
        for grid, tiles in zip(chosen, keyed, strict=True):
            tile = tiles.get(key)
            frame = Frame(grid.version) if tile is None else _frame(grid.version, tile, address)
            full |= tile is not None and not frame.src and frame.medium != "text"
            frames.append(frame)
            if tile is not None and tile.image is not None:
                sides.append(_side(tile.image, run.folder.samples))
        asked = next((tiles[key].question for tiles in keyed if key in tiles and tiles[key].question), None)
        strips.append(Strip(key[0], key[1], frames, "" if asked is None else address(asked)))
    left = []
    if len(chosen) < len(rounds):
        left.append(f"{len(chosen)} of {len(rounds)} rounds")
    if len(kept) < len(keys):
        left.append(f"{len(kept)} of {len(keys)} samples")
    note = f"Shown: {' and '.join(left)}, evenly apart. " if left else ""
    note += _LEFT_OUT if full else ""
    versions = [grid.version for grid in chosen]
    values = [means.get(version) for version in versions]
    counted = {one.version: f" over {one.scored} of {one.asked} samples" for one in run.validation if one.is_incomplete}
    over = [counted.get(version, "") for version in versions]
    small = 0 < max(sides, default=0) <= _KEPT_SIDE
    return Samples("samples", versions, strips, values, over, pixelated=small, note=note.strip())


def _evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, evenly spaced, including the first and the last."""
    if count <= most:
        return [*range(count)]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _by_prompt(grid: Grid) -> dict[tuple[str, str | None, int], Tile]:
    """Return the tiles by prompt, target, and number within the prompt: each tile has its own noise."""
    times: Counter[tuple[str, str | None]] = Counter()
    found = {}
    for tile in grid.tiles:
        same = (tile.prompt, tile.target)
        found[(*same, times[same])] = tile
        times[same] += 1
    return found


def _training(grids: Sequence[Grid], address: Address) -> Samples:
    """Return the grids of training samples; without validation, prompts and noise differ between updates."""
    chosen = [grids[i] for i in _evenly(len(grids), _MOST_ROUNDS)]
    frames = [Frame(grid.version, address(grid.image)) for grid in chosen]
    note = "Training samples: prompts and noise differ from update to update. With a validation section they would not."
    versions = [grid.version for grid in chosen]
    if not all(frame.src for frame in frames):
        note = f"{note} {_LEFT_OUT}"
    strip = Strip("training samples", None, frames)
    return Samples("samples", versions, [strip], [None] * len(versions), [""] * len(versions), paired=False, note=note)


def _frame(version: int, tile: Tile, address: Address) -> Frame:
    reward = finite(tile.row.get("reward"))
    for path, medium in ((tile.video, "video"), (tile.image, "image"), (tile.audio, "audio")):
        if path is not None and (src := address(path)):
            return Frame(version, src, medium, reward)  # type: ignore[arg-type]
    if tile.text is not None:
        return Frame(version, medium="text", reward=reward, text=tile.text[:_LONGEST_TEXT])
    return Frame(version, reward=reward)


def _side(path: Path, samples: Path) -> int:
    """Return the longer side of an image; 0 for a file that is no image."""
    try:
        with _opened(path, samples) as image:
            return max(image.size)
    except _UNREADABLE:
        return 0


def _opened(path: Path, samples: Path) -> Image.Image:
    """Open an image of a run. Raises one of `_UNREADABLE` if the file is no image, or too large to decode."""
    image = Image.open(io.BytesIO(read_file(path, _LARGEST, within=samples)), formats=("PNG",))
    # A run writes RGB. For any other mode, Pillow holds two copies while it reduces the image.
    if image.width * image.height * (1 if image.mode == "RGB" else 2) > _MOST_PIXELS:
        image.close()
        raise ValueError(f"{path.name} has {image.width} x {image.height} pixels")
    return image


class _Embedded:
    """Turns files of a run into data URIs, up to a number of bytes and of decoded pixels."""

    def __init__(self, samples: Path) -> None:
        self._samples = samples
        self._left = _MOST_BYTES
        self._pixels = _MOST_DECODED

    def __call__(self, path: Path) -> str:
        try:
            kind, content = self._content(path)
        except _UNREADABLE:
            return ""
        self._left -= len(content)
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"

    def _content(self, path: Path) -> tuple[str, bytes]:
        """Return a file's media type and bytes; large images are reduced. Raises OSError if they do not fit."""
        if path.suffix == ".png":
            with _opened(path, self._samples) as image:
                if max(image.size) > _KEPT_SIDE:
                    return _TYPES[".webp"], self._reduced(image, path)
        return _TYPES[path.suffix], read_file(path, self._left, within=self._samples)

    def _reduced(self, image: Image.Image, path: Path) -> bytes:
        self._pixels -= image.width * image.height
        if self._pixels < 0:
            raise OSError(errno.EFBIG, "too many pixels", str(path))
        side = 1280 if path.stem.count("-") == 1 else _REDUCED_SIDE  # a grid of many
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.convert("RGB").save(file, "WEBP", quality=80)
        if file.tell() > self._left:
            raise OSError(errno.EFBIG, "too many bytes", str(path))
        return file.getvalue()

"""Draws captions in any script: each character by the first font that has it, or spelled out.

The first font is DejaVu Sans, which is installed with matplotlib (Latin, Greek, Cyrillic, Arabic, Hebrew and many
symbols), then any fonts of East Asian scripts that the machine has.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from PIL import ImageDraw, ImageFont

_FOLDERS = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), Path("~/.local/share/fonts"), Path("~/.fonts"))
_WIDE = ("*CJK*.[ot]t[cf]", "SourceHan*.[ot]t[cf]", "wqy*.tt[cf]", "DroidSansFallback*.ttf", "unifont*.[ot]tf")
_MOST_WIDE = 2
_NOTHING = "\U0010ffff"  # no font has it: drawn as a missing character

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Typeface:
    """One size of all fonts. `text` turns a text into one that can be drawn; `length` and `draw` take the result."""

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

    def draw(
        self, draw: ImageDraw.ImageDraw, position: tuple[float, float], text: str, fill: tuple[int, int, int]
    ) -> None:
        """Draw the text. `position`: left end and baseline."""
        left, baseline = position
        for font, run in self._runs(text):
            draw.text(
                (left, baseline),
                run,
                font=font,
                fill=fill,
                anchor="ls" if isinstance(font, ImageFont.FreeTypeFont) else None,
            )
            left += font.getlength(run)

    def _runs(self, text: str) -> list[tuple[Font, str]]:
        """Split the text into runs of characters that one font draws."""
        found = ((self._font_of(character) or self._fonts[0], character) for character in text)
        return [
            (font, "".join(character for _, character in run)) for font, run in groupby(found, lambda pair: pair[0])
        ]

    def _font_of(self, character: str) -> Font | None:
        return next((font for font in self._fonts if _has(font, character)), None)


@lru_cache
def _fonts(size: int) -> tuple[Font, ...]:
    paths = [path for path in (_dejavu(), *_wide()) if path is not None]
    return tuple(ImageFont.truetype(path, size) for path in paths) or (ImageFont.load_default(size),)


def _dejavu() -> Path | None:
    spec = find_spec("matplotlib")  # its file alone: importing it takes a while
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return path if path.is_file() else None


def _wide() -> list[Path]:
    folders = [folder.expanduser() for folder in _FOLDERS]
    found = [
        path for folder in folders if folder.is_dir() for pattern in _WIDE for path in sorted(folder.rglob(pattern))
    ]
    return found[:_MOST_WIDE]


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

"""Finds, checks and reads image files that a user names: those of preference pairs and of prompts.

Errors are a ConfigError of one line that begins with `where`. Pillow is imported when an image is opened.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omni_async.config import ConfigError
from omni_async.config.reading import read_file
from omni_async.media import Media
from omni_async.types import PromptImage

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

_FORMATS = ("PNG", "JPEG", "WEBP")  # named, so that no bytes reach Pillow's rarer decoders
_MAX_PIXELS = 64_000_000
MAX_IMAGE_BYTES = 2**28  # of an encoded image
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # of EXIF data: rows are columns


def find_image(folder: Path, text: str, where: str, whose: str) -> Path:
    """Return the image file that a user's file names.

    Args:
        folder: resolved; the path is relative to it.
        text: the path, as it was written.
        where: the place that names it, with which an error begins.
        whose: the folder's owner in errors, such as `the parquet's`.

    Raises:
        ConfigError: it is no path or no file, leads out of the folder, by `..` or by a link, or has over 256 MiB."""
    shown = repr(text[:200])
    try:
        file = (folder / text).resolve()
        inside = not Path(text).is_absolute() and file.is_relative_to(folder)
        exists = inside and file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a name too long, links in a circle
        why = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"{where}: {shown} is no usable path: {why}") from None
    if not inside:
        raise ConfigError(
            f"{where}: {shown} leads out of {whose} folder; expected a path relative to it, to a file inside"
        )
    if not exists:
        raise ConfigError(f"{where}: no such file: {shown}")
    if (size := file.stat().st_size) > MAX_IMAGE_BYTES:
        raise ConfigError(f"{where}: {shown} has {size} bytes, at most {MAX_IMAGE_BYTES} are decoded")
    return file


def read_image(source: Path | io.BytesIO, where: str) -> Media:
    """Decode an image: uint8 (3, height, width) RGB in its own size, upright as its EXIF data say.

    Of an animation it is the first frame. Refuses what cannot be decoded or has more than 64 million pixels."""
    import numpy as np
    from PIL import ImageOps

    def decoded(image: Image) -> Media:
        pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        return Media(image=np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    return _opened(source, where, decoded)


def prompt_image(file: Path, where: str, decode: bool = True) -> PromptImage:
    """Check that a file is an image, and describe it.

    Args:
        file: found by `find_image`.
        where: the place that names it, with which an error begins.
        decode: read all of its data, a JPEG at an eighth of its size; or its header and checksums alone.

    Raises:
        ConfigError: it cannot be read, or is no image."""
    try:
        content = read_file(file, MAX_IMAGE_BYTES)
    except OSError as error:
        raise ConfigError(f"{where}: {file.name} cannot be read: {error.strerror or error}") from None
    _opened(io.BytesIO(content), where, lambda image: image.verify())  # a PNG's checksums, which decoding passes over
    if decode:
        _opened(io.BytesIO(content), where, _read_to_the_end)
    return PromptImage(str(file), _digest(content))


def image_size(image: PromptImage) -> tuple[int, int]:
    """Return the width and height in pixels of a prompt's image, upright. ValueError as of `read_prompt_image`."""

    def upright(opened: Image) -> tuple[int, int]:
        width, height = opened.size
        return (height, width) if opened.getexif().get(_ORIENTATION) in _TURNED else (width, height)

    return _opened(Path(image.path) if image.content is None else io.BytesIO(image.content), image.path, upright)


def _read_to_the_end(image: Image) -> None:
    """Decode all data of an image: a JPEG or WebP has no checksums that show a missing end."""
    image.draft("RGB", (1, 1))  # without an effect on other formats
    image.load()


def read_prompt_image(image: PromptImage) -> Media:
    """Decode a prompt's image, as `read_image` does.

    ValueError if the file is gone, or another one than when the run began."""
    return read_image(io.BytesIO(encoded_bytes(image)), image.path)


def encoded_bytes(image: PromptImage) -> bytes:
    """Return the bytes of a prompt's image, not decoded, with the errors of `read_prompt_image`."""
    if image.content is not None:
        return image.content
    try:
        content = Path(image.path).read_bytes()
    except OSError as error:
        raise ValueError(f"the prompt's image {image.path} cannot be read: {error.strerror or error}") from None
    if _digest(content) != image.digest:
        raise ValueError(f"the prompt's image {image.path} has changed since the run began")
    return content


def drawn_image(media: Media, name: str) -> PromptImage:
    """Return an image that was drawn as one that a prompt carries, without loss.

    Args:
        media: has an image.
        name: what it is, for errors."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(media.pixels).save(buffer, "PNG", compress_level=1)
    return carried_image(buffer.getvalue(), name)


def carried_image(content: bytes, name: str) -> PromptImage:
    """Return an encoded image, which nothing has looked at yet, as one that a prompt carries.

    Args:
        content: what the bytes of its file would be.
        name: what it is, for errors."""
    return PromptImage(name, _digest(content), content)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _opened(source: Path | io.BytesIO, where: str, use: Callable[[Any], T]) -> T:
    """Open an image, decoding nothing, and return what `use` makes of it."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(source, formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:
                pixels = f"{width} x {height} pixels"
                raise ConfigError(f"{where}: the image has {pixels}, at most {_MAX_PIXELS} are decoded")
            if image.mode[0] in "IF":
                expected = "expected 8 bits a channel, which more would be cut off to"
                raise ConfigError(f"{where}: the image has mode {image.mode}; {expected}")
            return use(image)
    except ConfigError:
        raise
    except UnidentifiedImageError:
        raise ConfigError(f"{where}: not a PNG, JPEG or WebP image") from None
    except Exception as error:  # noqa: BLE001 (decoders raise any exception on foreign bytes)
        raise ConfigError(f"{where}: the image cannot be decoded: {type(error).__name__}: {one_line(error)}") from None

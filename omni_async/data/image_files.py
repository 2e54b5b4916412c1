"""Finds, checks and reads image files that a user names, in preference pairs and prompts.

Errors are a ConfigError of one line that begins with `where`. Pillow is imported when an image is opened.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from omni_async.config import ConfigError
from omni_async.config.reading import OutsideError, read_file
from omni_async.data.image_bytes import reduced
from omni_async.media import Media
from omni_async.types import PromptFile, PromptImage

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

_FORMATS = ("PNG", "JPEG", "WEBP")  # a fixed list, so that no bytes reach Pillow's rarer decoders
_MAX_PIXELS = 64_000_000
MAX_IMAGE_BYTES = 2**28  # of an encoded image
# Pillow's methods that turn an image upright, by its EXIF orientation; the last four exchange rows and columns.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def find_image(folder: Path, text: str, where: str, whose: str, root: Path | None = None) -> Path:
    """Return the image file that a user's file names.

    Args:
        folder: resolved; the path is relative to it.
        text: the path, as it was written.
        where: the place that names it; the beginning of an error.
        whose: the folder's owner in errors, such as `the parquet's`.
        root: the folder that the path must not leave, links included; None: `folder`.

    Raises:
        ConfigError: it is no path or no file, leads out of the folder (by `..` or a link), or exceeds 256 MiB."""
    shown = repr(text[:200])
    try:
        file = (folder / text).resolve()
        inside = not Path(text).is_absolute() and file.is_relative_to(root or folder)
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


def read_image(source: Path | bytes | memoryview, where: str, within: Path | None = None) -> Media:
    """Decode an image: uint8 (3, height, width) RGB at its own size, turned upright by its EXIF data.

    Decodes the first frame of an animation. Refuses undecodable images and images of more than 64 million pixels.

    Args:
        source: a file, or the bytes of one.
        where: the place that names it; the beginning of an error.
        within: a folder that the file must not leave, links included."""
    import numpy as np
    from PIL import Image

    def decoded(image: Image.Image, orientation: int) -> Media:
        image = image.convert("RGB")
        if orientation in _TURNS:
            image = image.transpose(Image.Transpose(_TURNS[orientation]))
        return Media(image=np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))

    return opened_image(content_of(source, where, within), where, decoded)


def prompt_image(file: Path | PromptImage, where: str, decode: bool = True, within: Path | None = None) -> PromptImage:
    """Check that a file is an image, and describe it.

    Args:
        file: found by `find_image`, or a carried image.
        where: the place that names it; the beginning of an error.
        decode: decode all of its data (a JPEG at an eighth of its size); otherwise only check header and checksums.
        within: a folder that the file must not leave, links included.

    Raises:
        ConfigError: it cannot be read, or is no image."""
    content = content_of(file if isinstance(file, Path) else file.content or b"", where, within)
    opened_image(content, where, lambda image, _: image.verify())  # a PNG's checksums, which decoding ignores
    if decode:
        opened_image(content, where, lambda image, _: _read_to_the_end(image))
    return PromptImage(str(file), digest_of(content)) if isinstance(file, Path) else carried_image(content, file.path)


def image_size(image: PromptImage) -> tuple[int, int]:
    """Return an upright prompt image's width and height in pixels. Raises ValueError as `read_prompt_image` does."""

    def upright(opened: Image, orientation: int) -> tuple[int, int]:
        width, height = opened.size
        return (height, width) if orientation > 4 else (width, height)

    content = content_of(Path(image.path), image.path) if image.content is None else image.content
    return opened_image(content, image.path, upright)


def _read_to_the_end(image: Image) -> None:
    """Decode all data of an image: a JPEG or WebP has no checksums that reveal a missing end."""
    image.draft("RGB", (1, 1))  # without an effect on other formats
    image.load()


def read_prompt_image(image: PromptImage) -> Media:
    """Decode a prompt's image, as `read_image` does.

    Raises ValueError if the file is gone, or has changed since the run began."""
    return read_image(encoded_bytes(image), image.path)


def encoded_bytes(file: PromptFile) -> bytes:
    """Return the encoded bytes of a prompt's file, with the errors of `read_prompt_image`."""
    if file.content is not None:
        return file.content
    try:
        content = read_file(file.path, MAX_IMAGE_BYTES)
    except OSError as error:
        raise ValueError(f"the prompt's {file.part} {file.path} cannot be read: {error.strerror or error}") from None
    if digest_of(content) != file.digest:
        raise ValueError(f"the prompt's {file.part} {file.path} has changed since the run began")
    return content


def drawn_image(media: Media, name: str) -> PromptImage:
    """Return a generated image as a prompt image, without loss.

    Args:
        media: has an image.
        name: its description in errors."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(media.pixels).save(buffer, "PNG", compress_level=1)
    return carried_image(buffer.getvalue(), name)


def carried_image(content: bytes, name: str) -> PromptImage:
    """Return an encoded image, not yet checked, as a prompt image.

    Args:
        content: the bytes that its file would have.
        name: its description in errors."""
    return PromptImage(name, digest_of(content), content)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def content_of(source: Path | bytes | memoryview, where: str, within: Path | None = None) -> bytes:
    """Return the bytes of a file that a user names, at most 256 MiB. A ConfigError begins with `where`."""
    if not isinstance(source, Path):
        return bytes(source)
    try:
        return read_file(source, MAX_IMAGE_BYTES, within)
    except OutsideError:
        raise ConfigError(f"{where}: {source.name!r} leads out of its folder; copy the file into it") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"{where}: {source.name} cannot be read: {why}") from None


def opened_image(content: bytes, where: str, use: Callable[[Image, int], T]) -> T:
    """Open an image without decoding it, and return `use(image, orientation)`; the EXIF orientation is 1 to 8.

    Pillow gets neither EXIF data nor profiles, texts and later frames of a PNG.

    Raises:
        ConfigError: it is no PNG, JPEG or WebP, has more than 64 million pixels, or `use` fails."""
    from PIL import Image, UnidentifiedImageError

    try:
        content, orientation = reduced(content)
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:
                pixels = f"{width} x {height} pixels"
                raise ConfigError(f"{where}: the image has {pixels}, at most {_MAX_PIXELS} are decoded")
            if image.mode[0] in "IF":
                expected = "expected 8 bits a channel, which more would be cut off to"
                raise ConfigError(f"{where}: the image has mode {image.mode}; {expected}")
            return use(image, orientation)
    except ConfigError:
        raise
    except UnidentifiedImageError:
        raise ConfigError(f"{where}: not a PNG, JPEG or WebP image") from None
    except Exception as error:  # noqa: BLE001 (decoders raise any exception on foreign bytes)
        raise ConfigError(f"{where}: the image cannot be decoded: {type(error).__name__}: {one_line(error)}") from None

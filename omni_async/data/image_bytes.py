"""Reduces an encoded image to the parts that its pixels need, so that no decoder reads other parts.

A few bytes of EXIF data can expand to gigabytes in Pillow: its parser copies every entry, and runs while Pillow opens a
JPEG. Profiles, comments and later frames of a PNG are dropped, too. The number of parts has a bound. Pure Python,
linear in the bytes.
"""

from __future__ import annotations

_MOST_PARTS = 2**17  # chunks of a PNG or WebP, markers of a JPEG: with writers' 8 KiB a chunk, 1 GiB
_MOST_FRAMES = 2**14  # chunks of a WebP; its decoder lists all of them before the first frame
_MOST_SCANS = 64  # of a progressive JPEG: each is a pass over all pixels, however few bytes it has
_PNG = b"\x89PNG\r\n\x1a\n"
_OF_PNG = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_SCAN, _END, _EXIF, _COMMENT = 0xDA, b"\xff\xd9", b"Exif\0\0", 0xFE
_APPLICATION = {*range(0xE1, 0xEE), 0xEF}  # of a JPEG; without JFIF (0xE0) and Adobe (0xEE), which define the colours


def reduced(content: bytes) -> tuple[bytes, int]:
    """Return the image without the parts that its pixels do not need, and its EXIF orientation, 1 to 8.

    Returns any other format than PNG, JPEG and WebP unchanged. Raises ValueError if the image has too many parts."""
    if content.startswith(_PNG):
        return _png(content)
    if content.startswith(b"\xff\xd8"):
        return _jpeg(content)
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return content, _webp_orientation(content)
    return content, 1


def _png(content: bytes) -> tuple[bytes, int]:
    kept, place, exif = [_PNG], len(_PNG), b""
    for _ in range(_MOST_PARTS):
        kind = content[place + 4 : place + 8]
        end = place + 12 + int.from_bytes(content[place : place + 4])
        last = kind == b"IEND" or end > len(content)  # the decoder reports cut-off data
        if kind in _OF_PNG or last:
            kept.append(content[place:end])
        elif kind == b"eXIf":
            exif = content[place + 8 : end - 4]
        if last:
            return b"".join(kept), _orientation(exif)
        place = end
    raise _too_many(_MOST_PARTS)


def _jpeg(content: bytes) -> tuple[bytes, int]:
    kept, place, exif = [content[:2]], 2, b""
    for _ in range(_MOST_PARTS):
        place = content.find(b"\xff", place)
        if place < 0 or place + 4 > len(content):
            return b"".join(kept), 1
        marker = content[place + 1]
        if marker == _SCAN:
            break
        if marker in (0, 1, 0xFF) or 0xD0 <= marker <= 0xD9:  # filling, and markers without content
            place += 1 + (marker != 0xFF)
            continue
        end = place + 2 + max(2, int.from_bytes(content[place + 2 : place + 4]))
        if marker == 0xE1 and not exif and content.startswith(_EXIF, place + 4):
            exif = content[place + 4 : end]
        if marker not in _APPLICATION and marker != _COMMENT:
            kept.append(content[place:end])
        place = end
    else:
        raise _too_many(_MOST_PARTS)
    # In a scan no two bytes look like a marker. Data after the image, such as a video, are not decoded.
    end = content.find(_END, place)
    kept.append(content[place:] if end < 0 else content[place : end + 2])
    if kept[-1].count(bytes([0xFF, _SCAN])) > _MOST_SCANS:
        raise ValueError(f"more than {_MOST_SCANS} scans")
    return b"".join(kept), _orientation(exif)


def _webp_orientation(content: bytes) -> int:
    place, exif = 12, b""
    for _ in range(_MOST_FRAMES):
        if place + 8 > len(content):
            return _orientation(exif)
        end = place + 8 + int.from_bytes(content[place + 4 : place + 8], "little")
        if content.startswith(b"EXIF", place):
            exif = content[place + 8 : end]
        place = end + end % 2
    raise _too_many(_MOST_FRAMES)


def _orientation(exif: bytes) -> int:
    tiff = exif.removeprefix(_EXIF)
    order = {b"II": "little", b"MM": "big"}.get(tiff[:2])
    if order is None:
        return 1

    def number(place: int, size: int) -> int:
        return int.from_bytes(tiff[place : place + size], order)  # type: ignore[arg-type]

    start = number(4, 4) + 2
    for entry in range(start, min(start + 12 * number(start - 2, 2), len(tiff) - 9), 12):
        if number(entry, 2) == 0x0112:
            found = number(entry + 8, 2)
            return found if 1 <= found <= 8 else 1
    return 1


def _too_many(most: int) -> ValueError:
    return ValueError(f"more than {most} parts")

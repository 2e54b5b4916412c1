"""Damages files of run folders: each kind of damage is a function of a path and a generator of random numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import xxhash
import yaml

from omni_async.checkpoint.folders import MANIFEST_FILE

Damage = Callable[[Path, random.Random], None]

_LARGEST_SIGNED = 2**26
_RAW = "@@raw@@"
# In place of any value, as JSON or nearly so. OUTSIDE becomes the path of a file out of the run folder.
VALUES = (
    *("null", "true", "-1", "0", "0.5", "1e160", "1e308", "-1e308", "1e-320", "1e999", "NaN", "Infinity", "-Infinity"),
    *(f"{2**31}", f"{2**63 - 1}", f"{2**63}", f"{-(2**63)}", f"1{'0' * 300}", f"1{'0' * 400}", "9" * 5000),
    *('""', f'"{"x" * 100_000}"', r'"\u0000\u001b[2J\nforged line"', r'"\ud800"', '"[/red]"', '"=1+1"', '"nan"'),
    *('"../../etc/passwd"', '"/etc/passwd"', '"OUTSIDE/secret.png"', '"../../outside/secret.png"', '"file:///etc"'),
    *("[]", "{}", "[" * 500 + "]" * 500, "[" * 100_000, f"[{','.join(['null'] * 10_000)}]", '{"a": {"b": [1, "x"]}}'),
)
_BOMB = "".join(f"k{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]\n" for n in range(10))


# ---- any file --------------------------------------------------------------------------------------------------------


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        if content:
            content[rng.randrange(min(len(content), rng.choice((64, 2**30))))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def double(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() * rng.choice((2, 3)))


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(rng.choice((1, 8, 100, 10_000))))


def not_utf8(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    at = rng.randrange(len(content) + 1)
    path.write_bytes(content[:at] + rng.choice((b"\xff\xfe", b"\xed\xa0\x80", b"\0\0", b"\xc3")) + content[at:])


def huge(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((2**32, 2**40)))  # takes no room on the disk


def swapped(path: Path, rng: random.Random) -> None:
    others = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    if others:
        path.write_bytes(rng.choice(others).read_bytes())


def in_the_future(path: Path, rng: random.Random) -> None:
    when = rng.choice((2**40, 2**33, 0, -(2**31)))
    os.utime(path, (when, when))


# ---- other kinds, and names ------------------------------------------------------------------------------------------


def delete(path: Path, rng: random.Random) -> None:
    remove(path)


def a_folder(path: Path, rng: random.Random) -> None:
    remove(path)
    path.mkdir()


def a_fifo(path: Path, rng: random.Random) -> None:
    remove(path)
    os.mkfifo(path)


def a_socket(path: Path, rng: random.Random) -> None:
    remove(path)
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{here}/{path.name}")  # nobody listens
    os.close(here)


def a_link(path: Path, rng: random.Random) -> None:
    outside = outside_of(path)
    inside = path.suffix.lstrip(".") or "txt"
    kept = outside / f"secret.{inside}"
    if path.is_file() and not kept.exists():
        kept.write_bytes(path.read_bytes())
    elif path.is_dir():
        kept = outside
    remove(path)
    path.symlink_to(rng.choice((kept, Path(os.path.relpath(kept, path.parent)))))


def a_device(path: Path, rng: random.Random) -> None:
    remove(path)
    path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full", "/dev/tty", "/proc/self/mem", "/dev/stdin")))


def a_dead_link(path: Path, rng: random.Random) -> None:
    remove(path)
    path.symlink_to(rng.choice((path.name, "gone", "..", ".", str(outside_of(path) / "made"), f"x{'y' * 200}")))


def renamed(path: Path, rng: random.Random) -> None:
    stem, suffix = path.stem, path.suffix
    odd = (f"{stem}\n\x1b[2J{suffix}", f"{'x' * 240}{suffix}", f"{stem}\udcff{suffix}", f"update-{'9' * 30}")
    path.rename(path.with_name(rng.choice((*odd, f"{stem[:-1]}9{suffix}", path.name.upper(), f".{path.name}.old"))))


def crowded(path: Path, rng: random.Random) -> None:
    for number in range(2000):
        (path / f"{rng.choice(('update-', 'train-', 'x'))}{number:06d}{rng.choice(('', '.png', '.jsonl'))}").touch()


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def outside_of(path: Path) -> Path:
    """Return the folder next to everything damaged. Nothing may write to it or be read from it."""
    return next(folder / "outside" for folder in path.parents if (folder / "outside").is_dir())


# ---- JSON, lines of it, YAML -----------------------------------------------------------------------------------------


def a_value(path: Path, rng: random.Random) -> None:
    _edit(path, rng, _replace_one)


def a_key(path: Path, rng: random.Random) -> None:
    _edit(path, rng, _change_key)


def long_line(path: Path, rng: random.Random) -> None:
    filler = rng.choice((b"x", b"\0", b"9", b"[", b" ", b'{"a":', b"null,"))
    with path.open("ab") as file:
        file.write(rng.choice((b'{"update": 1, "text": "', b"", b"[")))
        for _ in range(100):
            file.write(filler * (10**6 // len(filler)))


def many_lines(path: Path, rng: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True) or [b"{}\n"]
    with path.open("ab") as file:
        file.write(rng.choice((b"{}\n", b"\n", b"null\n", b"[]\n", min(lines, key=len))) * 50_000)


def nested(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice((b"[", b'{"a":', b"[{", b'{"a":[')) * rng.choice((2000, 200_000)))


def alias_bomb(path: Path, rng: random.Random) -> None:
    content = path.read_text()
    path.write_text(
        rng.choice((_BOMB + content, _BOMB, f"{content}\nmore: &m [*m]\n", f"<<: &m {{run: *m}}\n{content}"))
    )


def yaml_tag(path: Path, rng: random.Random) -> None:
    tags = ("python/object/apply:os.system [true]", "binary x", "int ''", "timestamp x", "set {a}", "omap []")
    path.write_text(path.read_text().replace(": ", f": !!{rng.choice(tags)} ", 1))


def _edit(path: Path, rng: random.Random, change: Callable[[Any, random.Random], Any]) -> None:
    """Change the tree of a file, or of one of its lines; leave the file as it is if that does not decode."""
    text = path.read_text(errors="replace")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    at = rng.randrange(len(lines)) if lines else 0
    try:
        tree = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(lines[at])
    except (ValueError, IndexError):
        return
    raw = rng.choice(VALUES).replace("OUTSIDE", str(outside_of(path)))
    lines[at] = json.dumps(change(tree, rng)).replace(f'"{_RAW}"', raw).replace(f"{_RAW}", "doubled")
    path.write_text("\n".join(lines) + "\n")


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value of plain data as its parent and its key."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def _replace_one(tree: Any, rng: random.Random) -> Any:
    found = [*places(tree)]
    if not found or rng.random() < 0.02:
        return _RAW
    parent, key = rng.choice(found)
    parent[key] = _RAW
    return tree


def _change_key(tree: Any, rng: random.Random) -> Any:
    found = [(parent, key) for parent, key in places(tree) if isinstance(parent, dict)]
    if not found:
        return _RAW
    parent, key = rng.choice(found)
    match rng.randrange(4):
        case 0:
            del parent[key]
        case 1:
            parent[rng.choice((f"{key}x", "", "x" * 10_000, "\0", "../../x", "\x1b[2J", "1" * 400))] = parent.pop(key)
        case 2:
            parent[f"{_RAW}{key}"] = parent[key]
        case _:
            parent |= {f"{key}{n}": parent[key] for n in range(20_000)}
    return tree


# ---- binary formats --------------------------------------------------------------------------------------------------


def tensors_header(path: Path, rng: random.Random) -> None:
    """Let the header of a safetensors file be wrong of its length, of places, shapes or types."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    if rng.random() < 0.3:
        length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, 99_999_999))
        path.write_bytes(struct.pack("<Q", length) + content[8:])
        return
    name = rng.choice(sorted(header))
    entry = header[name]
    match rng.randrange(7):
        case 0 if "shape" in entry:
            entry["shape"] = rng.choice(([], [2**40], [2**63], [-1], [0], [1] * 100_000, entry["shape"][::-1], "x"))
        case 1 if "data_offsets" in entry:
            entry["data_offsets"] = rng.choice(([0, 0], [0, 2**40], [5, 1], [-1, 4], [2**63, 2**63 + 4], "x"))
        case 2 if "dtype" in entry:
            entry["dtype"] = rng.choice(("F64", "U8", "BOOL", "F8_E4M3", "x", "", 1))
        case 3:
            header[rng.choice((f"{name}x", "", "../../x", "x" * 10_000, "\x1b[2J"))] = header.pop(name)
        case 4:
            header["__metadata__"] = rng.choice(({"a": "x" * 10**6}, {"a": 1}, [], None))
        case 5:
            header |= {f"{name}{n}": entry for n in range(20_000)}
        case _:
            del header[name]
    packed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed + rest)


def tensors_values(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    word = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\xff" * 4, b"\0" * 4))
    path.write_bytes(content[:begin] + word * ((len(content) - begin) // 4))


@cache
def _zeros() -> bytes:
    """Return 64 MiB of zeros, compressed."""
    return zlib.compress(bytes(2**26), 9)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image_header(path: Path, rng: random.Random) -> None:
    """Let a PNG state another size or depth, or hold chunks that become far larger than they are; checksums fit."""
    content = path.read_bytes()
    body, sizes = content[33:], (0, 1, 65_000, 2**31 - 1, 2**32 - 1)
    width, height = rng.choice(sizes), rng.choice(sizes)
    match rng.randrange(4):
        case 0:
            head = _chunk(b"IHDR", struct.pack(">II", width, height) + content[24:29])
        case 1:
            head = _chunk(b"IHDR", content[16:24] + bytes(rng.choices((0, 1, 2, 3, 4, 6, 8, 16, 255), k=5)))
        case 2:
            kinds = (b"zTXt", b"Comment\0\0"), (b"iCCP", b"x\0\0"), (b"iTXt", b"x\0\1\0\0\0")
            kind, begin = rng.choice(kinds)
            head = content[8:33] + _chunk(kind, begin + _zeros())
        case _:
            head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
            body = _chunk(b"IDAT", _zeros()) * 2 + _chunk(b"IEND", b"")
    path.write_bytes(content[:8] + head + body)


def sound_header(path: Path, rng: random.Random) -> None:
    """Let a WAV or MP4 file be wrong in its first bytes, where sizes, rates and numbers of channels are."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(0, min(len(content) - 4, 120), 2)
    content[at : at + 4] = rng.choice((b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\x01\0\0\0", b"\0\0\0\x01"))
    path.write_bytes(content)


# ---- which damage fits which file ------------------------------------------------------------------------------------

_ANY: tuple[Damage, ...] = (flip, truncate, double, empty, garbage, huge, swapped, in_the_future)
_KINDS: tuple[Damage, ...] = (delete, a_folder, a_fifo, a_socket, a_link, a_device, a_dead_link, renamed)
_TEXT: tuple[Damage, ...] = (long_line, many_lines, nested, not_utf8)
_TREE: tuple[Damage, ...] = (a_value,) * 12 + (a_key,) * 4
_OF_SUFFIX: dict[str, tuple[Damage, ...]] = {
    ".json": _TEXT + _TREE * 2,
    ".jsonl": _TEXT + _TREE * 2,
    ".void": _TEXT + _TREE * 2,
    ".yaml": (alias_bomb, yaml_tag, *_TEXT, *_TREE, *_TREE),
    ".csv": _TEXT,
    ".safetensors": (tensors_header,) * 16 + (tensors_values,) * 4,
    ".png": (image_header,) * 12,
    ".wav": (sound_header,) * 8,
    ".mp4": (sound_header,) * 8,
    ".parquet": (sound_header,) * 4,
}
_NAMED = {function.__name__: function for functions in (_ANY, _KINDS, *_OF_SUFFIX.values()) for function in functions}


def damages_of(path: Path) -> tuple[Damage, ...]:
    """Return the kinds of damage that a file or a folder can take, the more important ones several times."""
    if path.is_dir():
        return (*_KINDS, crowded)
    return _ANY + _KINDS + _OF_SUFFIX.get(path.suffix, ())


def sign(folder: Path) -> None:
    """Write a manifest that fits what a checkpoint holds now, as an attacker would."""
    manifest = folder / MANIFEST_FILE
    try:
        tree = json.loads(manifest.read_text())
        names = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        sizes = {path: path.stat().st_size for path in names if path != manifest}
        if max(sizes.values(), default=0) > _LARGEST_SIGNED:
            return
        tree["files"] = {
            str(path.relative_to(folder)): {"size": size, "digest": xxhash.xxh3_128(path.read_bytes()).hexdigest()}
            for path, size in sizes.items()
        }
        manifest.write_text(json.dumps(tree))
    except (OSError, ValueError, KeyError, TypeError):
        return

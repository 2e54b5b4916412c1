"""Reads prompt files.

A `.txt` file has a prompt a line. A `.jsonl` file has an object a line with `prompt`, optionally `target` and `images`
(paths relative to the file; a single one may be given as `image`), and any other keys.

A wrong line or an invalid image stops the run before anything starts; the error has the line's number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from omni_async.config import ConfigError
from omni_async.config.decoding import decode_json
from omni_async.config.reading import TooLargeError, read_file, real_path
from omni_async.data.bad_places import BadPlaces
from omni_async.types import Prompt, PromptImage

_LARGEST_FILE = 2**30  # bytes; all prompts are held in memory
_LONGEST_LINE = 2**20  # characters, targets and other keys included: they travel with every sample
_DEEPEST = 50  # levels of nesting in a line, as in a recipe: packing a prompt into a message recurses through them

_PIXELS_DECODED = 2**30  # of images: some twenty seconds on one core; other images: only headers and checksums
_KEYS = ("prompt", "target", "image", "images")

# Returns why a scorer or the model cannot use a prompt, None if it can.
PromptCheck = Callable[[Prompt], str | None]
# Returns problems of prompts by position, given all of them; their images have been found.
WholeCheck = Callable[[Sequence[Prompt]], Mapping[int, str]]


def load_prompts(
    path: str,
    key: str,
    max_chars: int,
    checks: Sequence[PromptCheck] = (),
    whole: WholeCheck | None = None,
    within: Path | None = None,
) -> list[Prompt]:
    """Read a prompt file.

    Args:
        path: a `.txt` or `.jsonl` file.
        key: the configuration path that named the file, for messages.
        max_chars: maximum number of characters of a prompt.
        checks: requirements of scorers and the model on every prompt.
        whole: the model's requirements, checked once over all prompts that pass.
        within: the folder that the file must not leave, links included; None if the user named it.

    Raises:
        ConfigError: one line with the numbers of lines that are wrong or refused by a check, at most ten."""
    text = _read(path, key, within)
    parse = _parser(path, key)
    images = _Images(real_path(path).parent)
    prompts: dict[int, Prompt] = {}
    bad = BadPlaces("line")
    # Not splitlines(): it also cuts at U+2028 and form feeds, which may occur in a prompt, and in a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{key}: {path}:{number}"
        with bad.noting(where, number):
            if len(line) > _LONGEST_LINE:
                raise ConfigError(f"{where}: the line has {len(line)} characters, more than {_LONGEST_LINE}")
            prompt = parse(len(prompts), line, where)
            _require_text(prompt, where, max_chars)
            for check in checks:
                if (missing := check(prompt)) is not None:
                    raise ConfigError(f"{where}: {missing}")
            prompts[number] = images.found(prompt, where) if prompt.images else prompt
    if whole is not None:
        numbers = list(prompts)
        for position, problem in whole([*prompts.values()]).items():
            bad.add(f"{key}: {path}:{numbers[position]}", numbers[position], problem)
    bad.require_none()
    if not prompts:
        raise ConfigError(f"{key}: {path} holds no prompts; expected one a line")
    return [*prompts.values()]


def _read(path: str, key: str, within: Path | None) -> str:
    try:
        content = read_file(path, _LARGEST_FILE, within)
    except FileNotFoundError:
        raise ConfigError(f"{key}: no such file: {path}") from None
    except TooLargeError as error:
        raise ConfigError(f"{key}: {path} is {error.strerror}") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(f"{key}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        why = f"byte {error.object[error.start]:#04x}: {error.reason}"
        raise ConfigError(f"{key}: {path}:{number}: not UTF-8 text: {why}") from None


def _parser(path: str, key: str) -> Callable[[int, str, str], Prompt]:
    match Path(path).suffix.lower():
        case ".jsonl":
            return parse_object
        case ".txt":
            return lambda index, line, where: Prompt(index, line.strip())
        case suffix:
            expected = "expected a .txt file (a prompt a line) or .jsonl (an object a line)"
            raise ConfigError(f"{key}: {path}: {expected}, got {suffix or 'no suffix'}")


def parse_object(index: int, line: str, where: str) -> Prompt:
    """Return the prompt that a JSON object describes; its images are named, but not opened.

    Raises ConfigError, one line that begins with `where`, if the object is invalid."""
    fields = decode(line, where)
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"].strip():
        raise ConfigError(f'{where}: expected an object with a non-empty string "prompt"')
    require_plain_object(fields, line, where)
    target = fields.get("target")
    if target is not None and not isinstance(target, str):
        raise ConfigError(f"{where}: target: expected a string, got {repr(target)[:200]}")
    others = {key: value for key, value in fields.items() if key not in _KEYS}
    return Prompt(index, fields["prompt"], target, others, _named_images(fields, where))


def require_plain_object(fields: dict[str, Any], line: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, if an object nests too deeply, or its JSON repeats a key."""
    if _depth_exceeds(fields, _DEEPEST):
        raise ConfigError(f"{where}: nested more than {_DEEPEST} levels deep")
    if line.count(":") != len(fields):  # equal: every colon belongs to a present key, and nothing is nested
        _require_unique_keys(line, where)


def _named_images(fields: dict[str, Any], where: str) -> tuple[PromptImage, ...]:
    """Return the images by the names in the line, without digests: no file is opened yet."""
    if "image" in fields and "images" in fields:
        raise ConfigError(f"{where}: give image or images, not both")
    key, expected = ("image", "a path") if "image" in fields else ("images", "a list of paths")
    given = fields.get(key, [])
    names = [given] if key == "image" else given
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{where}: {key}: expected {expected}, got {repr(given)[:200]}")
    return tuple(PromptImage(name, "") for name in names)


class _Images:
    """The images that the prompts of one file name, each checked once."""

    def __init__(self, folder: Path) -> None:
        """Start empty; `folder` is the prompt file's, resolved."""
        self._folder = folder
        self._checked: dict[Path, PromptImage] = {}
        self._pixels = 0

    def found(self, prompt: Prompt, where: str) -> Prompt:
        """Return the prompt with its images found and checked. A ConfigError begins with `where`."""
        from omni_async.data.image_files import find_image, image_size, prompt_image

        files = [find_image(self._folder, one.path, f"{where}: image", "the prompt file's") for one in prompt.images]
        for file, image in zip(files, prompt.images, strict=True):
            if file not in self._checked:
                decode = self._pixels < _PIXELS_DECODED
                checked = prompt_image(file, f"{where}: image {image.path[:200]!r}", decode, self._folder)
                width, height = image_size(checked)
                self._pixels += width * height
                self._checked[file] = checked
        return replace(prompt, images=tuple(self._checked[file] for file in files))


def decode(line: str, where: str) -> Any:
    """Decode JSON from a user. Raises ConfigError, one line that begins with `where`, if it is invalid."""
    try:
        return decode_json(line.encode("utf-8", "surrogatepass"))
    except msgspec.DecodeError as error:
        why = str(error)
        if "nested" in why:
            why = f"nested more than {_DEEPEST} levels deep"
        if "truncated" in why and "\\ud" in line.lower():  # the decoder waits for the other half
            why = "half a surrogate pair (like \\ud800) is no character"
        raise ConfigError(f"{where}: not valid JSON: {why}") from None


def _depth_exceeds(value: Any, deepest: int) -> bool:
    """Return whether lists and objects are nested deeper than `deepest` levels, without recursion."""
    level: list[Any] = [value]
    for _ in range(deepest):
        items = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _require_unique_keys(line: str, where: str) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{where}: key {twice[:80]!r} given twice")
        return found

    json.loads(line, object_pairs_hook=unique)


def _require_text(prompt: Prompt, where: str, max_chars: int) -> None:
    if len(prompt.text) > max_chars:
        allowed = f"data.max_prompt_chars allows {max_chars}"
        raise ConfigError(f"{where}: the prompt has {len(prompt.text)} characters, {allowed}")
    if "\0" in prompt.text or "\0" in (prompt.target or ""):
        raise ConfigError(f"{where}: holds the character U+0000, where tokenizers may end a text; is this a text file?")

"""Reads prompt files: `.txt`, a prompt a line, or `.jsonl`, an object a line with `prompt`, optionally `target`, and any other keys.

A wrong line stops the run before anything is started, with its number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from omni_async.config import ConfigError
from omni_async.types import Prompt

_LARGEST_FILE = 2**30  # bytes; all prompts are held in memory
_LONGEST_LINE = 2**20  # characters of one, targets and other keys included: they travel with every sample


def load_prompts(path: str, key: str, max_chars: int) -> list[Prompt]:
    """`key` is the configuration path that named the file, for messages. Raises ConfigError."""
    try:
        if Path(path).stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"{key}: {path} is larger than {_LARGEST_FILE} bytes")
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{key}: no such file: {path}") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name that no file can have
        raise ConfigError(f"{key}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    parse = _parse_json if path.endswith(".jsonl") else _parse_text
    prompts: list[Prompt] = []
    # Not splitlines(): it also cuts at U+2028 and form feeds, which may stand in a prompt, and in a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{key}: {path}:{number}"
        if len(line) > _LONGEST_LINE:
            raise ConfigError(f"{where}: the line has {len(line)} characters, more than {_LONGEST_LINE}")
        prompt = parse(len(prompts), line, where)
        if len(prompt.text) > max_chars:
            raise ConfigError(f"{where}: the prompt has {len(prompt.text)} characters, data.max_prompt_chars allows {max_chars}")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{key}: {path} holds no prompts; expected one a line")
    return prompts


def _parse_text(index: int, line: str, where: str) -> Prompt:
    return Prompt(index, line.strip())


def _parse_json(index: int, line: str, where: str) -> Prompt:
    try:
        fields: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str) or not fields["prompt"].strip():
        raise ConfigError(f'{where}: expected an object with a non-empty string "prompt"')
    target = fields.get("target")
    if target is not None and not isinstance(target, str):
        raise ConfigError(f"{where}: target: expected a string, got {repr(target)[:200]}")
    return Prompt(index, fields["prompt"], target, {k: v for k, v in fields.items() if k not in ("prompt", "target")})

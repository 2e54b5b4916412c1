"""Examines a table of prompts: what a run would refuse, and what is probably not meant."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from omni_async.config import Config, ConfigError
from omni_async.config.schema import Data
from omni_async.data.bad_places import kind_of
from omni_async.data.prompts import PromptCheck, each_prompt
from omni_async.data.split import question_of
from omni_async.data.tables import open_table
from omni_async.types import Prompt

_SHOWN = 10
_PLACES = 5  # further rows with the same error that are named
_INVISIBLE = ("Cf", "Cc", "Zs", "Zl", "Zp")  # categories of Unicode: formats, controls, spaces


class Examined(NamedTuple):
    """What was found. `errors`: a line for each reason to refuse rows, at most ten; `lines`: everything else."""

    errors: list[str]
    lines: list[str]


def examined(data: Data, config: Config | None) -> Examined:
    """Examine `data.prompts`.

    Args:
        data: names the table and its columns.
        config: a recipe, whose model's requirements and tokenizers count; None: no model.

    Raises:
        ConfigError: the table, or the recipe's model, cannot be read."""
    checks: list[PromptCheck] = []
    limits = None
    if config is not None:
        from omni_async.config.load import family_of
        from omni_async.plugins.families import find_family
        from omni_async.runtime.preflight.check import inputs_check
        from omni_async.runtime.preflight.prompt_limits import PromptLimits

        try:
            family = find_family(config.model.pipeline or family_of(Path(config.model.path)))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        specs = {f"rollout.sampling {number}": spec for number, spec in enumerate(config.rollout.specs)}
        checks = [inputs_check(family, [*specs.values()])]
        limits = PromptLimits(Path(config.model.path), specs, config.rollout.engine_args.get("max_model_len"))
    table = open_table(str(data.prompts), "data.prompts")
    places: list[str] = []
    prompts: list[Prompt] = []
    errors: list[tuple[str, str]] = []
    for where, _, found in each_prompt(table, data.max_prompt_chars, checks, data.columns):
        if isinstance(found, str):
            errors.append((where, found))
        elif not _visible(found.text):
            problem = f"the prompt {ascii(found.text)[:80]} has only invisible characters; remove the row"
            errors.append((where, problem))
        else:
            places.append(where)
            prompts.append(found)
    lines = [*_counts(prompts, len(errors)), *_repeated(prompts, places), *_doubtful(prompts, places)]
    if limits is not None and prompts:
        key = "data.prompts"
        errors += [(places[position], problem) for position, problem in limits.problems(key, prompts).items()]
        for tokenizer, (most, counts) in limits.lengths(key, prompts).items():
            middle, longer = counts[len(counts) // 2], sum(count > most for count in counts)
            share = f"median {middle}, longest {counts[0]}, limit {most:g}, above it {longer}"
            lines.append(f"tokens by {tokenizer or 'tokenizer'}: {share}")
        lines += [note for note in dict.fromkeys(limits.notes) if "not counted" in note]
    if not prompts and not errors:
        errors.append((f"data.prompts: {data.prompts}", f"holds no prompts; expected one a {table.place}"))
    return Examined(_by_reason(errors), lines)


def _by_reason(errors: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each reason, with its first place and the number of the others, at most ten lines."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for where, reason in errors:
        alike.setdefault(kind_of(reason), []).append((where, reason))
    lines = []
    for (first, reason), *others in islice(alike.values(), _SHOWN):
        numbers = ", ".join(where.rpartition(":")[2].strip() for where, _ in others[:_PLACES])
        more = f" (also {len(others)} more: {numbers}{', ...' if len(others) > _PLACES else ''})" if others else ""
        lines.append(f"{first}: {reason}{more}")
    left = len(errors) - sum(map(len, islice(alike.values(), _SHOWN)))
    return [*lines, *([f"and {left} more"] if left else [])]


def _visible(text: str) -> bool:
    return any(unicodedata.category(character) not in _INVISIBLE for character in text)


def _counts(prompts: Sequence[Prompt], refused: int) -> list[str]:
    """Return lines with the numbers of prompts, targets, images and other columns."""
    total = f"readable prompts: {len(prompts)}; rows that a run would refuse: {refused}"
    if not prompts:
        return [total]
    sizes = sorted(len(prompt.text) for prompt in prompts)
    columns = Counter(name for prompt in prompts for name in prompt.metadata)
    known = {
        "target": sum(prompt.target is not None for prompt in prompts),
        "negative_prompt": sum(prompt.negative_prompt is not None for prompt in prompts),
        "images": sum(bool(prompt.images) for prompt in prompts),
        "audio": sum(bool(prompt.audio) for prompt in prompts),
        "video": sum(bool(prompt.video) for prompt in prompts),
    }
    named = [f"{name} {number}" for name, number in {**known, **dict(columns.most_common(_SHOWN))}.items() if number]
    lines = [total, f"characters: shortest {sizes[0]}, median {sizes[len(sizes) // 2]}, longest {sizes[-1]}"]
    return [*lines, f"rows that also have: {', '.join(named)}"] if named else lines


def _repeated(prompts: Sequence[Prompt], places: Sequence[str]) -> list[str]:
    """Return lines on prompts that occur again: as they are, with other columns, or in other case and spaces."""
    asked, whole = [*map(question_of, prompts)], [tuple(map(repr, prompt.content)) for prompt in prompts]
    plain = [(" ".join(text.casefold().split()), *files) for text, *files in asked]
    forms: tuple[tuple[str, Sequence[object], Sequence[object]], ...] = (
        ("rows that repeat an earlier row", whole, ()),
        ("rows that repeat a prompt with other columns", asked, whole),
        ("prompts that differ only in case or spaces", plain, asked),
    )
    lines = []
    for what, keys, distinct in forms:
        first: dict[object, int] = {}
        again = [(i, first[key]) for i, key in enumerate(keys) if first.setdefault(key, i) != i]
        again = [(i, j) for i, j in again if not distinct or distinct[i] != distinct[j]]
        if again:
            i, j = again[0]
            lines.append(f"warning: {what}: {len(again)}, the first: {_place(places[i])} as {_place(places[j])}")
    return lines


def _doubtful(prompts: Sequence[Prompt], places: Sequence[str]) -> list[str]:
    """Return lines on carriage returns within a prompt, and on invisible characters."""
    returns = [place for prompt, place in zip(prompts, places, strict=True) if "\r" in prompt.text]
    hidden = [
        (place, character)
        for prompt, place in zip(prompts, places, strict=True)
        for character in [next((one for one in prompt.text if unicodedata.category(one) == "Cf"), None)]
        if character is not None
    ]
    lines = []
    if returns:
        lines.append(
            f"warning: rows with carriage returns: {len(returns)}, the first: {_place(returns[0])}; if the file's lines"
            " end with them alone, convert it with tr '\\r' '\\n'"
        )
    if hidden:
        place, character = hidden[0]
        name = unicodedata.name(character, f"U+{ord(character):04X}").lower()
        lines.append(f"warning: rows with invisible characters: {len(hidden)}, the first: {_place(place)} a {name}")
    return lines


def _place(where: str) -> str:
    return where.rpartition("/")[2]

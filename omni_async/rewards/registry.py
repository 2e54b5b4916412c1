"""Scorers by name: what `reward.scorers[].name` may say, and how its `params` become constructor arguments.

A name is one of the table below, an entry point of the group `omni_async.scorers`, or `module:Class`. Parameters are the constructor's
keyword arguments, checked against its type hints (`Annotated[int, Meta(ge=1)]` bounds included). Nothing is imported before `build`.

A parameter `env:NAME`, at any depth, is what the environment variable NAME holds where the scorer is built, so that a secret needs to stand in no
recipe. What such a parameter or one named like a secret holds is masked in whatever the scorer raises.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast, get_type_hints

import msgspec

from omni_async.config import schema
from omni_async.config.redact import MASK, REFERENCE, SHORTEST, redact, redact_text, secrets_in
from omni_async.rewards import base
from omni_async.rewards.base import Scorer
from omni_async.rewards.hiding import hiding

ENTRY_POINT_GROUP = "omni_async.scorers"

_BUILT_IN = {
    "ocr": "omni_async.rewards.ocr:OcrScorer",
    "jpeg_size": "omni_async.rewards.jpeg_size:JpegSizeScorer",
}


class ScorerConfigError(ValueError):
    """`reward.scorers` names something unknown, or gives it parameters it does not take."""


def _table() -> dict[str, str]:
    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**installed, **_BUILT_IN}


def names() -> list[str]:
    """Every registered name, sorted."""
    return sorted(_table())


def _load(name: str) -> type:
    target = _table().get(name, name)
    if ":" not in target:
        raise ScorerConfigError(f"unknown scorer {name!r}: registered are {', '.join(names())}; your own is named 'module:Class'")
    module, _, attribute = target.partition(":")
    try:
        loaded = EntryPoint(name=name, value=target, group=ENTRY_POINT_GROUP).load()
    except ImportError as error:
        raise ScorerConfigError(f"scorer {name!r}: cannot import {module!r}: {error}") from error
    except AttributeError as error:
        found = [key for key, value in vars(import_module(module)).items() if isinstance(value, type) and value.__module__ == module]
        raise ScorerConfigError(f"scorer {name!r}: module {module!r} has no {attribute!r}; it defines {', '.join(found)}") from error
    if not isinstance(loaded, type) or not callable(getattr(loaded, "score", None)):
        raise ScorerConfigError(f"scorer {name!r}: {target!r} is not a class with a method `score(images, prompts)`")
    return loaded


def _arguments(name: str, scorer: type, params: dict[str, Any]) -> dict[str, Any]:
    """`params` converted to the types of the constructor's keyword arguments."""
    hints = get_type_hints(scorer.__init__, include_extras=True)  # type: ignore[misc]  # only its signature is read
    signature = inspect.signature(scorer)
    allowed = {key: hints.get(key, Any) for key, p in signature.parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    converted: dict[str, Any] = {}
    for key, value in params.items():
        if key not in allowed:
            raise ScorerConfigError(f"scorer {name!r} takes no parameter {key!r}; it takes {', '.join(allowed) or 'none'}")
        where = f"scorer {name!r}, parameter {key!r}"
        given = _resolved(value, where)
        try:
            converted[key] = msgspec.convert(given, allowed[key])
        except msgspec.ValidationError as error:
            why = redact_text(str(error), secrets_in({key: given}))
            raise ScorerConfigError(f"{where}: {why}, got {redact({key: value})[key]!r}") from None
    missing = [key for key in allowed if key not in converted and signature.parameters[key].default is inspect.Parameter.empty]
    if missing:
        raise ScorerConfigError(f"scorer {name!r} needs the parameter {', '.join(map(repr, missing))}")
    return converted


def _resolved(value: Any, where: str) -> Any:
    """`value` with every `env:NAME` replaced by what the environment says."""
    if isinstance(value, dict):
        return {key: _resolved(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, where) for item in value]
    if value == MASK:
        raise ScorerConfigError(f"{where}: a masked credential, as in a run folder's config.yaml; give it again, or name it as env:NAME")
    if not isinstance(value, str) or not value.startswith(REFERENCE):
        return value
    variable = value.removeprefix(REFERENCE)
    found = os.environ.get(variable)
    if not found:
        raise ScorerConfigError(f"{where}: {value!r} names an environment variable that is not set; set {variable}")
    return found


def _referenced(value: Any) -> Iterator[str]:
    """What the `env:NAME` of a tree stand for."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _referenced(item)
    elif isinstance(value, str) and value.startswith(REFERENCE):
        yield os.environ.get(value.removeprefix(REFERENCE), "")


def secrets_of(config: schema.Scorer) -> frozenset[str]:
    """Every credential that the scorer was given, for those who show what it says."""
    return secrets_in(config.params) | frozenset(found for found in _referenced(config.params) if len(found) >= SHORTEST)


def check(config: schema.Scorer) -> None:
    """Raise `ScorerConfigError` if `build` would, without loading any model (the scorer's module is imported)."""
    _arguments(config.name, _load(config.name), config.params)


def is_concurrent(config: schema.Scorer) -> bool:
    """Whether the scorer declares that calls of it may overlap; see `Scorer`."""
    return base.is_concurrent(_load(config.name))


def build(config: schema.Scorer) -> Scorer:
    """The scorer `config` names, with its model loaded."""
    scorer = _load(config.name)
    arguments = _arguments(config.name, scorer, config.params)
    with hiding(secrets_of(config)):
        return cast(Scorer, scorer(**arguments))

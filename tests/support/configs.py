"""Builds what test worlds run: configurations and recipe files of a world's defaults and a test's changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omni_async.config import Config
from omni_async.records.write.activity import Activity
from omni_async.records.write.summary import Counters, Summary, summarise

Sections = Mapping[str, Any]
_SMALLEST: Sections = {
    "model": {"path": "model"},
    "data": {"prompts": "prompts.txt"},
    "reward": {"scorers": [{"name": "ocr"}]},
}


def with_sections(recipe: Sections, sections: Sections) -> dict[str, Any]:
    """Returns a copy of a recipe with these keys of its sections; what is no section replaces all of it."""
    merged = dict(recipe)
    for name, keys in sections.items():
        merged[name] = {**merged.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return merged


def build(defaults: Sections, changes: Sections | None = None) -> Config:
    """Builds a configuration of the smallest recipe with these sections, without its checks: the change
    `{"rollout.workers": 2}`, or `rollout__workers`, is of one key."""
    tree = msgspec.to_builtins(with_sections(_SMALLEST, defaults))  # a copy: defaults are shared by all tests
    for key, value in (changes or {}).items():
        *path, last = key.replace("__", ".").split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return msgspec.convert(tree, Config)


def write_recipe_file(path: Path, recipe: Sections, sections: Sections) -> Path:
    """Writes the recipe with these changes of its sections; runs go to `runs` beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run = {"dir": str(path.parent / "runs"), **recipe.get("run", {})}
    path.write_text(yaml.safe_dump(with_sections({**recipe, "run": run}, sections)))
    return path


def make_summary(**given: Any) -> Summary:
    """Makes the summary of a run of ten seconds that did nothing, but for what is given."""
    nothing = Counters(admitted=0, trained=0, rejected=0, dropped=0, live=0)
    none: dict[str, Any] = {"rewards": [], "staleness": [], "images": 0, "devices": 2}
    ended = {"run": "run", "status": "done", "started": 10.0, "finished": 20.0, "counters": nothing}
    given["activity"] = Activity((given.get("started", 10.0), math.inf), given.pop("spans", ()))
    return summarise(**(ended | none | given))

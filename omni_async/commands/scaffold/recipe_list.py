"""Lists the recipes of a folder, for `omni-async list recipes`, with their models, methods and rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from omni_async.commands.scaffold.shipped import find_recipes
from omni_async.config import Config, ConfigError, load
from omni_async.config.reading import read_file
from omni_async.config.redact import one_line
from omni_async.config.schedule import num_devices
from omni_async.records.write.console import columns

_HEADINGS = ("recipe", "family", "algorithm", "reward", "S", "devices", "time")
_TIME = re.compile(r"(?:about )?(?:\d+(?: to \d+)?|half a|an?|some) (?:minute|hour)s?(?= on )", re.IGNORECASE)
_LARGEST = 2**18  # bytes, the same limit as for a recipe that is trained


def recipe_lines(folder: Path | None = None) -> Iterator[str]:
    """Yield the lines of a table of all recipes in `folder`; None: the folder from `find_recipes`.

    Lists files that are no recipes with the reason."""
    folder = find_recipes() if folder is None else folder
    rows: list[tuple[str, ...]] = [_HEADINGS]
    refused: list[str] = []
    for path in sorted(folder.rglob("*.yaml")):
        try:
            rows.append(_row(path, load(path)))
        except (ConfigError, OSError, ValueError) as error:
            refused.append(one_line(f"{path}: cannot be used: {str(error).removeprefix(f'{path}: ')}"))
    yield from columns(rows)
    yield from refused


def _row(path: Path, config: Config) -> tuple[str, ...]:
    offline = config.data.preferences is not None
    rewards = ["preference pairs"] if offline else [one.name.rpartition(":")[2] for one in config.reward.scorers]
    return (
        str(path),
        str(config.model.pipeline or "any"),
        config.algorithm.name,
        "a profile's" if config.emulation is not None else ", ".join(rewards),
        "any" if offline else str(config.staleness.max_updates),
        _devices(config),
        _time_of(path),
    )


def _devices(config: Config) -> str:
    """Return how many accelerators the recipe needs."""
    if not any(resources.gpus for resources in config.resources.values()):
        return "none"
    number = f"{num_devices(config):g}"
    return f"{number} emulated" if config.emulation is not None else number


def _time_of(path: Path) -> str:
    """Return the duration of a run, if the file's opening comment gives it."""
    lines = read_file(path, _LARGEST).decode("utf-8").splitlines()
    head = " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))
    found = _TIME.search(head)
    return found[0].lower() if found else ""

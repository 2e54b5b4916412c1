"""Writes the table of docs/memory.md: the estimated memory of every published recipe.

python -m benchmarks.memory_table
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from omni_async.commands.memory.amounts import GIB, Amount
from omni_async.commands.memory.devices import bytes_of_device
from omni_async.commands.memory.estimate import estimate
from omni_async.config import Config, load

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "memory.md"
DEVICE = "h100-80g"
_OTHERS = ("emulated", "quickstart", "tiny")
_HEAD = ("recipe", "role", "weights", "states", "activations", "decode", "sum", "of 79.1")


def published_recipes() -> list[Path]:
    """Return the recipes of published models, in the order of their names."""
    return [path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if path.parent.name not in _OTHERS]


def rows_of(recipe: Path) -> list[str]:
    """Return the lines of a recipe in the table, one for each role with an accelerator."""
    config: Config = load(recipe)
    capacity = bytes_of_device(DEVICE)
    name = f"{recipe.parent.name}/{recipe.stem}"
    return [_line(name, amount, capacity) for amount in estimate(config, capacity).roles]


def _line(recipe: str, amount: Amount, capacity: int) -> str:
    parts = (amount.weights, amount.states, amount.activations, amount.decode)
    weights, *others = ("unknown" if part is None else f"{part / GIB:.1f}" for part in parts)
    known = (
        [f"{amount.device / GIB:.1f}", f"{amount.device / capacity:.0%}"] if amount.weights is not None else ["", ""]
    )
    return f"| {' | '.join((recipe, f'{amount.role} x {amount.workers}', weights, *others, *known))} |"


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| {' | '.join(_HEAD)} |"
    yield f"|{'---|' * len(_HEAD)}"
    for recipe in published_recipes():
        yield from rows_of(recipe)


def main() -> None:
    """Replace the page's table."""
    made = [*table()]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(f"| {' | '.join(_HEAD)} |")
    after = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    PAGE.write_text("\n".join([*lines[:first], *made, *lines[after:]]) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()

"""Writes the estimated memory of every published recipe, into the table of docs/memory.md and the recipe's comment.

python -m benchmarks.memory_table
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from omni_async.commands.memory.amounts import GIB, Amount
from omni_async.commands.memory.devices import bytes_of_device
from omni_async.commands.memory.estimate import estimate, held_bytes
from omni_async.commands.memory.published import find_model
from omni_async.config import Config, load
from omni_async.config.draws import drawn
from omni_async.diffusion.policy import load_policy

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "memory.md"
DEVICE = "h100-80g"
_OTHERS = ("emulated", "quickstart", "tiny")
_HEAD = ("recipe", "rollout", "trainer", "scorers")
COMMENT = "# Memory, estimated"


def published_recipes() -> list[Path]:
    """Return the recipes of published models, in the order of their names."""
    found = [path for path in sorted((ROOT / "recipes").glob("*/*.yaml")) if path.parent.name not in _OTHERS]
    return [path for path in found if drawn(load(path)) == "latents"]


def row_of(recipe: Path) -> str:
    """Return the line of a recipe in the table, with a cell for engines, ranks, and all other roles."""
    config: Config = load(recipe)
    cells = {"rollout": "", "trainer": ""}
    others = []
    for amount in estimate(config, bytes_of_device(DEVICE)).roles:
        if amount.role in cells:
            cells[amount.role] = _cell(amount)
        else:
            others.append(f"{amount.role} {_cell(amount)}")
    return _line((f"{recipe.parent.name}/{recipe.stem}", *cells.values(), ", ".join(others)))


def comment_of(recipe: Path, row: str) -> str:
    """Return the comment of a recipe, with the numbers of its row in the table and the most that live samples hold."""
    config = load(recipe)
    family, path, _ = find_model(config)
    samples = held_bytes(config, load_policy(family, str(path))) / GIB
    _, _, rollout, trainer, others, _ = row.split("|")
    cells = f"rollout{rollout}trainer{trainer}{others}"
    known = ", ".join(f"{role} {total}" for role, total in re.findall(r"(\w+) \d+ x (\d+\.\d)", cells))
    device = f"{known} of the 79.1 GiB of an 80 GB device"
    return f"{COMMENT} (docs/memory.md): {device}; samples {samples:.1f} GiB of host memory."


def _cell(amount: Amount) -> str:
    """Return `4 x 55.2 (52.5+0.5+1.5)`: processes, GiB of each, and its weights, states and peak of the rest."""
    if amount.weights is None:
        return f"{amount.workers} x unknown"
    parts = (amount.weights, amount.states, max(amount.activations, amount.decode))
    return f"{amount.workers} x {amount.device / GIB:.1f} ({'+'.join(f'{part / GIB:.1f}' for part in parts)})"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield _line(_HEAD)
    yield f"|{'---|' * len(_HEAD)}"
    yield from map(row_of, published_recipes())


def main() -> None:
    """Replace the page's table, and the recipes' comments."""
    made = [*table()]
    for recipe, row in zip(published_recipes(), made[2:], strict=True):
        text = recipe.read_text(encoding="utf-8").splitlines()
        text = [comment_of(recipe, row) if line.startswith(COMMENT) else line for line in text]
        recipe.write_text("\n".join(text) + "\n", encoding="utf-8")
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = lines.index(_line(_HEAD))
    after = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    PAGE.write_text("\n".join([*lines[:first], *made, *lines[after:]]) + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE} and the recipes' comments\n")


if __name__ == "__main__":
    main()

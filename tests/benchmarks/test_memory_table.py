"""Tests the table of docs/memory.md, and the same numbers in the recipes' comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_table import PAGE, published_recipes, rows_of

each = pytest.mark.parametrize("recipe", published_recipes(), ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")


@pytest.mark.thorough  # tests/commands/memory/test_verdict.py always runs one
@each
def test_page_has_estimates(recipe: Path) -> None:
    name = f"| {recipe.parent.name}/{recipe.stem} |"
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith(name)] == rows_of(recipe)


@each
def test_comment_has_the_pages_numbers(recipe: Path) -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    own = [row for row in rows if row[0] == f"{recipe.parent.name}/{recipe.stem}"]
    known = ", ".join(f"{row[1].partition(' x ')[0]} {row[6]}" for row in own if "unknown" not in row)
    [line] = [line for line in recipe.read_text().splitlines() if line.startswith("# Memory, estimated")]
    assert line == f"# Memory, estimated (docs/memory.md): {known} of the 79.1 GiB of an 80 GB device."

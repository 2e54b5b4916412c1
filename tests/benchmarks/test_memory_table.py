"""Tests the table of docs/memory.md, and the same numbers in the recipes' comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_table import COMMENT, PAGE, comment_of, published_recipes, row_of

each = pytest.mark.parametrize("recipe", published_recipes(), ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")


def line_of(recipe: Path) -> str:
    name = f"| {recipe.parent.name}/{recipe.stem} |"
    [line] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(name)]
    return line


@pytest.mark.thorough  # tests/commands/memory/test_verdict.py always runs one
@each
def test_page_has_estimates(recipe: Path) -> None:
    assert line_of(recipe) == row_of(recipe)


@each
def test_comment_has_the_pages_numbers(recipe: Path) -> None:
    [line] = [line for line in recipe.read_text().splitlines() if line.startswith(COMMENT)]
    assert line == comment_of(recipe, line_of(recipe))

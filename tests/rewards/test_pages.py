"""Tests that the page which compares rewards leads to one for every built-in scorer, which names all its parameters."""

from __future__ import annotations

import inspect
import re

import pytest

from omni_async.rewards import registry
from tests.support.places import ROOT

PAGES = ROOT / "docs" / "rewards"
INDEX = (PAGES / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", registry._BUILT_IN)
def test_a_scorer_is_compared_and_its_page_names_its_parameters(name: str) -> None:
    table = INDEX.partition("## Which reward should I use")[2].partition("\nA small model")[0]
    linked = re.search(rf"\[`{name}`\]\((\w+\.md)", table)
    assert linked is not None, "the table of the index has a row for it"
    page = (PAGES / linked[1]).read_text(encoding="utf-8")
    parameters = [one for one in inspect.signature(registry._load(name)).parameters if one != "device"]
    assert [one for one in parameters if f"`{one}`" not in page] == []

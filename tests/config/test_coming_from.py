"""Tests that the page for users of other trainers names keys, values and scorers that exist."""

from __future__ import annotations

import re

import pytest

from omni_async.config import load
from omni_async.config.describe import walk
from omni_async.config.schema import Config
from omni_async.plugins.families import family_names, find_family
from omni_async.rewards import registry
from tests.support.places import ROOT

PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
PEERS = ("flow_grpo", "verl-omni", "UniRL")
KEYS = {path for path, *_ in walk(Config)}
SAMPLING = {path for name in family_names() for path, *_ in walk(find_family(name).sampling, "rollout.sampling.")}
SECTIONS = {path.partition(".")[0] for path in KEYS if "." in path}


def rows(peer: str) -> list[tuple[str, str, str]]:
    """Returns the rows of a peer's table below its head: their keys, ours, the difference."""
    section = PAGE.partition(f"\n## {peer}\n")[2].partition("\n## ")[0]
    table = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0]] == [peer, "recipe", "difference"]
    return [(theirs, ours, difference) for theirs, ours, difference in table[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def ours() -> list[str]:
    """Returns the keys and `key: value` pairs of a recipe that the page names, in tables and in text."""
    found = [token for peer in PEERS for _, cell, _ in rows(peer) for token in quoted(cell)]
    rest = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    rest += "".join(difference for peer in PEERS for *_, difference in rows(peer))
    named = [token for token in quoted(rest) if re.split(r"[.:]", token)[0] in SECTIONS | {"schedule"}]
    return sorted({*found, *named})


@pytest.mark.parametrize("peer", PEERS)
def test_every_row_maps_their_keys_to_ours(peer: str) -> None:
    assert len(rows(peer)) >= 20
    assert all(quoted(theirs) and quoted(keys) for theirs, keys, _ in rows(peer))


@pytest.mark.parametrize("named", ours())
def test_keys_of_recipes_exist(named: str) -> None:
    key, _, value = named.partition(": ")
    assert key in KEYS | SAMPLING
    if value:
        load(ROOT / "recipes" / "quickstart" / "quickstart.yaml", [f"{key}={value}"])


def test_scorers_exist() -> None:
    named = re.findall(r"->\s+`(\w+)`", PAGE)
    assert len(named) >= 7 and {*named} <= {*registry._BUILT_IN}

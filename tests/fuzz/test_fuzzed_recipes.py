"""Tests that any recipe and any override is a configuration or one line of refusal: no traceback, nothing written, exit
code 0 or 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from foreign import TEXTS, altered, changed, few, listing, plain
from hypothesis import example, given
from hypothesis import strategies as st

from omni_async.cli import main
from omni_async.config import Config, ConfigError, load
from tests.e2e.emulation import write_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def same_path() -> Iterator[None]:
    """Restores Python's path, on which the command line puts the working directory."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def full(recipe: Path) -> dict[str, Any]:
    """Fills in every default, so that every key is there to be changed."""
    tree = msgspec.to_builtins(load(recipe))
    return {section: value for section, value in tree.items() if value is not None}


def _config_or_refusal(recipe: Path, content: bytes, overrides: list[str]) -> None:
    spoilt = recipe.with_name("spoilt.yaml")
    spoilt.write_bytes(content)
    before = listing(recipe.parent)
    try:
        assert isinstance(load(spoilt, overrides), Config)
    except ConfigError as error:
        assert str(error)
    assert listing(recipe.parent) == before


@few(150)
@given(st.binary(max_size=100) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"\xff\xfe")
@example(b"run: {seed: 1:1:1:1:1:1" + b":59" * 300 + b".5}")
def test_any_bytes(recipe: Path, content: bytes) -> None:
    _config_or_refusal(recipe, content, [])


@few(150)
@given(st.data())
def test_a_recipe_with_some_bytes_changed(recipe: Path, data: st.DataObject) -> None:
    _config_or_refusal(recipe, data.draw(changed(recipe.read_bytes())), [])


@few(50)
@given(st.data(), st.lists(st.text(max_size=30) | st.sampled_from([f"run.name={text}" for text in TEXTS]), max_size=2))
def test_a_recipe_with_some_values_changed(recipe: Path, data: st.DataObject, overrides: list[str]) -> None:
    tree = data.draw(altered(full(recipe)))
    _config_or_refusal(recipe, yaml.safe_dump(tree, allow_unicode=False).encode(), overrides)


@few(40)
@given(data=st.data())
def test_the_command_line_answers_in_one_line(
    recipe: Path, data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = data.draw(altered(full(recipe)))
    spoilt = recipe.with_name("spoilt.yaml")
    spoilt.write_text(yaml.safe_dump(tree, allow_unicode=False))
    before = listing(recipe.parent)
    key = data.draw(
        st.sampled_from(
            ["run.name", "reward.scorers.0.params.x", "emulation.profile", "checkpoint.resume", "data.prompts"]
        )
    )
    override = f"{key}={msgspec.json.encode(data.draw(plain)).decode()}"
    code = main(["check", str(spoilt), *data.draw(st.sampled_from([[], [override]]))])
    said = capsys.readouterr()
    assert listing(recipe.parent) == before
    if code == 0:
        assert said.err == "" and isinstance(yaml.safe_load(said.out), dict)
    else:
        (line,) = said.err.split("\n")[:-1]
        assert code == 2 and line.startswith("omni-async: ") and said.out == "" and line.isprintable()

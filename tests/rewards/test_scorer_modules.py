"""Tests foreign scorer modules: any mistake in one becomes one line with its location, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_async.config import schema
from omni_async.families import MediaShape
from omni_async.rewards import registry
from omni_async.types import Prompt

IMAGE = (MediaShape("image", (3, 4, 4)),)
_CLASS = "class Own:\n    name = 'own'\n    def score(self, images, prompts): return []\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Puts a folder first on the Python path, as the working directory is for the command line."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def refusal(name: str, **params: object) -> str:
    config = schema.Scorer(name=name, params=params)
    with pytest.raises(registry.ScorerConfigError) as refused:
        registry.check(config, IMAGE)
        registry.prompt_check(config)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("class Own\n", ("SyntaxError", "own_module.py, line 1")),
        ("x = 1\n" + "import own_helper\n", ("ModuleNotFoundError", "No module named 'own_helper'", "own_module.py:2")),
        ("from os import nothing\n", ("ImportError", "nothing", "own_module.py:1")),
        ("\n1 / 0\n", ("ZeroDivisionError", "own_module.py:2")),
        ("import json\njson.loads('{')\n", ("JSONDecodeError", "decoder.py:")),
        ("None.score\n", ("AttributeError", "own_module.py:1")),
        ("import sys\nsys.exit('no key')\n", ("SystemExit: no key", "own_module.py:2")),
        ("raise SystemExit\n", ("SystemExit: no reason given", "own_module.py:1")),
        ("class Own:\n    x: int = nowhere\n", ("NameError", "'nowhere'", "own_module.py:2")),
        ("\0", ("cannot import 'own_module'",)),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_the_line(
    folder: Path, content: str, expected: tuple[str, ...]
) -> None:
    (folder / "own_module.py").write_text(content)
    message = refusal("own_module:Own")
    assert message.startswith("scorer 'own_module:Own': cannot import 'own_module': ")
    assert all(text in message for text in expected), message


@pytest.mark.parametrize("name", ["own_nowhere:Own", "own_package.nowhere:Own"])
def test_a_module_that_is_not_there_is_refused_with_where_it_was_looked_for(folder: Path, name: str) -> None:
    (folder / "own_package").mkdir()
    message = refusal(name)
    assert f"there is no {name.partition(':')[0]!r} in {folder}" in message
    assert "lib-dynload" not in message


@pytest.mark.parametrize(
    "name",
    [
        "..x:Y",
        ".x:Y",
        "x.:Y",
        "scorers/own.py:Own",
        "own.py :Own",
        ":Own",
        "own:",
        "own:Own:x",
        "own:Own[a]",
        "1:2",
        "own\n:Own",
    ],
)
def test_a_name_that_no_module_can_have_is_refused(name: str) -> None:
    assert "expected 'module:Class', names joined by dots" in refusal(name)


def test_a_class_that_is_not_there_is_refused_with_those_that_are(folder: Path) -> None:
    (folder / "own_module.py").write_text(_CLASS)
    assert "has no 'Other'; it defines Own" in refusal("own_module:Other")
    assert "has no 'Own.Inner'" in refusal("own_module:Own.Inner")
    (folder / "own_empty.py").write_text("x = 1\n")
    assert "has no 'Own'; it defines no class" in refusal("own_empty:Own")
    assert "is not a class with a method" in refusal("own_empty:x")


def test_annotations_that_cannot_be_evaluated_are_refused(folder: Path) -> None:
    head = "from __future__ import annotations\n"
    (folder / "own_module.py").write_text(head + _CLASS + "    def __init__(self, *, x: nowhere = 1): pass\n")
    message = refusal("own_module:Own", x=1)
    assert "annotations of its constructor cannot be evaluated: NameError: name 'nowhere' is not defined" in message


def test_a_parameter_of_a_type_that_no_recipe_can_write_is_refused(folder: Path) -> None:
    (folder / "own_module.py").write_text(_CLASS + "    def __init__(self, *, x: set[str] | list[str] = ()): pass\n")
    assert "parameter 'x': a recipe cannot give a" in refusal("own_module:Own", x=["a"])


def test_ctrl_c_during_an_import_stays_ctrl_c(folder: Path) -> None:
    (folder / "own_module.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        registry.check(schema.Scorer(name="own_module:Own"), IMAGE)


# ---- what a scorer needs of a prompt ---------------------------------------------------------------------------------


class Demanding:
    name = "demanding"

    def __init__(self, *, key: str = "language", secret: str = "") -> None: ...

    def score(self, images, prompts):
        return []

    @classmethod
    def check_prompt(cls, prompt, params):
        match prompt.text:
            case "raise":
                raise KeyError(params["secret"])
            case "exit":
                sys.exit("bye")
            case "wrong":
                return False
        return None if params["key"] in prompt.metadata else f"no {params['key']!r}"


class Instance:
    name = "instance"

    def score(self, images, prompts):
        return []

    def check_prompt(self, prompt, params):
        return None


def asked(prompt: Prompt, **params: object) -> str | None:
    check = registry.prompt_check(schema.Scorer(name=f"{__name__}:Demanding", params=params))
    assert check is not None
    return check(prompt)


def test_a_scorer_says_what_it_misses_in_a_prompt_by_its_parameters_and_their_defaults() -> None:
    prompt = Prompt(0, "x", metadata={"language": "en"})
    assert asked(prompt) is None
    assert asked(prompt, key="style") == f"scorer '{__name__}:Demanding': no 'style'"


def test_a_check_that_fails_itself_is_a_line_without_its_secrets() -> None:
    said = asked(Prompt(0, "raise"), secret="hunter2hunter2")
    assert said is not None and "check_prompt failed: KeyError" in said and "test_scorer_modules.py:" in said
    assert "hunter2" not in said
    assert "check_prompt failed: SystemExit: bye" in (asked(Prompt(0, "exit")) or "")
    assert "check_prompt returned a bool, expected what is missing as text, or None" in (
        asked(Prompt(0, "wrong")) or ""
    )


def test_a_scorer_without_a_check_asks_nothing() -> None:
    assert registry.prompt_check(schema.Scorer(name="jpeg_size")) is None


def test_a_check_that_needs_an_instance_is_refused() -> None:
    assert "check_prompt must be a classmethod or staticmethod" in refusal(f"{__name__}:Instance")

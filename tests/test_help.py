"""Tests that the help teaches: commands are in groups, and every command has examples that work as they stand."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from omni_async import cli
from tests.support.places import ROOT

# What a user has: a run, a model, prompts, a recipe that was tuned.
OF_THE_USER = re.compile(r"(runs|models|owner)/|my_|images/")


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yields the parser of the program, of every command, and of what a command has under it."""
    waiting: list[Any] = [cli._parser()]
    while waiting:
        parser = waiting.pop()
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()


def examples_of(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Returns the words after `omni-async` of every example in a help, without what is the shell's."""
    lines = re.findall(r"^  omni-async (.*)$", parser.format_help(), flags=re.M)
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in lines]


PARSERS = [*parsers()]
EXAMPLES = sorted({tuple(words) for parser in PARSERS for words in examples_of(parser)})
CHEAP = [words for words in EXAMPLES if words[0] in ("check", "list", "docs") and "--device" not in words]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_every_help_has_an_example(parser):
    own = parser.prog.split()[1:]
    assert any(words[: len(own)] == own for words in examples_of(parser)), parser.format_help()


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_examples_are_accepted(words):
    options = cli._parse(words)
    assert options.command == words[0]
    for word in words[1:]:
        if "/" in word and not OF_THE_USER.search(word):
            assert (ROOT / word).exists(), word


@pytest.mark.thorough
@pytest.mark.parametrize("words", CHEAP, ids=" ".join)
def test_cheap_examples(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words]) == 0
    assert capsys.readouterr().out


def test_groups_of_commands(capsys):
    program = PARSERS[0]
    helped = program.format_help()
    [commands] = [action for action in program._actions if isinstance(action, argparse._SubParsersAction)]
    listed = re.findall(r"^  ([a-z-]+)  +\S", helped, flags=re.M)
    assert sorted(listed) == sorted(commands.choices)
    assert "more:" not in helped, "a command is in no group of omni_async/cli.py"
    assert max(map(len, helped.splitlines())) <= 120
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 2 and capsys.readouterr().err == helped

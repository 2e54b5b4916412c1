"""Tests that the texts of prompts are found by their numbers, and that a file that is none costs texts alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_async.runs.prompt_texts import prompt_texts


def test_prompts_are_numbered_without_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n a dog \nä\n")
    assert prompt_texts(str(path), {0, 1, 2, 7}) == {0: "a cat", 1: "a dog", 2: "ä"}
    assert prompt_texts(str(path), set()) == {}


@pytest.mark.parametrize("line", ['{"more": ' + "[" * 5000 + "]" * 5000 + "}", '{"prompt": 5}', '{"half'])
def test_a_line_that_is_no_prompt_ends_what_is_known(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a cat"}}\n{line}\n')
    assert prompt_texts(str(path), {0, 1}) == {0: "a cat"}


@pytest.mark.parametrize("path", [None, 5, "nowhere.txt", "/etc/hostname", "/dev/zero"])
def test_what_is_no_prompt_file_has_none(path: object) -> None:
    assert prompt_texts(path, {0}) == {}

"""Tests what the last lines of a run, and its status, say to do next."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from omni_async import cli
from omni_async.records.read.next_steps import next_steps, program_as_typed
from omni_async.records.write.rundir import RunDirectory


def left(folder: Path, updates: int = 1, checkpoint: str | None = "tensors") -> RunDirectory:
    """Writes what a run of that many updates leaves; `checkpoint`: the folder in its one, None: there is none."""
    folder.mkdir(parents=True)
    run = RunDirectory(folder)
    for update in range(1, updates + 1):
        run.append_metrics(update, {"reward": 0.5})
    if checkpoint is not None:
        (run.checkpoints / "update-000002" / checkpoint).mkdir(parents=True)
    return run


def said(run: RunDirectory) -> list[list[str]]:
    """Returns the words of each command, as a shell takes them."""
    first, *lines = next_steps(run) or [""]
    assert first in ("next:", "")
    return [shlex.split(line, comments=True) for line in lines]


def test_a_run_with_weights_is_reported_sampled_and_exported_as_it_stands_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = left(tmp_path / "my runs" / "it's-20260101-120000")
    folder = "my runs/it's-20260101-120000"
    assert said(run) == [
        ["omni-async", "report", folder],
        ["omni-async", "sample", folder, "--out", "drawn/it's-20260101-120000"],
        ["omni-async", "export", folder, "--out", "exported/it's-20260101-120000"],
    ]


@pytest.mark.parametrize("command", ["report", "sample", "export"])
def test_what_is_said_is_what_the_program_takes(tmp_path, command):
    [words] = [words for _, *words in said(left(tmp_path / "run")) if words[0] == command]
    assert cli._parse(words).command == command


@pytest.mark.parametrize("checkpoint", [None, "groups"])
def test_what_has_no_weights_is_only_reported(tmp_path, checkpoint):
    assert [words[1] for words in said(left(tmp_path / "run", checkpoint=checkpoint))] == ["report"]


def test_of_a_run_without_an_update_nothing_is_said(tmp_path):
    assert said(left(tmp_path / "run", updates=0)) == []


def test_the_program_is_the_one_that_was_started(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "omni-async"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert program_as_typed() == "omni-async"
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/usr/bin")
    assert program_as_typed() == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert program_as_typed() == "omni-async"

"""Tests what the last lines of a run, and its status, say to do next."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from omni_async import cli
from omni_async.records.read.next_steps import next_steps, program_as_typed
from omni_async.records.write.rundir import RunDirectory
from tests.records.write.sinks.sink_world import about


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


def test_next_steps_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = "my runs/it's-20260101-120000"
    words = said(left(tmp_path / folder))
    assert words == [
        ["omni-async", "report", folder],
        ["omni-async", "sample", folder, "--out", "drawn/it's-20260101-120000"],
        ["omni-async", "export", folder, "--out", "exported/it's-20260101-120000"],
    ]
    assert [cli._parse(rest).command for _, *rest in words] == ["report", "sample", "export"]
    for n, checkpoint in enumerate([None, "groups"]):  # no weights
        assert [words[1] for words in said(left(tmp_path / f"run-{n}", checkpoint=checkpoint))] == ["report"]
    assert said(left(tmp_path / "run", updates=0)) == []
    run = left(tmp_path / "answers")
    run.config_yaml.write_text("rollout: {engine: transformers}\n")
    assert [words[1] for words in said(run)] == ["report", "sample", "export"]
    assert next_steps(run)[-1].endswith("# a model that transformers loads")
    for engine in ("diffusers", "transformers"):
        assert "omni-async sample" in about(tmp_path / "a", rollout={"engine": engine}).description


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

"""Tests that damaged run folders are used or refused in one line, within bounds of time and memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.places import ROOT

_PARTS, _CASES, _SOME = 10, 100, 15


@pytest.mark.slow
@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("part", range(_PARTS))
def test_no_command_fails_on_a_damaged_run_folder(slice_of: Callable[[str, int, int], range], part: int) -> None:
    """Plays some of the cases of `python -m tests.fuzz.run_folders` in a process of their own.

    With room for a machine that is slow or busy; the command alone holds cases to two seconds."""
    numbers = slice_of(f"damaged run folders of part {part}", _CASES, _SOME)
    first = part * _CASES + numbers[0]
    options = f"--quick --wall 60 --cpu 6 --first {first} --cases {len(numbers)}".split()
    command = [sys.executable, "-m", "tests.fuzz.run_folders", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    faults = [f"FAULT{rest}" for rest in ended.stdout.split("\nFAULT")[1:]]
    assert ended.returncode == 0, "\n".join(faults)[:20_000] or ended.stderr[-3000:]
    assert f"{len(numbers)} cases, 0 faults" in ended.stdout

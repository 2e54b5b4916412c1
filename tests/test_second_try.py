"""Tests what a run of the suite does about a failed test and about a missing browser, in suites of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

# Fails the first time that it runs, which a file remembers.
_ONCE = """
def test_{name}(request):
    seen = request.config.rootpath / "{name}.seen"
    if not seen.exists():
        seen.touch()
        assert not "the first failure of {name}"
"""
_STEADY = "def test_steady():\n    pass\n"
_BROKEN = "def test_broken():\n    assert not 'broken as ever'\n"
# Passes only in a process that runs nothing else.
_ALONE = """
def test_alone(request):
    assert request.session.testscollected == 1
"""


def _run(folder: Path, *arguments: str, **suite: str) -> tuple[int, str]:
    for name, text in suite.items():
        (folder / f"test_{name}.py").write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.second_try", "--second-try", *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("processes", ["0", "2"])
def test_two_flaky_pass(tmp_path: Path, processes: str):
    suite = {"a": _STEADY + _ONCE.format(name="one"), "b": _ALONE}
    code, output = _run(tmp_path, "-n", processes, **suite)
    assert code == 0
    assert "1 passed, 2 flaky" in output.splitlines()[-1] and "failed" not in output.splitlines()[-1]
    end = output[output.index("flaky: failed, then passed alone") :]
    assert "the first failure of one" in end and "test_alone" in end


def test_a_third_refuses(tmp_path: Path):
    code, output = _run(tmp_path, a=_STEADY + "".join(_ONCE.format(name=name) for name in ("one", "two", "three")))
    assert code == 1 and "3 tests failed: no second try" in output
    assert "3 failed, 1 passed" in output.splitlines()[-1]


def test_failing_twice_refuses(tmp_path: Path):
    code, output = _run(tmp_path, a=_BROKEN + _ONCE.format(name="one"))
    assert code == 1
    assert "failed twice, now alone: test_a.py::test_broken" in output
    assert "flaky: failed, then passed alone: test_a.py::test_one" in output
    assert "1 failed, 1 flaky" in output.splitlines()[-1]


def test_other_errors_get_no_second_try(tmp_path: Path):
    code, output = _run(tmp_path, a="import no_such_module\n")
    assert code == 2 and "second try:" not in output
    code, output = _run(tmp_path, "-x", a=_BROKEN)
    assert code == 4 and "leave -x and --maxfail out" in output


def test_the_suite_without_a_browser(tmp_path: Path):
    """Without Chromium the tests of pages are skipped, and the first and the last line report it; CI refuses it."""
    one = "tests/commands/report/test_page.py::test_what_a_run_says_is_text_and_never_markup"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", one]
    without = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=without, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "1 skipped" in done.stdout
    assert lines[0] == lines[-1] and "Chromium is not installed" in lines[0]
    done = subprocess.run([*command, "--require-browser"], cwd=ROOT, env=without, capture_output=True, text=True)
    assert done.returncode == 4 and "apt-get install chromium" in done.stderr

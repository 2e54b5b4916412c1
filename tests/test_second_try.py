"""Tests what a run of the suite does about a failed test and about a missing browser, in suites of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    plugins = ["-p", "xdist", "-p", "tests.support.second_try"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--second-try", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_two_flaky_pass(tmp_path: Path):
    code, output = _run(tmp_path, "-n", "2", a=_STEADY + _ONCE.format(name="one"), b=_ALONE)
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
    (tmp_path / "test_a.py").write_text("def test_page(open_page):\n    raise AssertionError\n", encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p tests.conftest\n", encoding="utf-8")
    without = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "pipelines")))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=without, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "1 skipped" in done.stdout
    assert lines[0] == lines[-1] and "Chromium is not installed" in lines[0]
    done = subprocess.run([*command, "--require-browser"], cwd=tmp_path, env=without, capture_output=True, text=True)
    assert done.returncode == 4 and "apt-get install chromium-headless-shell" in done.stderr

"""Runs each failed test once more, alone, after the suite (`--second-try`): a pytest plugin.

A test that passes then is *flaky*: it counts as flaky, and the end of the output has the traceback of its first
failure. A run accepts two flaky tests. A third refuses the run, and so does a test that fails twice. Nothing else runs
again: a failed collection, a dead process and an interrupted run stay errors.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator

import pytest
from _pytest.terminal import TerminalReporter

ACCEPTED = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("how much").addoption(
        "--second-try",
        action="store_true",
        help=f"run a failed test once more, alone, after the suite; accept {ACCEPTED} flaky tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    # xdist's worker processes report to one process, which decides.
    if config.getoption("--second-try") and not hasattr(config, "workerinput"):
        if config.getoption("maxfail"):
            raise pytest.UsageError("--second-try: the whole suite has to run; leave -x and --maxfail out")
        config.pluginmanager.register(SecondTry(config))


class SecondTry:
    """The flaky tests of a session and the tests that failed twice, with what they printed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.flaky: dict[str, str] = {}
        self.broken: dict[str, str] = {}
        self.refusal = ""

    # The innermost wrapper: xdist has ended its processes, and the terminal has yet to print its summary.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        yield
        terminal: TerminalReporter = self.config.pluginmanager.getplugin("terminalreporter")
        reports = [*terminal.stats.get("failed", ()), *terminal.stats.get("error", ())]
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or any(
            not isinstance(report, pytest.TestReport) for report in reports
        ):
            return
        failed = list(dict.fromkeys(report.nodeid for report in reports))
        if len(failed) > ACCEPTED:
            self.refusal = f"{len(failed)} tests failed: no second try, since a run accepts {ACCEPTED} flaky tests"
            return
        for nodeid in failed:
            terminal.ensure_newline()
            terminal.write_line(f"second try: {nodeid}")
            output = self._failure(nodeid)
            if output is not None:
                self.broken[nodeid] = output
            else:
                self.flaky[nodeid] = "\n".join(report.longreprtext for report in reports if report.nodeid == nodeid)
                _count_as_flaky(terminal, nodeid)
        if not self.broken:
            session.exitstatus = pytest.ExitCode.OK

    def _failure(self, nodeid: str) -> str | None:
        """Run a test without others, with this run's slice; return the output if it fails."""
        options = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
        if self.config.getoption("everything", False):
            options.append("--all")
        if (seed := self.config.getoption("slice_seed", None)) is not None:
            options.append(f"--slice-seed={seed}")
        done = subprocess.run(
            [*options, nodeid], cwd=self.config.rootpath, capture_output=True, text=True, errors="replace"
        )
        return None if done.returncode == 0 else done.stdout + done.stderr

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        for title, found in (
            ("failed twice, now alone", self.broken),
            ("flaky: failed, then passed alone", self.flaky),
        ):
            for nodeid, output in found.items():
                terminalreporter.section(f"{title}: {nodeid}")
                terminalreporter.line(output.rstrip())
        if self.flaky:
            terminalreporter.section(f"{len(self.flaky)} flaky (at most {ACCEPTED} are accepted): each has a cause")
        if self.refusal:
            terminalreporter.section(self.refusal)


def _count_as_flaky(terminal: TerminalReporter, nodeid: str) -> None:
    for category in ("failed", "error"):
        reports = terminal.stats.pop(category, [])
        terminal.stats.setdefault("flaky", []).extend(report for report in reports if report.nodeid == nodeid)
        if kept := [report for report in reports if report.nodeid != nodeid]:
            terminal.stats[category] = kept
    terminal._set_main_color()

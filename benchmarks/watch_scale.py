"""Measures the live page of a long run: seconds until it is usable, the server's memory, and its share of a core.

    python -m benchmarks.watch_scale --groups 100000 --engines 1000
    python -m benchmarks.watch_scale --groups 20000 --live 30

The run's folder is written with the project's own writers. A Chromium opens the page; it is "interactive" when the
lanes are drawn and the report's verdict, or the part written so far, is readable. With --live the folder keeps growing
meanwhile, and the server's processor seconds are compared with the time.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.support.made_run import MadeRun

if TYPE_CHECKING:
    from playwright.sync_api import Page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8, help="of a group")
    parser.add_argument("--over", action="store_true", help="the run is over: its spans are in trace.json")
    parser.add_argument("--live", type=float, default=0.0, metavar="SECONDS", help="continue to write for so long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = MadeRun(options.groups, options.engines, samples=options.samples)
        run = made.write(Path(folder) / "made", over=options.over)
        sizes = {path.name: path.stat().st_size for path in run.path.iterdir() if path.is_file()}
        _say(f"{options.groups} groups, {options.engines} engines: {sum(sizes.values()) / 1e6:.0f} MB of files")
        _measure(run.path, made, options.live)
    return 0


def _measure(folder: Path, made: MadeRun, live_s: float) -> None:
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "omni_async.cli", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            with sync_playwright() as playwright:
                assert server.stdout is not None
                found = re.search(r"http\S+", server.stdout.readline())
                assert found is not None
                arguments = ["--no-sandbox", "--disable-gpu"]
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
                _look(browser.new_page(), found[0], folder, made, psutil.Process(server.pid), live_s)
                browser.close()
        finally:
            server.terminate()


def _look(page: Page, link: str, folder: Path, made: MadeRun, process: psutil.Process, live_s: float) -> None:
    began = time.monotonic()
    page.goto(link)
    page.wait_for_selector("canvas.lanes")
    page.get_by_role("button", name="Zoom out").click()
    _say(f"interactive after {time.monotonic() - began:.2f} s")
    group = str(made.groups - made.per_update)
    page.get_by_role("textbox", name="Group number").fill(group)
    while not page.get_by_role("heading", name=f"Group {group}").count():
        page.get_by_role("button", name="Follow group").click()
        page.wait_for_timeout(50)
    _say(f"the newest groups can be followed after {time.monotonic() - began:.2f} s")
    page.wait_for_selector("#verdict", timeout=120_000)
    _say(f"the report's sections are there after {time.monotonic() - began:.2f} s")
    page.locator("#lanes").filter(has_not_text="being read").wait_for(timeout=120_000)
    _say(f"every span is read after {time.monotonic() - began:.2f} s")
    _say(f"server memory {process.memory_info().rss / 1e6:.0f} MB, {_peak(process):.0f} MB at most")
    if live_s:
        _live(folder, made, process, live_s)
        _say(f"server memory {process.memory_info().rss / 1e6:.0f} MB, {_peak(process):.0f} MB at most")


def _live(folder: Path, made: MadeRun, process: psutil.Process, seconds: float) -> None:
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    groups = made.groups
    while time.monotonic() - began < seconds:
        time.sleep(1.0)
        more = MadeRun(groups + made.per_update, made.engines, samples=made.samples, first=groups)
        more.write(folder)
        groups = more.groups
    took = time.monotonic() - began
    share = (sum(process.cpu_times()[:2]) - before) / took
    _say(f"while the run grew for {took:.0f} s and one page was open: {100 * share:.2f} % of one core")


def _peak(process: psutil.Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

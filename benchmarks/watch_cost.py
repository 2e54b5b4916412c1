"""Measures the cost of a viewed live page for its run: processor seconds, and event-loop lag.

    python -m benchmarks.watch_cost --updates 100

Trains the quickstart in one process (the diffusers engine, so that every role is on one event loop), alternately alone
and with `omni-async watch` and a reader of its events. Lag is the delay of a callback that is due every 20 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from benchmarks.arguments import command_parser

_RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
_KEYS = ("run.runtime=inprocess", "rollout.engine=diffusers", "tracking.mlflow.enabled=false", "validation=null")
_EVERY_S = 0.02


def main() -> int:
    parser = command_parser("watch_cost", __doc__ or "")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # the training process: its folder
    options = parser.parse_args()
    if options.train:
        return _train(options.train, options.updates)
    shares: list[float] = []
    lags: dict[str, list[tuple[float, float]]] = {"alone": [], "watched": []}
    for repeat in range(options.repeats):
        for arm in ("alone", "watched") if repeat % 2 == 0 else ("watched", "alone"):
            with tempfile.TemporaryDirectory() as folder:
                lag, run_s, page_s = _measure(Path(folder), options.updates, arm == "watched")
            lags[arm].append(lag)
            if page_s is not None:
                shares.append(page_s / run_s)
            cost = "" if page_s is None else f", the page {page_s:.2f} s ({100 * page_s / run_s:.2f} %)"
            _say(f"{arm}: lag p50 {lag[0]:.1f} ms, p99 {lag[1]:.1f} ms; the run took {run_s:.1f} CPU seconds{cost}")
    alone, watched = (statistics.median(p99 for _, p99 in lags[arm]) for arm in ("alone", "watched"))
    _say(f"medians: p99 {watched:.1f} ms watched, {alone:.1f} ms alone (ratio {watched / alone:.2f});")
    _say(f"the page took {100 * statistics.median(shares):.2f} % of the run's CPU seconds")
    return 0


def _measure(folder: Path, updates: int, watched: bool) -> tuple[tuple[float, float], float, float | None]:
    """Train once; return the lag's (p50, p99) in ms, and the CPU seconds of the run and of the page's server."""
    command = [sys.executable, "-m", "benchmarks.watch_cost", "--updates", str(updates), "--train", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as job:
        page = _Viewer(_run_folder(folder, job)) if watched else None
        page_s = None
        while job.poll() is None:
            time.sleep(0.2)
            page_s = page.cpu_s() if page else None
        if page:
            page.close()
        assert job.returncode == 0, f"the run ended with {job.returncode}"
    found = json.loads((folder / "lag.json").read_text())
    return (found["p50"], found["p99"]), found["cpu_s"], page_s


def _run_folder(folder: Path, job: subprocess.Popen[bytes]) -> Path:
    while job.poll() is None:
        if found := [*folder.glob("*/config.yaml")]:
            return found[0].parent
        time.sleep(0.1)
    raise RuntimeError(f"the run ended with {job.returncode} before it had a folder")


class _Viewer:
    """A page's server, and a client that reads all of its output."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "omni_async.cli", "watch", str(run), "--port", "0"]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        found = re.search(r"http://[^/#\s]+", self._server.stdout.readline())
        assert found is not None
        self._process = psutil.Process(self._server.pid)
        self._began = self.cpu_s()  # without the cost of its start
        threading.Thread(target=self._read, args=(f"{found[0]}/events",), daemon=True).start()

    def _read(self, address: str) -> None:
        ended = (OSError, http.client.IncompleteRead)  # the server is ended with the run
        with contextlib.suppress(*ended), urllib.request.urlopen(address, timeout=600) as events:
            while events.read1(65536):
                pass

    def cpu_s(self) -> float:
        user, system = self._process.cpu_times()[:2]
        return user + system - getattr(self, "_began", 0.0)

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


# ---- the process that trains -----------------------------------------------------------------------------------------


class _Timed(asyncio.DefaultEventLoopPolicy):
    """Creates event loops that record the delay of a callback that is due every 20 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.late_ms: list[float] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()

        def tick(due: float) -> None:
            self.late_ms.append(1000 * (loop.time() - due))
            loop.call_at(loop.time() + _EVERY_S, tick, loop.time() + _EVERY_S)

        loop.call_soon(tick, loop.time())
        return loop


def _train(folder: Path, updates: int) -> int:
    from omni_async.cli import main as command

    policy = _Timed()
    asyncio.set_event_loop_policy(policy)
    code = command(["train", str(_RECIPE), *_KEYS, f"run.dir={folder}", f"trainer.updates={updates}"])
    late = statistics.quantiles(policy.late_ms, n=100)
    times = psutil.Process().cpu_times()
    found = {"p50": late[49], "p99": late[98], "cpu_s": sum(times[:4])}
    (folder / "lag.json").write_text(json.dumps(found))
    return code


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

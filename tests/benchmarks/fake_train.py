"""Stands in for `omni-async train`: leaves a run's folder without a model. FAKE_HANG and FAKE_FAIL name the cell that
hangs until SIGINT, or fails; FAKE_STUBBORN one that hangs and does not hear SIGINT."""

from __future__ import annotations

import os
import signal
import sys
import time

from omni_async.config import load
from tests.benchmarks.staleness_world import record


def main() -> int:
    config = load(sys.argv[1], sys.argv[2:])
    name = config.run.name
    own = os.getsid(0) == os.getpid()
    sys.stdout.write(f"threads {os.environ['OMP_NUM_THREADS']}, pid {os.getpid()}, session of its own {own}\n")
    sys.stdout.flush()
    if name == os.environ.get("FAKE_FAIL"):
        sys.stderr.write("".join(f"line {n}\n" for n in range(40)))
        return 3
    if name in (os.environ.get("FAKE_HANG"), os.environ.get("FAKE_STUBBORN")):
        if name == os.environ.get("FAKE_STUBBORN"):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            record(config, [0.0], status="interrupted")  # says that it is there
            time.sleep(60)
        except KeyboardInterrupt:
            sys.stdout.write("heard SIGINT\n")
            return 130
    staleness = {"staleness/mean": float(config.staleness.max_updates)}
    record(config, [0.5] * config.trainer.updates, metrics=[staleness] * config.trainer.updates)
    return 0


if __name__ == "__main__":
    sys.exit(main())

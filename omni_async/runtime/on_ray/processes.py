"""Ends an actor's process, wherever it is.

Ray asks a process to end, and one that is stopped (SIGSTOP, a debugger, a device that hangs) does not answer: it would
keep its memory and its accelerator.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_TIMEOUT_S = 20.0


class Whereabouts(NamedTuple):
    """A process: its number, when it was created (numbers are reused), and its node."""

    pid: int
    created: float
    node: str


def end_process(where: Whereabouts) -> None:
    """Send SIGKILL to the process and its children, if it is still there. A node that is gone has none."""
    if where.node == ray.get_runtime_context().get_node_id():
        _kill(where)
        return
    there = NodeAffinitySchedulingStrategy(where.node, soft=False)
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(_kill)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(remote.options(scheduling_strategy=there).remote(where), timeout=_TIMEOUT_S)


def _kill(where: Whereabouts) -> None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(where.pid)
        if process.create_time() != where.created:
            return
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.Error):
                one.kill()

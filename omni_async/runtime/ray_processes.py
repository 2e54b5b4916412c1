"""The end of an actor's process, wherever it is. Ray asks a process to end, and one that is stopped (SIGSTOP, a debugger, a device that hangs)
does not hear that: it would keep its memory and its accelerator."""

from __future__ import annotations

import contextlib
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_TIMEOUT_S = 20.0


def end_process(pid: int, node: str) -> None:
    """SIGKILL for the process `pid` of the node, if it is still one of Ray's, and for its children. A node that is gone has none."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(_kill)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(remote.options(scheduling_strategy=there).remote(pid), timeout=_TIMEOUT_S)


def _kill(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if "ray" not in " ".join([process.name(), *process.cmdline()[:2]]):
            return  # the number was given to another
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.Error):
                one.kill()

"""Starting or joining Ray, quietly, with workers that look for no model hub."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray


class StartError(RuntimeError):
    """The cluster could not be brought up; the text says what to do."""


def connect(address: str | None, cpus: int) -> bool:
    """Join the cluster at `address`, or start a local Ray with at least `cpus` CPUs. False: this process had one already, and keeps it."""
    if ray.is_initialized():
        return False
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    # Set before any import in workers: vLLM and diffusers look for a hub otherwise.
    options["runtime_env"] = {"env_vars": {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "RAY_DEDUP_LOGS": "0"}}
    if address is None:
        # A record of every call is for the dashboard, which is not started: without it Ray's global store does not grow by 100 MB.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # As many CPUs as the roles ask for: on a small machine they share the real ones, which is what overlap is about.
        options |= {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise StartError(f"run.ray_address: cannot start or join Ray at {address or 'this machine'}: {error}") from error
    return True

"""Starts a Ray of this machine for a measurement, without the project's own supervision of a run's Ray."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from omni_async.runtime.on_ray.connection import reread_environment


@contextmanager
def local_ray(
    cpus: int,
    store_bytes: int | None = None,
    resources: dict[str, float] | None = None,
    gpus: int | None = None,
    **environment: str,
) -> Iterator[None]:
    """Start a local Ray and end it; its workers import packages from this process's path.

    Does nothing if this process has joined one already. `environment`: variables of the workers, in addition to this
    process's. `resources` and `gpus`: pretended ones, in addition to the machine's."""
    if ray.is_initialized():
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    reread_environment()  # Ray keeps the token of a cluster that this process was in before
    ray.init(
        num_cpus=cpus,
        num_gpus=gpus,
        resources=resources,
        object_store_memory=store_bytes,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment}},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    try:
        yield
    finally:
        ray.shutdown()

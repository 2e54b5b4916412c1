"""Starts a Ray of this machine for a measurement: none of the project's own care for a run's Ray is wanted there."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from omni_async.config.role_table import BUILT_IN
from omni_async.runtime.on_ray.connection import reread_environment

# Of all roles together: the hosts here stand for several.
WAITING_CALLS = frozenset().union(*(spec.waiting_calls for spec in BUILT_IN))


@contextmanager
def local_ray(
    cpus: int,
    store_bytes: int | None = None,
    resources: dict[str, float] | None = None,
    gpus: int | None = None,
    **environment: str,
) -> Iterator[None]:
    """Starts a local Ray, whose workers take their packages from where this process does, and ends it. Does nothing
    where this process has joined one already. `environment`: of the workers, beside this process's.
    `resources` and `gpus`: invented ones, in addition to the machine's."""
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

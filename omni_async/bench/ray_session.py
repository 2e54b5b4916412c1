"""Starts one Ray for all runs of a benchmark, so that starting it is no part of any run.

A run that finds Ray started leaves it running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omni_async.config import Config, ConfigError
from omni_async.runtime.placement import plan_placements


@contextmanager
def ray_session(configs: Sequence[Config]) -> Iterator[None]:
    """Run Ray with CPUs for the largest of these jobs, for as long as the block lasts.

    Does nothing where none of them needs it, or it runs already. Raises ConfigError if it cannot be started or joined.
    """
    on_ray = [config for config in configs if config.run.runtime == "ray"]
    if not on_ray:
        yield
        return
    from omni_async.runtime.on_ray.local import prepare_driver

    prepare_driver()  # before Ray is imported

    from omni_async.runtime.cluster import StartError
    from omni_async.runtime.on_ray.connection import connect

    try:
        run = on_ray[0].run
        connection = connect(
            run.ray_address, max(1, *(plan_placements(config).cpus for config in on_ray)), run.startup_timeout_s
        )
    except StartError as error:
        raise ConfigError(str(error)) from error
    try:
        yield
    finally:
        connection.close()

"""Starts one Ray for all runs of a benchmark, so that starting it is no part of any run. A run that finds Ray
started leaves it running."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from omni_async.config import Config, ConfigError

# For the role that has no device: the coordinator.
_CONTROL_CPUS = 1


@contextmanager
def ray_session(configs: Sequence[Config]) -> Iterator[None]:
    """Runs Ray with CPUs for the largest of these jobs, for as long as the block lasts; does nothing where none of
    them needs it, or it runs already. Raises ConfigError if it cannot be started or joined."""
    on_ray = [config for config in configs if config.run.runtime == "ray"]
    if not on_ray:
        yield
        return
    from omni_async.runtime.ray_local import prepare_driver

    prepare_driver()  # before Ray is imported

    from omni_async.runtime.ray_connection import StartError, connect

    try:
        run = on_ray[0].run
        connection = connect(run.ray_address, max(map(_cpus, on_ray)), run.startup_timeout_s)
    except StartError as error:
        raise ConfigError(str(error)) from error
    try:
        yield
    finally:
        connection.close()


def _cpus(config: Config) -> int:
    """Returns the CPUs that a job asks for at most. Emulated devices are none of the machine's."""
    if config.emulation is not None:
        return 1
    workers = {"rollout": config.rollout.workers, "reward": config.reward.workers, "trainer": config.trainer.workers}
    return (
        math.ceil(sum(count * getattr(config.placement, role).cpus for role, count in workers.items())) + _CONTROL_CPUS
    )

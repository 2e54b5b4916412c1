"""One Ray for all runs of a benchmark, so that starting it is no part of any run. A run that finds Ray started leaves it running."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omni_async.config import Config, ConfigError

# For the role that is nobody's device: the coordinator.
_CONTROL_CPUS = 1


@contextmanager
def ray_session(configs: Sequence[Config]) -> Iterator[None]:
    """Ray with room for the largest of these jobs, for as long as the block lasts; nothing where none of them needs it, or it runs already.
    ConfigError if it cannot be started or joined."""
    on_ray = [config for config in configs if config.run.runtime == "ray"]
    if not on_ray:
        yield
        return
    import ray

    if ray.is_initialized():
        yield
        return
    address = on_ray[0].run.ray_address
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    # vLLM and diffusers look for a hub otherwise.
    options["runtime_env"] = {"env_vars": {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "RAY_DEDUP_LOGS": "0"}}
    if address is None:
        options |= {"num_cpus": max(os.cpu_count() or 1, *(_cpus(config) for config in on_ray)), "include_dashboard": False}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"run.ray_address: cannot start or join Ray at {address or 'this machine'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _cpus(config: Config) -> int:
    """What a job asks for at most. Emulated devices are none of the machine's."""
    if config.emulation is not None:
        return 1
    workers = {"rollout": config.rollout.workers, "reward": config.reward.workers, "trainer": config.trainer.workers}
    return math.ceil(sum(count * getattr(config.placement, role).cpus for role, count in workers.items())) + _CONTROL_CPUS

"""Sends rewards that Python code passed, which have no import path, to workers in other processes."""

from __future__ import annotations

from collections.abc import Sequence

from omni_async.config import Config, ConfigError
from omni_async.rewards.failures import told
from omni_async.rewards.functions import PASSED, passed


def passed_rewards(config: Config) -> list[str]:
    """Return the names of rewards that Python code passed, which have no import path."""
    scorers = config.reward.scorers if config.emulation is None else ()
    return [one.name for one in scorers if one.name.startswith(PASSED)]


def pickled(config: Config, names: Sequence[str]) -> dict[str, bytes]:
    """Pickle rewards for workers in other processes. Raises ConfigError, one line, if one cannot be pickled."""
    if not names or config.run.runtime == "inprocess":
        return {}
    from omni_async.runtime.on_ray.local import prepare_driver

    prepare_driver()  # before Ray is imported
    from ray import cloudpickle

    found = {}
    for name in names:
        try:
            found[name] = cloudpickle.dumps(passed(name))
        except Exception as error:  # noqa: BLE001 (pickling runs foreign code)
            why = f"{told(error)}; create such objects inside the function, or set run.runtime=inprocess"
            raise ConfigError(f"reward: {name} cannot be pickled for the reward workers: {why}") from None
    return found

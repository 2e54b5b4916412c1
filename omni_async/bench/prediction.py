"""Predicts an arm's step time: by the law, and by the simulator."""

from __future__ import annotations

from collections.abc import Callable

from omni_async.bench.result import Prediction
from omni_async.config import Config
from omni_async.performance.law import async_step
from omni_async.performance.profile import Profile
from omni_async.simulation.result import times_of
from omni_async.simulation.simulate import simulate

# Mean seconds of a step, in the profile's time.
Simulator = Callable[[Config, Profile], float]


def predict(config: Config, profile: Profile, time_scale: float, simulator: Simulator) -> Prediction:
    """Return seconds as they will be measured: the profile's, times `time_scale`.

    In a schedule where nothing overlaps the law with S = 0 is the sum of all stages;
    streaming inside the step shortens it.

    Args:
        config: the arm's configuration.
        profile: service times in seconds.
        time_scale: measured seconds per second of the profile.
        simulator: returns the mean seconds of a step, in the profile's time; if it fails, the reason is reported."""
    times = times_of(config, profile.scaled(time_scale))
    law = async_step(times, config.staleness.max_updates)
    try:
        simulated = simulator(config, profile) * time_scale
    except Exception as error:  # noqa: BLE001 (the measurements are worth having without it; the reason is reported)
        return Prediction(times=times, law_s=law, not_simulated=f"{type(error).__name__}: {error}")
    return Prediction(times=times, law_s=law, simulated_s=simulated)


def simulated_step(config: Config, profile: Profile) -> float:
    """Simulate the recipe's updates, or 200 if those are more: fewer say less about service times that vary."""
    return simulate(config, profile, seed=config.run.seed).step_s

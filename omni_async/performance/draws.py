"""Draws how long the jobs of one worker take.

Emulated devices on real clocks and simulated roles in virtual time both ask here, so the same worker with the same seed
takes the same times in both.
"""

from __future__ import annotations

import random

from omni_async.performance.profile import Profile


class Draws:
    """The service times of one worker, from a random stream of its own.

    They do not depend on which worker is busy when."""

    def __init__(self, name: str, seed: int, profile: Profile) -> None:
        self.name = name
        stream = random.Random(f"{seed}/{name}")
        self._stages = {stage: service.sampler(stream) for stage, service in profile.stages().items()}

    def seconds(self, stage: str, units: float = 1) -> float:
        """Draw the seconds of one job of this stage of the profile; 0 for no units."""
        return self._stages[stage](units)

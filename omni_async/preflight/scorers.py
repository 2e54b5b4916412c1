"""Tries a recipe's scorers in this process, for `omni-async check`: each is built and scores a synthetic sample.

Waits for the scorers, in threads: for their construction `run.startup_timeout_s` at most, and twice `reward.timeout_s`
for a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from functools import partial

from msgspec.structs import replace

from omni_async.aio.clock import WallClock
from omni_async.config import ConfigError
from omni_async.config.schema import ScoreCache
from omni_async.rewards.addresses import KnownAddresses
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.probe import Probe
from omni_async.rewards.threads import Threads
from omni_async.runtime.inputs import RunInputs


def try_scorers(inputs: RunInputs) -> list[str]:
    """Return notes for the console: which scorers could not be tried, and why.

    Raises ConfigError, one line, if one cannot be built or fails twice in the same way."""
    config = inputs.config
    if inputs.profile is not None or config.data.preferences is not None:
        return []  # no scorer is asked
    probe = Probe.of(config, inputs.prompts)
    if probe is None:
        return []
    if config.placement.reward.gpus > 0:
        return [
            "note: placement.reward.gpus: the scorers are tried when the run starts, where they have an accelerator"
        ]
    with contextlib.redirect_stdout(sys.stderr):  # what is checked is printed, and may be kept as a recipe
        return asyncio.run(_try_scorers(inputs, probe))


async def _try_scorers(inputs: RunInputs, probe: Probe) -> list[str]:
    config, notes = inputs.config, []
    reward = await _built(inputs)

    async def tell(text: str) -> None:
        notes.append(text)

    asked = replace(config.reward, cache=ScoreCache(memory=0))  # what they said before is not tried
    there = {server.name for server in config.reward.servers if server.urls}
    started = [name for name in config.services if name not in there]
    if any(one.params.get("server") in started for one in config.reward.scorers):
        return ["note: reward.servers: the scorers are tried when the run starts, which starts their servers"]
    panel = Panel("check", reward, asked, WallClock(), tell, probe=probe)
    panel.connect(KnownAddresses(config.reward, None))
    try:
        wrong = await panel.try_out()
    finally:
        await panel.close()
    if wrong is not None:
        raise ConfigError(f"reward.scorers: {wrong}")
    untried = "warning: reward.scorers: could not be tried, it may be down"
    return [f"{untried}: {reason}" for reason in panel.outages] + notes


async def _built(inputs: RunInputs) -> LoadedReward:
    timeout_s, threads = inputs.config.run.startup_timeout_s, Threads("scorers")
    building = threads.run(partial(LoadedReward, inputs.config.reward))
    try:
        done, _ = await asyncio.wait({building}, timeout=timeout_s)
        if not done:
            raise ConfigError(f"reward.scorers: not loaded within run.startup_timeout_s = {timeout_s:g}")
        return building.result()
    except WrongScorer as error:
        raise ConfigError(f"reward.scorers: {error}") from None
    finally:
        threads.close()

"""Tries a recipe's scorers in this process, for `omni-async check`: each is built and scores a synthetic sample.

Waits for the scorers, in threads: at most `run.startup_timeout_s` for their construction, and twice `reward.timeout_s`
for a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from omni_async.aio.clock import WallClock
from omni_async.aio.threads import in_daemon_thread
from omni_async.config import Config, ConfigError
from omni_async.config.redact import one_line
from omni_async.config.reward import ScoreCache
from omni_async.rewards import registry
from omni_async.rewards.base import Outage, WrongScorer
from omni_async.rewards.health import ScorerHealth
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.probe import Probe
from omni_async.rewards.scorers.addresses import KnownAddresses
from omni_async.rewards.threads import Threads
from omni_async.roles.builders import built_program
from omni_async.roles.inputs import RunInputs
from omni_async.rollout.calls import try_program, untried

_MOST_PARTS = 6
_SLOW_S = 1.0


class Tried(NamedTuple):
    """A line for each scorer that scored the synthetic sample, and notes for the user."""

    answers: Sequence[str] = ()
    notes: Sequence[str] = ()


def try_scorers(inputs: RunInputs) -> Tried:
    """Return each scorer's score and time, and why some scorers could not be tried.

    Raises ConfigError, one line, if a scorer cannot be built or fails twice in the same way."""
    config = inputs.config
    if inputs.profile is not None or not config.scored:
        return Tried()  # no scorer is called
    probe = Probe.of(config, inputs.prompts)
    if probe is None:
        return Tried()
    if config.placement.reward.gpus > 0:
        where = "when the run starts, where they have an accelerator"
        return Tried(notes=[f"note: placement.reward.gpus: the scorers are tried {where}"])
    with contextlib.redirect_stdout(sys.stderr):  # stdout holds the checked recipe, which may be redirected to a file
        judges = asyncio.run(_try_program(config, probe))
        tried = asyncio.run(_try_scorers(inputs, probe))
        return tried._replace(notes=[*judges, *tried.notes])


async def _try_program(config: Config, probe: Probe) -> list[str]:
    """Try the judges of the rollout program. Returns notes for the user. ConfigError if one is wrong."""
    timeout_s = config.run.startup_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            program = await in_daemon_thread(built_program, config)
    except TimeoutError:
        raise ConfigError(f"rollout.program: not built within run.startup_timeout_s = {timeout_s:g}") from None
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    if program is None:
        return []
    try:
        wrong = await try_program(program, probe)
    finally:
        if (close := getattr(program, "close", None)) is not None:
            await close()
    if wrong is not None:
        raise ConfigError(wrong)
    why = untried(program)
    return [] if why is None else [f"warning: a judge could not be tried, it may be down: {why}"]


async def _try_scorers(inputs: RunInputs, probe: Probe) -> Tried:
    config, notes = inputs.config, list[str]()
    pools = {pool.name for pool in config.reward.pools if pool.resources.gpus > 0}
    here = tuple(scorer for scorer in config.reward.scorers if scorer.pool not in pools)
    if len(here) < len(config.reward.scorers):
        notes.append(
            "note: reward.pools: scorers of pools with gpus are tried when the run starts, which gives them one"
        )
    if not here:
        return Tried(notes=notes)
    config = replace(config, reward=replace(config.reward, scorers=here))
    reward = await _built(config)

    async def tell(text: str) -> None:
        notes.append(text)

    asked = replace(config.reward, cache=ScoreCache(memory=0))  # cached scores would skip the trial
    there = {server.name for server in config.reward.servers if server.urls}
    started = [name for name in config.services if name not in there]
    known = KnownAddresses(config.reward, None)

    async def addresses(role: str) -> dict[str, str]:
        if role in started:
            raise Outage(f"it asks {role!r}, which only a run starts")
        return await known(role)

    async with Panel("check", reward, asked, WallClock(), tell, probe=probe, addresses=addresses) as panel:
        wrong = await panel.try_out()
    if wrong is not None:
        raise ConfigError(f"reward.scorers: {wrong}")
    untried = "warning: reward.scorers: could not be tried, it may be down"
    costs = dict(zip(reward.formula.labels, map(registry.cost_of, here), strict=True))
    answered = [one for one in panel.scorers if one.health.probed]
    slow = "a sample on the CPU; placement.reward.gpus, or a pool with gpus, gives its model an accelerator"
    for one in answered:
        if costs[one.label] == "model" and one.health.probe_s >= _SLOW_S:
            notes.append(f"warning: scorer {one.label!r} takes {one.health.probe_s:.3g} s {slow}")
    down = [f"{untried}: {reason}" for reason in panel.outages]
    return Tried([_said(one.label, one.health) for one in answered], down + notes)


def _said(label: str, health: ScorerHealth) -> str:
    """Return a line with a scorer's score of the first synthetic sample, and the time that it took."""
    score = health.probed[0]
    parts = "".join(f", {name} {value:.4g}" for name, value in sorted(score.parts.items())[:_MOST_PARTS])
    return one_line(f"scorer {label!r}: {score.value:.4g}{parts} for a synthetic sample, in {health.probe_s:.3g} s")


async def _built(config: Config) -> LoadedReward:
    timeout_s, threads = config.run.startup_timeout_s, Threads("scorers")
    building = threads.run(partial(LoadedReward.load, config.reward))
    try:
        done, _ = await asyncio.wait({building}, timeout=timeout_s)
        if not done:
            raise ConfigError(f"reward.scorers: not loaded within run.startup_timeout_s = {timeout_s:g}")
        return building.result()
    except WrongScorer as error:
        raise ConfigError(f"reward.scorers: {error}") from None
    finally:
        threads.close()

"""Scores samples with a recipe's reward, in batches, as a run's reward worker does.

Waits for the scorers and for the pauses between attempts. The scorers' answers, `reward.timeout_s` a call, or
`reward.outage_s` for a scorer that is down end the wait. Media of a few dozen samples are in memory at a time. A sample
that cannot be scored has an error in place of a score; the others continue.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from omni_async.aio.backoff import Backoff
from omni_async.aio.clock import WallClock
from omni_async.aio.threads import in_daemon_thread
from omni_async.commands.scoring.local_servers import local_servers
from omni_async.commands.scoring.samples import Sample, find_samples
from omni_async.config import Config, ConfigError
from omni_async.config.redact import one_line, redact_text
from omni_async.config.reward import ScoreCache
from omni_async.control.reward_formula import RewardFormula
from omni_async.data.prompts import PromptCheck
from omni_async.plugins.families import MediaShape
from omni_async.rewards import registry
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.rewards.panel import Panel
from omni_async.rewards.probe import Probe
from omni_async.rewards.scorers.addresses import KnownAddresses
from omni_async.types import Answer, Score

# Samples with media in memory, which may be scored concurrently.
_MOST_AT_ONCE = 32


class Scored(Struct):
    """A sample's scores, one per completed repetition; `error` is the reason of the last failure.

    `cached`: how many of its scorers' answers came from `reward.cache`."""

    sample: Sample
    scores: list[Score] = field(default_factory=list)
    error: str | None = None
    cached: int = 0


def rows_of(config: Config, paths: Sequence[Path]) -> list[Scored]:
    """Return a row without scores for every sample at the paths. Raises ConfigError, one line."""
    prompts = (config.data.prompts, config.validation.prompts if config.validation is not None else None)
    images_in = [Path(file).parent for file in prompts if file is not None]
    found = find_samples([*paths], config.data.max_prompt_chars, images_in, config.data.columns)
    return [Scored(sample) for sample in found]


def prompt_checks(config: Config, samples: Sequence[Sample]) -> list[PromptCheck]:
    """Check the scorers without building them, and return their requirements of a prompt. Raises ConfigError."""
    if not config.reward.scorers:
        raise ConfigError(f"reward.scorers: empty; registered are {', '.join(registry.names())}")
    made = [MediaShape(part, ()) for part in {part: None for sample in samples for part in sample.parts}]  # type: ignore[arg-type]
    asked = []
    for number, scorer in enumerate(config.reward.scorers):
        try:
            registry.check(scorer, made)
            asked.append(registry.prompt_check(scorer))
        except ValueError as error:
            raise ConfigError(f"reward.scorers.{number}: {error}") from None
    return [*filter(None, asked), RewardFormula(config.reward).missing]


def build_reward(config: Config) -> LoadedReward:
    """Build the scorers. Raises ConfigError."""
    try:
        return LoadedReward.load(config.reward, config.placement.reward.gpus)
    except (WrongScorer, ValueError) as error:
        raise ConfigError(f"reward.scorers: {error}") from None


async def score_samples(
    config: Config,
    reward: LoadedReward,
    rows: list[Scored],
    checks: Sequence[PromptCheck],
    repeat: int,
    progress: Callable[[int], None],
) -> None:
    """Score every sample `repeat` times, into `rows`; a cancellation keeps the scores so far.

    Starts the judge servers of the scorers. Uses `reward.cache` unless there are repetitions.

    Args:
        config: the recipe.
        reward: its scorers.
        rows: one per sample.
        checks: the scorers' requirements of prompts.
        repeat: how often each sample is scored.
        progress: takes the number of scores that are made or given up.

    Raises:
        ConfigError: a scorer fails for a synthetic sample, twice with the same error; or a judge server does not start.
        ScorerHangs: too many of its calls do not return."""
    for row in rows:
        row.error = next((missing for check in checks if (missing := check(row.sample.prompt)) is not None), None)
    probe = _probe(config, [row for row in rows if row.error is None])
    cache = config.reward.cache if repeat == 1 else ScoreCache(memory=0)
    async with local_servers(config.reward, config.run.startup_timeout_s, _tell) as started:
        addresses = KnownAddresses(config.reward, started)
        reward_config = replace(config.reward, cache=cache)
        async with Panel("score", reward, reward_config, WallClock(), _tell, probe=probe, addresses=addresses) as panel:
            if (wrong := await panel.try_out()) is not None:
                raise ConfigError(f"reward.scorers: {wrong}")
            ended = 0
            for _ in range(repeat):
                todo = [row for row in rows if row.error is None]
                left = len(rows) - len(todo)
                await _score_all(config, panel, todo, lambda done, base=ended + left: progress(base + done))  # type: ignore[misc]
                ended += len(rows)
            progress(ended)


def _probe(config: Config, rows: Sequence[Scored]) -> Probe | None:
    """Return a run's sample for trying the scorers, if its media are of the kind that is scored here."""
    made = {shape.part for shape in config.rollout.sampling.media()}
    if not made or not all(made == {*row.sample.parts} for row in rows):
        return None
    return Probe.of(config, [row.sample.prompt for row in rows])


async def _score_all(config: Config, panel: Panel, rows: list[Scored], progress: Callable[[int], None]) -> None:
    """Score every row once more. Failed rows are retried together, except rows that fail in the same way again."""
    pauses = Backoff(config.reward.backoff_s, config.reward.backoff_max_s)
    room, reading = asyncio.Semaphore(max(_MOST_AT_ONCE, config.reward.batch)), asyncio.Lock()
    left, reasons, done = rows, dict[int, str](), 0
    for attempt in range(config.reward.retries + 1):
        if attempt:
            await asyncio.sleep(pauses.pause_s(attempt))
        again: list[Scored] = []

        async def score(row: Scored, again: list[Scored] = again) -> None:
            nonlocal done
            async with room:
                answer = await _score_one(panel, row, reading)
            if answer.score is not None:
                row.scores.append(answer.score)
                row.cached = answer.cached
            elif answer.fault == "retry" and reasons.get(id(row)) != answer.error:
                reasons[id(row)] = str(answer.error)
                again.append(row)
                return
            else:
                row.error = answer.error
            done += 1
            progress(done)

        async with asyncio.TaskGroup() as tasks:
            for row in left:
                tasks.create_task(score(row))
        left = again
        if not left:
            break
    for row in left:
        row.error = reasons[id(row)]
    progress(len(rows))


async def _score_one(panel: Panel, row: Scored, reading: asyncio.Lock) -> Answer:
    """Score a sample; if a scorer is down, wait until it answers or is given up."""
    try:
        async with reading:  # in their order
            media = await in_daemon_thread(row.sample.media)
    except ConfigError as error:
        return Answer(error=one_line(str(error)), fault="reject")
    while True:
        if panel.down:
            await panel.recover()
        answer = await panel.score(media, row.sample.prompt, id(row), whole=True)
        if answer.fault != "outage":
            return answer


async def _tell(text: str) -> None:
    sys.stderr.write(f"{one_line(redact_text(text))}\n")

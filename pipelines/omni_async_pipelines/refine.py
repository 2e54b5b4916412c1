"""Implements a rollout program: generate an image, let a scorer judge it, edit it, and repeat for every further call.

The first call gets the prompt unchanged; every other call gets a text built from the verdict, and the judged image. So
one model learns to generate and to correct itself; its family's prompts carry an image (Qwen-Image-Edit). Imports no
torch.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec.structs import replace

from omni_async.aio.clock import WallClock
from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import Coalescer
from omni_async.config import Config
from omni_async.config.reward import Reward
from omni_async.config.reward import Scorer as ScorerSection
from omni_async.config.section import Section, doc
from omni_async.data.image_files import drawn_image
from omni_async.data.prompts import PromptCheck
from omni_async.media import Media
from omni_async.plugins.families import PipelineFamily
from omni_async.plugins.programs import RolloutProgram
from omni_async.rewards import registry
from omni_async.rewards.base import Addresses, ScoreError, Scorer, is_async, require_scores, shown_to
from omni_async.rewards.failures import is_outage, place_of, shown_as, told
from omni_async.rewards.health import ScorerHealth
from omni_async.rewards.probe import Probe
from omni_async.rewards.scorers.addresses import KnownAddresses
from omni_async.rewards.threads import Threads
from omni_async.rollout.calls import Draw
from omni_async.types import Prompt, Score

_FIELDS = ("prompt", "target", "read", "score")


class RefineSettings(Section, kw_only=True, frozen=True):
    judge: Annotated[ScorerSection, doc("The scorer that judges before every edit; its `weight` is not used.")]
    edit: Annotated[
        str,
        doc("Text of an edit; {prompt} and {target} are the prompt file's, {read} and {score} what the judge found."),
    ] = "{prompt}"


def _problems(config: Config, family: PipelineFamily) -> Iterator[str]:
    program = config.rollout.program
    assert program is not None
    settings: RefineSettings = program.settings
    key = "rollout.program"
    if family.prompt_images < 1:
        yield f"{key}: {program.name!r} edits images, and prompts of model.pipeline {family.name!r} carry none"
    if (made := [one.part for one in config.rollout.sampling.media()]) != ["image"]:
        yield f"{key}: {program.name!r} edits images, but the samples are {' and '.join(made)}"
    try:
        named = [name for _, name, *_ in string.Formatter().parse(settings.edit) if name is not None]
    except ValueError as error:
        yield f"{key}.settings.edit: {error}; write a brace as {{{{ or }}}}, got {settings.edit!r}"
        return
    for name in named:
        if name not in _FIELDS:
            known = ", ".join(f"{{{field}}}" for field in _FIELDS)
            yield f"{key}.settings.edit: {{{name}}} is not known, expected some of {known}"
            return
    try:
        settings.edit.format(**dict.fromkeys(_FIELDS, ""))
    except (ValueError, LookupError) as error:
        yield f"{key}.settings.edit: {error}; what it names are texts, got {settings.edit!r}"
    try:
        registry.check(settings.judge, config.rollout.sampling.media())
    except ValueError as error:
        yield f"{key}.settings.judge: {error}"


def _prompt_check(config: Config) -> PromptCheck | None:
    assert config.rollout.program is not None
    return registry.prompt_check(config.rollout.program.settings.judge)


class Refine:
    """The program: `calls` calls, with `judge` before every call except the first.

    The judge is named `label`. It does not block the event loop, and scores all waiting samples in one call."""

    def __init__(
        self, calls: int, edit: str, section: ScorerSection, judge: Scorer, reward: Reward | None = None
    ) -> None:
        """Store the settings.

        Args:
            calls: of a sample.
            edit: the text of an edit.
            section: the judge's in the recipe; its name is shown in errors, its secrets are not.
            judge: called before every edit.
            reward: its time-out and pauses apply to the trial of the judge."""
        self._calls, self._edit, self._label, self._judge = calls, edit, section.name, judge
        self._reward = reward or Reward()
        self._limits = ScorerSection(name=section.name, params=section.params)
        self._secrets = registry.secrets_of(section)
        self.untried: str | None = None
        self._judging = Coalescer(self._judge_all)

    def _health(self, threads: Threads) -> ScorerHealth:
        async def silent(text: str) -> None:
            """Report nothing: a judge that is down is reported with the samples that it fails."""

        judge, settings = (self._label, self._judge, self._secrets), (self._limits, self._reward)
        return ScorerHealth(*judge, *settings, WallClock(), threads, silent, is_tried=True)

    async def try_out(self, probe: Probe) -> str | None:
        """Return why the judge is wrong, if it fails twice in the same way for a synthetic sample.

        `untried`: why it could not be tried, if it is down or hangs."""
        threads = Threads(self._label)
        health = self._health(threads)
        try:
            wrong = await health.try_out(probe)
            self.untried = f"rollout.program.settings.judge: {health.outage}" if health.down and wrong is None else None
        finally:
            threads.close()
        return None if wrong is None else f"rollout.program.settings.judge: {wrong}"

    def connect(self, addresses: Addresses) -> None:
        """Pass the judge a function that returns the addresses of a role."""
        self._health(Threads(self._label)).calls.connect(addresses)

    async def close(self) -> None:
        """Let the judge free its resources, such as connections."""
        await self._health(Threads(self._label)).calls.close()

    async def __call__(self, prompt: Prompt, draw: Draw) -> None:
        media = await draw(prompt)
        for call in range(1, self._calls):
            score = await self._judging.send((media, prompt))
            if isinstance(score, Exception):
                raise score
            image = drawn_image(media, f"image of call {call - 1}")
            media = await draw(replace(prompt, text=self._text(prompt, score), images=(image,)))

    def _text(self, prompt: Prompt, score: Score) -> str:
        return self._edit.format(
            prompt=prompt.text, target=prompt.target or "", read=score.text or "", score=f"{score.value:.3g}"
        )

    async def _judge_all(self, drawn: list[tuple[Media, Prompt]]) -> Sequence[Score | Exception]:
        """Judge samples together and, if that fails, each alone, so that a sample that cannot be judged fails alone."""
        try:
            shown = shown_to(self._label, self._judge, [one for one, _ in drawn])
            prompts = [prompt for _, prompt in drawn]
            scores: Any = (
                await self._judge.score(shown, prompts)
                if is_async(self._judge)
                else await in_daemon_thread(self._judge.score, shown, prompts)
            )
            return require_scores(self._label, scores, prompts)
        except BaseException as raised:  # foreign code; raised in the samples that it fails
            error = shown_as(raised, self._secrets)
            if not isinstance(error, Exception):
                raise
            if len(drawn) == 1 or is_outage(error):
                return [ScoreError(f"judge {self._label!r}: {told(error)}{place_of(error)}")] * len(drawn)
        return [verdict for one in drawn for verdict in await self._judge_all([one])]


def build(config: Config) -> Refine:
    """Build the program of a recipe, with its judge."""
    assert config.rollout.program is not None
    settings: RefineSettings = config.rollout.program.settings
    judge = registry.build(settings.judge)
    program = Refine(config.rollout.calls, settings.edit, settings.judge, judge, config.reward)
    program.connect(KnownAddresses(config.reward, None))
    return program


REFINE = RolloutProgram("omni_async_pipelines.refine:build", RefineSettings, _problems, _prompt_check)

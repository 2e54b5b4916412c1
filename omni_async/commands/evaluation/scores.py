"""Scores generated samples with a recipe's reward, as `omni-async score` does; existing scores are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_async.checkpoint.contents import reward_contents
from omni_async.commands.evaluation.gallery import Gallery
from omni_async.commands.evaluation.models import Model
from omni_async.commands.evaluation.results import Failed
from omni_async.commands.scoring.samples import Sample
from omni_async.commands.scoring.scoring import Scored, build_reward, prompt_checks, score_samples
from omni_async.config import Config
from omni_async.config.redact import redact
from omni_async.data.prompts import PromptCheck
from omni_async.types import SampleRequest

# Keys of the reward that do not affect a score: how scorers are called.
_HOW = {"workers", "batch", "streaming", "timeout_s", "hedge_s", "retries", "backoff_s", "backoff_max_s", "outage_s"}
_HOW |= {"probe", "cache", "pools", "servers"}


def record(config: Config) -> dict[str, Any]:
    """Return the inputs of scores, besides the samples, as plain values without credentials."""
    tree: dict[str, Any] = redact(msgspec.to_builtins(config.reward))
    models = {server["name"]: server["model"] for server in tree["servers"]}  # scorers refer to servers by name
    contents = reward_contents(config)  # a scorer's model may be replaced in place
    return {key: value for key, value in tree.items() if key not in _HOW} | {"judges": models, "contents": contents}


def checks_of(config: Config, requests: Sequence[SampleRequest]) -> list[PromptCheck]:
    """Check the scorers without building them, before any drawing; return their requirements of prompts.

    Raises ConfigError."""
    parts = [shape.part for shape in config.rollout.sampling.media()]
    return prompt_checks(config, [Sample("", {part: Path() for part in parts}, each.prompt) for each in requests[:1]])


async def score_all(
    config: Config,
    models: Sequence[Model],
    requests: Sequence[SampleRequest],
    checks: Sequence[PromptCheck],
    gallery: Gallery,
    progress: Callable[[int], None],
) -> list[Failed]:
    """Score every drawn sample without a score, into the gallery; return the samples that remain unscored.

    Args:
        config: only its `reward` is used.
        models: the models whose samples are scored.
        requests: their samples.
        checks: the scorers' requirements of a prompt.
        gallery: the store of samples and scores.
        progress: takes the number of samples that are scored or given up.

    Raises:
        ConfigError: as `score_samples`, or a scorer cannot be built.
        ScorerHangs: as `score_samples`.
        OSError: a score cannot be written."""
    there = gallery.scores
    waiting: list[tuple[str, SampleRequest, Scored]] = []
    failed: list[Failed] = []
    for model in models:
        for request in requests:
            sample = gallery.sample(model.label, request)
            if (request.prompt.index, request.sample) in there[model.label]:
                continue
            if sample is None:
                failed.append(Failed(model.label, request.prompt.index, request.sample, "it was not drawn"))
                continue
            waiting.append((model.label, request, Scored(sample)))
    done = len(models) * len(requests) - len(waiting)
    progress(done)
    if not waiting:
        return failed
    witnesses = _witnesses(models, requests, gallery)
    unwritten = dict(enumerate(waiting))

    def write(made: int) -> None:
        for number, (label, request, row) in [*unwritten.items()]:
            if row.scores:
                gallery.add_score(label, request.prompt, request.sample, row.scores[0])
                del unwritten[number]
        progress(done + max(0, made - len(witnesses)))

    try:
        rows = [*witnesses, *(row for _, _, row in waiting)]
        await score_samples(config, build_reward(config), rows, checks, 1, write)
    finally:
        write(0)
    for label, request, row in unwritten.values():
        failed.append(Failed(label, request.prompt.index, request.sample, row.error or "it was not scored"))
    return failed


def _witnesses(models: Sequence[Model], requests: Sequence[SampleRequest], gallery: Gallery) -> list[Scored]:
    """Return samples with scores, to be scored once more; empty without scores.

    If all remaining samples fail but a scorer answers for these, the scorer is not down, and the command stops waiting
    for the rest. There are two, because a scorer is tried with two prompts."""
    there = gallery.scores
    for model in models:
        for request in requests:
            if (request.prompt.index, request.sample) in there[model.label]:
                witness = gallery.sample(model.label, request)
                return [Scored(witness) for _ in range(2)] if witness is not None else []
    return []

"""Measures one run from its folder: step times from `metrics.jsonl`, and their parts from `trace.json`.

Every moment of an update belongs to exactly one category, seen from the trainer. The trainer's own activity takes
precedence. A moment without it belongs to the first active item of this list:

1. generation (on every engine, or as the `tail` of generation on some engines)
2. a shared device passing to another role
3. scoring
4. weights being sent, including the time for devices to pass to engines first

Otherwise it is `idle`: messages, bookkeeping, scheduling.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from omni_async.commands.bench.result import Measured, Stage
from omni_async.config import Config, ConfigError
from omni_async.config.draws import drawn
from omni_async.performance.measure_tokens import is_validation, tokens_of
from omni_async.performance.profile import Profile, load_profile
from omni_async.records.read.trace_file import read_trace
from omni_async.records.write.activity import Activity, busy_fractions
from omni_async.records.write.files import read_lines
from omni_async.records.write.summary import read_summary
from omni_async.records.write.timeline import Interval, at_least, clip, length, union
from omni_async.simulation.simulate import Steady
from omni_async.types import Span
from omni_async.worker import Worker

# A mean over fewer updates is not meaningful.
_FEWEST = 4
# Stage -> the role whose devices it keeps busy, the kinds of its spans, and its name in a profile.
_STAGES = {
    "generation": ("rollout", ("generate",), "generate"),
    "reward": ("reward", ("score",), "score"),
    "training": ("trainer", ("train", "proximal"), "train"),
    "export": ("trainer", ("export",), "export"),
    "publish": ("publisher", ("publish",), "publish"),
}
# Kinds of spans -> their category: the trainer's own kinds, and kinds of others that it may be waiting for.
_TRAINER = {"train": "training", "proximal": "recompute", "export": "export"}
_OTHERS = {"score": "reward", "switch": "switch", "publish": "weights", "stage": "weights", "swap": "weights"}


class NotMeasurableError(ValueError):
    """A run's folder lacks data for the measurement; the text names the missing part."""


def enough_updates(max_updates: int, steps: int = 1, publish_every: int = 1) -> int:
    """Return the smallest `trainer.updates` that allows a meaningful measurement of at least `steps` updates.

    Its steady part is whole periods of S + 1 updates and of publishes.

    Args:
        max_updates: the staleness budget S.
        steps: updates to measure.
        publish_every: updates from one publish to the next."""
    period = math.lcm(max_updates + 1, publish_every)
    steady = math.ceil(max(_FEWEST, steps) / period) * period
    return max(2, max_updates + 2) + steady + max_updates


def steady_part(config: Config) -> tuple[int, int]:
    """Return the updates (first, last) at whose ends measuring starts and stops, as the simulator does.

    The first max(2, S + 2) updates fill the pipeline, the last S drain it, and whole periods remain between them.
    Raises ConfigError if too few are left."""
    updates, budget = config.trainer.updates, config.staleness.max_updates
    filling = max(2, budget + 2)
    needed = filling + _FEWEST + budget
    if updates < needed:
        raise ConfigError(
            f"trainer.updates: {updates} are too few: with a staleness budget of {budget} the first"
            f" {filling} and the last {budget} are not measured, and {_FEWEST} must be left; at least"
            f" --updates {needed}"
        )
    steady = Steady(config, updates)
    return steady.first, steady.last


def measure(run: Path, config: Config) -> Measured:
    """Measure a finished run from its folder `run`; `config` is the run's configuration.

    Raises NotMeasurableError if something is missing there."""
    try:
        summary = read_summary(run / "summary.json")
        lines = [json.loads(line) for line in read_lines(run / "metrics.jsonl")]
        # In the clock's seconds. Lines of validation rounds have no such time.
        finished = {line["update"]: line["finished"] for line in lines if "finished" in line}
        spans = [*read_trace(run / "trace.json")]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise NotMeasurableError(f"{run}: {type(error).__name__}: {error}") from error
    updates = config.trainer.updates
    if sorted(finished) != list(range(1, updates + 1)):
        raise NotMeasurableError(f"{run / 'metrics.jsonl'}: expected updates 1 to {updates}, found {len(finished)}")
    first, last = steady_part(config)
    steps = tuple(after - before for before, after in pairwise(finished[update] for update in range(first, last + 1)))
    step = sum(steps) / len(steps)
    start, end = finished[first], finished[last]
    categories = attribute(spans, start, end, config.rollout.workers)
    images = config.trainer.groups_per_update * config.rollout.group_size / step
    made = [span for span in spans if span.kind == "generate" and start <= span.end < end and not is_validation(span)]
    tokens = fmean(map(tokens_of, made)) if made and drawn(config) == "tokens" else None
    return Measured(
        updates=len(steps),
        step_s=step,
        steps_s=steps,
        images_per_s=images,
        images_per_s_per_device=images / summary.devices,
        tokens_per_s=None if tokens is None else images * tokens,
        attribution={name: seconds / len(steps) for name, seconds in categories.items()},
        stages=_stages(spans, start, end, len(steps), config, run_profile(run)),
        busy=busy_fractions(Activity((start, math.inf), spans), end),
        staleness=summary.staleness,
        peak_memory_bytes=summary.peak_memory_bytes,
    )


def run_profile(run: Path) -> Profile | None:
    """Load the service times of the run itself, if it recorded them."""
    try:
        return load_profile(str(run / "profile.json"))
    except ConfigError:
        return None


def attribute(spans: Sequence[Span], start: float, end: float, engines: int) -> dict[str, float]:
    """Return the seconds of [start, end) per category.

    Args:
        spans: the run's spans.
        start, end: in the clock's seconds, as in the spans.
        engines: number of engines, idle ones included."""
    times: dict[str, list[Interval]] = defaultdict(list)
    generating: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        inside = clip([(span.start, span.end)], start, end)
        if span.kind == "generate":
            generating[span.actor] += inside
            times["tail"] += inside
        elif span.kind in _OTHERS:
            times[_OTHERS[span.kind]] += inside
        elif span.kind in _TRAINER and Worker.parse(span.actor).role == "trainer":
            times[_TRAINER[span.kind]] += inside
    times["generation"] = list(at_least(engines, list(generating.values())))
    result, claimed = {}, list[Interval]()
    for name in ("training", "recompute", "export", "generation", "tail", "switch", "reward", "weights"):
        before = length(claimed)
        claimed = union([*claimed, *times[name]])
        result[name] = length(claimed) - before
    return {**result, "idle": max(0.0, end - start - length(claimed))}


def _stages(
    spans: Sequence[Span], start: float, end: float, updates: int, config: Config, profile: Profile | None
) -> dict[str, Stage]:
    workers = {"rollout": config.rollout.workers, "reward": config.reward.workers}
    result = {}
    for stage, (role, kinds, profiled) in _STAGES.items():
        per_actor: dict[str, list[Interval]] = defaultdict(list)
        for span in spans:
            if span.kind in kinds and Worker.parse(span.actor).role == role:
                per_actor[span.actor].append((span.start, span.end))
        busy = sum(length(clip(union(times), start, end)) for times in per_actor.values())
        variation = profile.stages()[profiled].variation if profile is not None else None
        result[stage] = Stage(busy / workers.get(role, 1) / updates, variation)
    return result

"""Fits the profile that an emulated run or a simulation replays to the spans of a run.

Only the steady part counts: with four or more updates, the first is excluded, while devices warm up and buffers fill.
Stages without spans stay at zero, and `assumed` names them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from msgspec import UNSET

from omni_async.config import Config
from omni_async.config.draws import drawn
from omni_async.config.reward import Reward
from omni_async.config.rollout import Rollout
from omni_async.control.reward_formula import labels_of
from omni_async.performance.measure_tokens import Stay, is_validation, stays_of, token_times, tokens_of
from omni_async.performance.profile import NOTHING, Payload, Profile, ScorerTime, ServiceTime, fit
from omni_async.types import Span

_FEWEST_UPDATES_TO_SKIP_ONE = 4


def measure(spans: Sequence[Span], config: Config, *, samples_per_rank: float, name: str, source: str) -> Profile:
    """Return the profile of the job that recorded `spans`.

    Args:
        spans: All spans of the run.
        config: The recipe that was run.
        samples_per_rank: Samples of a group, on the rank with most samples.
        name: The profile's name.
        source: The measured run; the method is added."""
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    start = _steady_from(by_kind["train"])
    steady: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.start >= start:
            steady[span.kind].append(span)

    switch = _each(steady["switch"])
    # A span begins with the wait for a boundary between two denoising steps; the shortest span has almost no wait.
    swap = min(map(_seconds, steady["swap"]), default=0.0)
    made = by_kind["generate"], by_kind["swap"], swap
    tokens, method = None, f"a generation job being up to {config.rollout.max_batch} completions of one engine in a row"
    if drawn(config) == "tokens":
        tokens, method = token_times(_stays(*made, config, start)), "those of tokens with the reading of prompts"
        generate = NOTHING if tokens is None else tokens.in_batches
    else:
        generate = fit([(float(len(job)), seconds) for job, seconds in _generate_jobs(*made, config.rollout, start)])
    stages: dict[str, Any] = {
        "generate": generate,
        "score": _of_scorer(steady["score"]),
        "proximal": fit([(samples_per_rank, _seconds(span)) for span in steady["proximal"]]),
        "train": fit([(samples_per_rank, _seconds(span)) for span in steady["train"] if "group" in span.args]),
        "step": _each([span for span in steady["train"] if "step" in span.args]),
        "export": _each(steady["export"]),
        "publish": _fixed(_publish(steady["publish"], by_kind["stage"])),
        # An engine on a shared device wakes up while it swaps.
        "swap": ServiceTime(fixed_s=max(0.0, swap - switch.mean())) if swap else NOTHING,
        "switch": switch,
    }
    missing = [stage for stage, service in stages.items() if service == NOTHING]
    return Profile(
        name=name,
        source=f"{source}; service times from its spans, {method}",
        assumed=f"zero because the run shows nothing of it: {', '.join(missing)}" if missing else "",
        payload=_payload(by_kind["generate"], by_kind["publish"]),
        scorers=_scorers(steady["score"], config.reward),
        tokens=UNSET if tokens is None else tokens,
        **stages,
    )


def _of_scorer(calls: Iterable[Span]) -> ServiceTime:
    return fit([(float(span.args.get("samples", 1)), _seconds(span)) for span in calls])


def _scorers(calls: Iterable[Span], reward: Reward) -> dict[str, ScorerTime]:
    """Return the times of scorers by label, and the maximum of concurrent calls of each in one worker.

    A scorer of a pool runs in the pool's workers, and a reward worker calls its share of them. Empty if the only scorer
    runs one call at a time: `score` then contains everything."""
    by_label: dict[str, list[Span]] = defaultdict(list)
    for span in calls:
        by_label[str(span.args.get("scorer", ""))].append(span)
    pools = {pool.name: pool.workers for pool in reward.pools}
    asks = {
        label: pools[one.pool] / reward.workers
        for label, one in zip(labels_of(reward.scorers), reward.scorers, strict=True)
        if one.pool is not None
    }
    found = {
        label: ScorerTime(_of_scorer(own), math.ceil(most_at_once(own) / asks.get(label, 1)))
        for label, own in sorted(by_label.items())
    }
    return found if len(found) > 1 or any(one.concurrency != 1 for one in found.values()) else {}


def most_at_once(calls: Iterable[Span]) -> int:
    """Return the maximum number of concurrent calls of one actor."""
    per_actor: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for span in calls:
        per_actor[span.actor] += [(span.start, 1), (span.end, -1)]
    most = 1
    for ends in per_actor.values():
        running = 0
        for _, change in sorted(ends):  # an end before a start of the same instant
            running += change
            most = max(most, running)
    return most


def _steady_from(train: Iterable[Span]) -> float:
    """Return the end of the first update, or minus infinity if there are too few to exclude one."""
    ends = _last_ends(span for span in train if "version" in span.args)
    return ends[min(ends)] if len(ends) >= _FEWEST_UPDATES_TO_SKIP_ONE else float("-inf")


def _last_ends(spans: Iterable[Span]) -> dict[int, float]:
    """Return when the last span of each version ended."""
    ends: dict[int, float] = {}
    for span in spans:
        version = span.args.get("version", -1)
        ends[version] = max(span.end, ends.get(version, span.end))
    return ends


def _seconds(span: Span) -> float:
    return max(0.0, span.end - span.start)


def _each(spans: Iterable[Span]) -> ServiceTime:
    """Return the service time of jobs without units: all of it is fixed."""
    return _fixed([_seconds(span) for span in spans])


def _fixed(seconds: Sequence[float]) -> ServiceTime:
    found = fit([(1.0, one) for one in seconds])
    return ServiceTime(fixed_s=found.unit_s, quantiles=found.quantiles)


def _publish(publishes: Iterable[Span], stages: Iterable[Span]) -> list[float]:
    """Return the seconds from the copy until the last engine has staged the version; engines swap later."""
    staged = _last_ends(stages)
    return [max(0.0, staged.get(span.args.get("version", -1), span.end) - span.start) for span in publishes]


def _stays(answers: Iterable[Span], swaps: Iterable[Span], pause: float, config: Config, start: float) -> list[Stay]:
    """Return the stays of training answers that joined their engines at `start` or later."""
    if config.rollout.engine == "transformers" and config.emulation is None:  # its answers wait for the longest
        jobs = _generate_jobs(answers, swaps, pause, config.rollout, start)
        return [Stay(start, max(map(tokens_of, job)), float(len(job)), seconds) for job, seconds in jobs for _ in job]
    swapped = {engine: sorted(span.end for span in own) for engine, own in _by_actor(swaps).items()}
    return [
        stay
        for engine, own in _by_actor(answers).items()
        for stay in stays_of(own, swapped.get(engine, []), pause, config.rollout.max_batch)
        if stay.joined >= start
    ]


def _by_actor(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.actor].append(span)
    return found


def _generate_jobs(
    generated: Iterable[Span], swaps: Iterable[Span], pause: float, rollout: Rollout, start: float
) -> Iterator[tuple[list[Span], float]]:
    """Yield the samples and busy seconds of every engine's jobs that began at `start` or later.

    Pauses for swaps are excluded, and so are jobs with validation samples, which have other step counts."""
    swapped = _by_actor(swaps)
    for engine, own in _by_actor(generated).items():
        for begin, samples in _batches(own, rollout.max_batch, rollout.calls * rollout.num_inference_steps):
            if begin >= start and not any(map(is_validation, samples)):
                job_end = samples[-1].end
                pauses = sum(pause for span in swapped.get(engine, ()) if begin < span.end <= job_end)
                yield samples, max(0.0, job_end - begin - pauses)


def _batches(spans: Iterable[Span], max_batch: int, steps: int) -> list[tuple[float, list[Span]]]:
    """Return the jobs behind one engine's overlapping samples: each start, and its samples in the order of their ends.

    Samples wait inside the engine, so a span shows when a sample was done, not how long it was computed. Samples that
    end together (less than half a denoising step apart) were computed together; such clusters are combined up to
    `max_batch` samples. A job begins when the previous one ended, or when its first sample came if the engine was idle
    until then."""
    ordered = sorted(spans, key=lambda span: span.end)
    apart = 0.5 * median(map(_seconds, ordered)) / steps
    batches: list[tuple[float, list[Span]]] = []
    for cluster in _clusters(ordered, apart):
        free = batches[-1][1][-1].end if batches else float("-inf")
        begin = max(free, min(span.start for span in cluster))
        if begin == free and len(batches[-1][1]) + len(cluster) <= max_batch:
            batches[-1][1].extend(cluster)
        else:
            batches.append((begin, cluster))
    return batches


def _clusters(ordered: Sequence[Span], apart: float) -> Iterator[list[Span]]:
    """Yield runs of spans that end less than `apart` after the previous one."""
    cluster: list[Span] = []
    for span in ordered:
        if cluster and span.end - cluster[-1].end >= apart:
            yield cluster
            cluster = []
        cluster.append(span)
    if cluster:
        yield cluster


def _payload(generated: Sequence[Span], publishes: Sequence[Span]) -> Payload:
    """Average the sizes recorded in the spans."""

    def mean(spans: Sequence[Span], size: str) -> float:
        return fmean([span.args[size] for span in spans if size in span.args] or [0])

    return Payload(
        trajectory=round(mean(generated, "trajectory_bytes")),
        media=round(mean(generated, "media_bytes")),
        weights=round(1e6 * mean(publishes, "megabytes")),
    )

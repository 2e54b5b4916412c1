"""Fits the profile that an emulated run or a simulation replays to the spans of a run.

Only the steady part counts: of four updates and more the first is left out, where devices warm up and buffers fill.
Stages that a run has no spans of stay at zero, and `assumed` names them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from omni_async.config import Config
from omni_async.config.schema import Rollout
from omni_async.performance.profile import Payload, Profile
from omni_async.performance.service import NOTHING, ServiceTime, fit
from omni_async.types import Span

Job = tuple[float, float]  # units, seconds

_FEWEST_UPDATES_TO_SKIP_ONE = 4


def measure(spans: Sequence[Span], config: Config, *, samples_per_rank: float, name: str, source: str) -> Profile:
    """Return the profile of the job that left `spans`.

    `samples_per_rank`: of a group, on the rank that has most. `source` says what was measured; how is added."""
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    start = _steady_from(by_kind["train"])
    steady = {kind: [span for span in found if span.start >= start] for kind, found in by_kind.items()}

    def of(kind: str) -> list[Span]:
        return steady.get(kind, [])

    switch = _each(of("switch"))
    swap = _swap(of("swap"))
    stages = {
        "generate": fit(_generate_jobs(by_kind["generate"], by_kind["swap"], swap, config.rollout, start)),
        "score": fit([(float(span.args.get("samples", 1)), _seconds(span)) for span in of("score")]),
        "proximal": fit([(samples_per_rank, _seconds(span)) for span in of("proximal")]),
        "train": fit([(samples_per_rank, _seconds(span)) for span in of("train") if "group" in span.args]),
        "step": _each([span for span in of("train") if "step" in span.args]),
        "export": _each(of("export")),
        "publish": _fixed(_publish(of("publish"), by_kind["stage"])),
        # An engine on a shared device wakes up while it swaps.
        "swap": ServiceTime(fixed_s=max(0.0, swap - switch.mean())) if swap else NOTHING,
        "switch": switch,
    }
    missing = [stage for stage, service in stages.items() if service == NOTHING]
    return Profile(
        name=name,
        source=(
            f"{source}; service times from its spans, a generation job being up to {config.rollout.max_batch}"
            " completions of one engine in a row"
        ),
        assumed=f"zero because the run shows nothing of it: {', '.join(missing)}" if missing else "",
        payload=_payload(by_kind["generate"], by_kind["publish"]),
        **stages,
    )


def _steady_from(train: Iterable[Span]) -> float:
    """Return the end of the first update, or minus infinity where there are too few to leave one out."""
    ends: dict[int, float] = {}
    for span in train:
        if "version" in span.args:
            ends[span.args["version"]] = max(span.end, ends.get(span.args["version"], span.end))
    return ends[min(ends)] if len(ends) >= _FEWEST_UPDATES_TO_SKIP_ONE else float("-inf")


def _seconds(span: Span) -> float:
    return max(0.0, span.end - span.start)


def _each(spans: Iterable[Span]) -> ServiceTime:
    """Return the service time of jobs that have no units: all of it is fixed."""
    return _fixed([_seconds(span) for span in spans])


def _fixed(seconds: Sequence[float]) -> ServiceTime:
    found = fit([(1.0, one) for one in seconds])
    return ServiceTime(fixed_s=found.unit_s, quantiles=found.quantiles)


def _swap(swaps: Sequence[Span]) -> float:
    """Return the seconds an engine pauses.

    A span begins with the wait for a boundary between two denoising steps, of which the shortest has next to nothing.
    """
    return min(map(_seconds, swaps), default=0.0)


def _publish(publishes: Iterable[Span], stages: Iterable[Span]) -> list[float]:
    """Measure from the copy to the last engine that has staged the version; engines swap later."""
    staged: dict[int, float] = {}
    for span in stages:
        version = span.args.get("version", -1)
        staged[version] = max(span.end, staged.get(version, span.end))
    return [max(0.0, staged.get(span.args.get("version", -1), span.end) - span.start) for span in publishes]


def _generate_jobs(
    generated: Iterable[Span], swaps: Iterable[Span], pause: float, rollout: Rollout, start: float
) -> list[Job]:
    """Return (samples, busy seconds) of every engine's jobs that began at `start` or later.

    Pauses for swaps are left out, and jobs with validation samples, which take other steps."""
    per_engine: dict[str, list[Span]] = defaultdict(list)
    for span in generated:
        per_engine[span.actor].append(span)
    swapped: dict[str, list[float]] = defaultdict(list)
    for span in swaps:
        swapped[span.actor].append(span.end)
    jobs = []
    for engine, own in per_engine.items():
        for job in _batches(own, rollout.max_batch, rollout.num_inference_steps):
            if job.begin >= start and not any(str(span.args.get("sample", "")).startswith("v") for span in job.samples):
                pauses = sum(pause for end in swapped[engine] if job.begin < end <= job.end)
                jobs.append((float(len(job.samples)), max(0.0, job.end - job.begin - pauses)))
    return jobs


@dataclass
class _Batch:
    """Samples that an engine was busy with from `begin` to `end`."""

    begin: float
    end: float
    samples: list[Span]


def _batches(spans: Iterable[Span], max_batch: int, steps: int) -> list[_Batch]:
    """Return the jobs behind one engine's overlapping samples.

    Samples wait inside the engine, so a span says when one was done and not for how long it was computed. Samples that
    are done together (less than half a denoising step apart) were computed together; such clusters are put together up
    to `max_batch` samples. A job begins where the one before it ended, or when its first sample came if the engine was
    idle until then."""
    ordered = sorted(spans, key=lambda span: span.end)
    apart = 0.5 * median(map(_seconds, ordered)) / steps
    batches: list[_Batch] = []
    for cluster in _clusters(ordered, apart):
        free = batches[-1].end if batches else float("-inf")
        begin = max(free, min(span.start for span in cluster))
        if begin == free and len(batches[-1].samples) + len(cluster) <= max_batch:
            batches[-1].samples += cluster
            batches[-1].end = cluster[-1].end
        else:
            batches.append(_Batch(begin, cluster[-1].end, cluster))
    return batches


def _clusters(ordered: Sequence[Span], apart: float) -> Iterator[list[Span]]:
    """Yield runs of spans that end less than `apart` after the one before."""
    cluster: list[Span] = []
    for span in ordered:
        if cluster and span.end - cluster[-1].end >= apart:
            yield cluster
            cluster = []
        cluster.append(span)
    if cluster:
        yield cluster


def _payload(generated: Iterable[Span], publishes: Iterable[Span]) -> Payload:
    """Average the sizes that the spans say they carried."""
    samples = [span.args for span in generated]

    def mean(found: Iterable[float]) -> int:
        numbers = list(found)
        return round(fmean(numbers)) if numbers else 0

    return Payload(
        trajectory=mean(args["trajectory_bytes"] for args in samples if "trajectory_bytes" in args),
        media=mean(args["media_bytes"] for args in samples if "media_bytes" in args),
        weights=mean(1e6 * span.args["megabytes"] for span in publishes if "megabytes" in span.args),
    )

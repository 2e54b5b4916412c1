"""Reports a stage profile: a `Profile` for emulated devices, and a table with the published throughput."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.stage_profile_measure import Measured, Timing
from omni_async.performance.profile import Payload, Profile, ServiceTime, fit

# A GPU's share of an update of 512 images on 4 GPUs, and the update's optimizer steps.
_SAMPLES, _STEPS = 128, 2
# Images per GPU and second, reward and hand-overs of the GPUs included: verl-project/verl-omni,
# docs/algo/performance.md.
_PUBLISHED = (("LoRA rank 64, guidance, 4 H800", 0.305), ("all weights, no guidance, 4 H200", 0.510))


def to_profile(measured: Measured, rest: Profile, setting: str) -> Profile:
    """Fit stages over the batch sizes; stages not measured here (scoring, hand-overs) are `rest`'s.

    A version is the first payload that was published."""
    payload, publish = next(iter(measured.publish.items()))
    return Profile(
        name=f"stage_profile_{payload}",
        source=f"python -m benchmarks.stage_profile on one {measured.device}: {setting}",
        assumed=(
            f"Scoring and hand-overs of a device are those of profile {rest.name}; a version is on its way for as long"
            " as its bytes take to check."
        ),
        generate=_fitted(measured.generate),
        score=rest.score,
        proximal=_fitted(measured.recompute),
        train=_fitted(measured.train),
        step=_fitted(measured.step),
        export=ServiceTime(publish.export_s),
        publish=ServiceTime(publish.stage_s),
        swap=ServiceTime(publish.swap_s),
        switch=rest.switch,
        payload=Payload(measured.trajectory_bytes, measured.media_bytes, publish.nbytes),
    )


def _fitted(timings: Sequence[Timing]) -> ServiceTime:
    return fit([(timing.units, seconds) for timing in timings for seconds in timing.seconds])


def seconds_per_update(profile: Profile, batch: int, train_batch: int, *, recompute: bool) -> float:
    """Return the seconds of one device for its share of an update, without reward and hand-overs.

    The stages run one after the other, each in its own batches."""
    trained = profile.train.mean(train_batch) + (profile.proximal.mean(train_batch) if recompute else 0.0)
    samples = _SAMPLES * (profile.generate.mean(batch) / batch + trained / train_batch)
    return samples + _STEPS * profile.step.mean() + profile.export.mean() + profile.publish.mean() + profile.swap.mean()


def to_markdown(measured: Measured, profile: Profile, setting: str, *, published: bool) -> str:
    """Format the table. `published`: the model has the published size, so the published throughput is comparable."""
    lines = [
        f"# Stages on one {measured.device}",
        "",
        setting,
        "",
        "| stage | samples | seconds | samples/s | peak GiB |",
        "|---|---|---|---|---|",
    ]
    for stage in ("generate", "recompute", "train"):
        lines += [_row(stage, timing) for timing in getattr(measured, stage)]
    lines += [f"| {stage} | {n} | out of memory | | |" for stage, n in measured.out_of_memory.items()]
    if measured.step:
        lines.append(f"| optimizer step | | {min(t.median_s for t in measured.step):.3f} | | |")
    lines += ["", "| payload | GB | copied out s | checked s | switched to s |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {p.nbytes / 1e9:.3f} | {p.export_s:.3f} | {p.stage_s:.3f} | {p.swap_s:.3f} |"
        for name, p in measured.publish.items()
    ]
    if published:
        lines += ["", *_comparison(measured, profile)]
    return "\n".join(lines) + "\n"


def _row(stage: str, timing: Timing) -> str:
    peak = f"{timing.peak_bytes / 2**30:.1f}" if timing.peak_bytes is not None else "–"
    return f"| {stage} | {timing.units} | {timing.median_s:.3f} | {timing.units / timing.median_s:.3f} | {peak} |"


def _comparison(measured: Measured, profile: Profile) -> list[str]:
    """Compare with the published throughput, with the largest batches that fit."""
    batch, train_batch = max(t.units for t in measured.generate), max(t.units for t in measured.train)
    recomputed, bypassed = (
        seconds_per_update(profile, batch, train_batch, recompute=recompute) for recompute in (True, False)
    )
    others = _SAMPLES * profile.score.mean(batch) / batch + 3 * profile.switch.mean()
    rows = [
        ("here, log-probs recomputed", _SAMPLES / recomputed),
        ("here, ratio to the policy that drew the sample (bypass)", _SAMPLES / bypassed),
        (
            "here, log-probs recomputed, with scoring and hand-overs as assumed in the profile",
            _SAMPLES / (recomputed + others),
        ),
        *((f"published: {title}", value) for title, value in _PUBLISHED),
    ]
    return [
        f"One stage after the other, {_SAMPLES} images for an update, as one of 4 GPUs:",
        "",
        "| | images/GPU/s |",
        "|---|---|",
        *(f"| {title} | {value:.3f} |" for title, value in rows),
        "",
        (
            "Differences of setting: measured on one device, without communication between GPUs and without a reward"
            " model; weights and prompt"
        ),
        (
            "embeddings are random, LoRA is trained whatever the published row trains (master weights, gradients and"
            " moments of all weights take"
        ),
        "327 GB) and nothing is offloaded to the host. The published numbers are of whole steps, with all of that.",
    ]

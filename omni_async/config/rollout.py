"""Defines the section `rollout`: engines, sampling, the noise of trained steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from omni_async.config.section import (
    MOST_STEPS,
    SCHEDULERS,
    NumSteps,
    Pause,
    Retries,
    Seconds,
    Section,
    Updates,
    Workers,
    doc,
    most,
)

Step = Annotated[int, most(MOST_STEPS)]


class WindowConfig(Section, kw_only=True, frozen=True):
    size: Annotated[NumSteps, doc("Number of consecutive trained (noisy) steps.")] = 2
    range: Annotated[tuple[Step, Step], doc("The window lies in [lo, hi): its start is one of lo..hi-size.")] = (0, 5)
    schedule: Annotated[
        Literal["uniform", "random", "progressive", "decay", "exp_decay"],
        doc(
            "Where windows start. `uniform`: drawn for every group (Flow-GRPO-Fast). The others share one window per"
            " update (MixGRPO): `random` draws it; `progressive` stays `updates_per_position` updates, then moves by"
            " `stride`; `decay` and `exp_decay` stay ever shorter at later positions."
        ),
    ] = "uniform"
    updates_per_position: Annotated[Updates, doc("Updates a sliding window stays at its first position.")] = 25
    stride: Annotated[int, doc("Steps a sliding window moves by.", ge=1, most=MOST_STEPS)] = 1
    at_end: Annotated[Literal["roll_back", "stay"], doc("After the last position: start over, or stay there.")] = (
        "roll_back"
    )
    decay_rate: Annotated[float, doc("`exp_decay`: rate k per position beyond `decay_from`.", gt=0, most=1000)] = 0.1
    decay_from: Annotated[int, doc("`exp_decay`: the first position that is left sooner.", ge=0, most=MOST_STEPS)] = 0


class Sde(Section, kw_only=True, frozen=True):
    kind: Annotated[
        Literal["flow", "cps", "dance"], doc("Transition kernel: Flow-GRPO, coefficient-preserving, or DanceGRPO.")
    ] = "flow"
    noise_level: Annotated[float, doc("Noise scale n (eta).", gt=0, le=10)] = 0.7
    window: Annotated[WindowConfig, doc("Which steps carry noise and are trained.")] = WindowConfig()


class Emulated(Section, kw_only=True, frozen=True):
    step_s: Annotated[Pause, doc("Seconds of one denoising step of a batch.")] = 0.01
    per_sample_s: Annotated[Pause, doc("Seconds each further sample of the batch adds to a step.")] = 0.0
    decode_s: Annotated[Pause, doc("Seconds to decode one sample.")] = 0.0


class Bucket(Section, kw_only=True, frozen=True):
    sampling: Annotated[Any, doc("What differs from `rollout.sampling`; the same keys.")] = msgspec.field(
        default_factory=dict
    )
    weight: Annotated[float, doc("Share of the groups, relative to the other buckets'.", gt=0, most=1_000_000)] = 1.0


class Rollout(Section, kw_only=True, frozen=True):
    engine: Annotated[Literal["vllm_omni", "diffusers", "emulated"], doc("Engine that generates the samples.")] = (
        "vllm_omni"
    )
    workers: Annotated[Workers, doc("Number of engines, one producer actor each.")] = 1
    group_size: Annotated[
        int, doc("Samples per prompt group.", "all samples of a group are alive at once", ge=1, most=10_000)
    ] = 8
    sampling: Annotated[
        Any, doc("Size, guidance and whatever else changes what is drawn; the keys are the model family's, see below.")
    ] = msgspec.field(default_factory=dict)
    buckets: Annotated[
        tuple[Bucket, ...],
        doc(
            "Several resolutions, frame counts or other settings in one run: every group draws one of these, for all of"
            " its samples. Empty: all are drawn as `rollout.sampling` says."
        ),
    ] = ()
    num_inference_steps: Annotated[
        int, doc("Denoising steps N of a training sample.", SCHEDULERS, ge=2, most=MOST_STEPS)
    ] = 10
    max_inflight: Annotated[
        int,
        doc(
            "Samples one engine holds at a time (running and queued).",
            "an engine holds them all in memory",
            ge=1,
            most=100_000,
        ),
    ] = 16
    max_batch: Annotated[
        int,
        doc("Samples one denoising step computes together.", "an engine holds them all in memory", ge=1, most=100_000),
    ] = 16
    batching: Annotated[
        Literal["step", "request"],
        doc(
            "`step`: samples join and leave an engine's batch at every denoising step, and new weights are swapped in"
            " between steps. `request`: a batch is drawn from noise to the end before the next begins, which costs less"
            " per step; needs `weights.swap: request` or `drain`."
        ),
    ] = "step"
    timeout_s: Annotated[Seconds, doc("Longest a sample may take before the engine counts as hung.")] = 600.0
    retries: Annotated[
        Retries, doc("Times a failed sample is generated again (same seed) before its group is dropped.")
    ] = 2
    share_initial_noise: Annotated[
        bool, doc("Samples of a group start from the same noise (lowers reward variance).")
    ] = False
    sde: Annotated[
        Sde | None,
        doc("How noise is injected; null: plain ODE sampling, for objectives that train on the final latents alone."),
    ] = Sde()
    emulated: Annotated[Emulated, doc("Service times of the emulated engine.")] = Emulated()

    @property
    def specs(self) -> tuple[Any, ...]:
        """The `SamplingSpec` of every bucket; the one of `sampling` where there are none."""
        return tuple(bucket.sampling for bucket in self.buckets) or (self.sampling,)

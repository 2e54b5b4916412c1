"""Defines the section `rollout`: engines, sampling, the noise of trained steps."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from omni_async.config.section import (
    A_PROCESS_EACH,
    IN_A_GROUP,
    MOST_SECONDS,
    MOST_STEPS,
    MOST_UPDATES,
    MOST_WORKERS,
    SCHEDULERS,
    Section,
    most,
)
from omni_async.config.section import doc as _doc

Step = Annotated[int, most(MOST_STEPS)]


class WindowConfig(Section, kw_only=True, frozen=True):
    size: Annotated[int, _doc("Number of consecutive trained (noisy) steps.", SCHEDULERS, ge=1, most=MOST_STEPS)] = 2
    range: Annotated[tuple[Step, Step], _doc("The window lies in [lo, hi): its start is one of lo..hi-size.")] = (0, 5)
    schedule: Annotated[
        Literal["uniform", "random", "progressive", "decay", "exp_decay"],
        _doc(
            "Where windows start. `uniform`: drawn for every group (Flow-GRPO-Fast). The others share one window per"
            " update (MixGRPO): `random` draws it; `progressive` stays `updates_per_position` updates, then moves by"
            " `stride`; `decay` and `exp_decay` stay ever shorter at later positions."
        ),
    ] = "uniform"
    updates_per_position: Annotated[
        int, _doc("Updates a sliding window stays at its first position.", ge=1, most=MOST_UPDATES)
    ] = 25
    stride: Annotated[int, _doc("Steps a sliding window moves by.", ge=1, most=MOST_STEPS)] = 1
    at_end: Annotated[Literal["roll_back", "stay"], _doc("After the last position: start over, or stay there.")] = (
        "roll_back"
    )
    decay_rate: Annotated[float, _doc("`exp_decay`: rate k per position beyond `decay_from`.", gt=0, most=1000)] = 0.1
    decay_from: Annotated[int, _doc("`exp_decay`: the first position that is left sooner.", ge=0, most=MOST_STEPS)] = 0


class Sde(Section, kw_only=True, frozen=True):
    kind: Annotated[
        Literal["flow", "cps", "dance"], _doc("Transition kernel: Flow-GRPO, coefficient-preserving, or DanceGRPO.")
    ] = "flow"
    noise_level: Annotated[float, _doc("Noise scale n (eta).", gt=0, le=10)] = 0.7
    window: Annotated[WindowConfig, _doc("Which steps carry noise and are trained.")] = msgspec.field(
        default_factory=WindowConfig
    )


class Emulated(Section, kw_only=True, frozen=True):
    step_s: Annotated[float, _doc("Seconds of one denoising step of a batch.", ge=0, most=MOST_SECONDS)] = 0.01
    per_sample_s: Annotated[
        float, _doc("Seconds each further sample of the batch adds to a step.", ge=0, most=MOST_SECONDS)
    ] = 0.0
    decode_s: Annotated[float, _doc("Seconds to decode one sample.", ge=0, most=MOST_SECONDS)] = 0.0


class Bucket(Section, kw_only=True, frozen=True):
    sampling: Annotated[Any, _doc("What differs from `rollout.sampling`; the same keys.")] = msgspec.field(
        default_factory=dict
    )
    weight: Annotated[float, _doc("Share of the groups, relative to the other buckets'.", gt=0, most=1_000_000)] = 1.0


class Rollout(Section, kw_only=True, frozen=True):
    engine: Annotated[Literal["vllm_omni", "diffusers", "emulated"], _doc("Engine that generates the samples.")] = (
        "vllm_omni"
    )
    workers: Annotated[
        int, _doc("Number of engines, one producer actor each.", A_PROCESS_EACH, ge=1, most=MOST_WORKERS)
    ] = 1
    group_size: Annotated[int, _doc("Samples per prompt group.", IN_A_GROUP, ge=1, most=10_000)] = 8
    sampling: Annotated[
        Any,
        _doc("Size, guidance and whatever else changes what is drawn; the keys are the model family's, see below."),
    ] = msgspec.field(default_factory=dict)
    buckets: Annotated[
        tuple[Bucket, ...],
        _doc(
            "Several resolutions, frame counts or other settings in one run: every group draws one of these, for all of"
            " its samples. Empty: all are drawn as `rollout.sampling` says."
        ),
    ] = ()
    num_inference_steps: Annotated[
        int, _doc("Denoising steps N of a training sample.", SCHEDULERS, ge=2, most=MOST_STEPS)
    ] = 10
    max_inflight: Annotated[
        int,
        _doc(
            "Samples one engine holds at a time (running and queued).",
            "an engine holds them all in memory",
            ge=1,
            most=100_000,
        ),
    ] = 16
    max_batch: Annotated[
        int,
        _doc("Samples one denoising step computes together.", "an engine holds them all in memory", ge=1, most=100_000),
    ] = 16
    batching: Annotated[
        Literal["step", "request"],
        _doc(
            "`step`: samples join and leave an engine's batch at every denoising step, and new weights are swapped in"
            " between steps. `request`: a batch is drawn from noise to the end before the next begins, which costs less"
            " per step; needs `weights.swap: request` or `drain`."
        ),
    ] = "step"
    timeout_s: Annotated[
        float, _doc("Longest a sample may take before the engine counts as hung.", gt=0, most=MOST_SECONDS)
    ] = 600.0
    retries: Annotated[
        int, _doc("Times a failed sample is generated again (same seed) before its group is dropped.", ge=0, most=1000)
    ] = 2
    share_initial_noise: Annotated[
        bool, _doc("Samples of a group start from the same noise (lowers reward variance).")
    ] = False
    sde: Annotated[
        Sde | None,
        _doc("How noise is injected; null: plain ODE sampling, for objectives that train on the final latents alone."),
    ] = msgspec.field(default_factory=Sde)
    emulated: Annotated[Emulated, _doc("Service times of the emulated engine.")] = msgspec.field(
        default_factory=Emulated
    )

    @property
    def specs(self) -> tuple[Any, ...]:
        """Returns the `SamplingSpec` of every bucket; the one of `sampling` where there are none."""
        return tuple(bucket.sampling for bucket in self.buckets) or (self.sampling,)

"""Defines the section `rollout`: engines, and how they generate samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config.section import (
    MOST_STEPS,
    SCHEDULERS,
    Alive,
    InMemory,
    NumSteps,
    Pause,
    Retries,
    Seconds,
    Section,
    SizeText,
    Updates,
    Workers,
    most,
)

Step = Annotated[int, most(MOST_STEPS)]


class WindowConfig(Section, kw_only=True, frozen=True):
    size: NumSteps = 2
    """Number of consecutive trained (noisy) steps."""
    range: tuple[Step, Step] = (0, 5)
    """The window is inside [lo, hi): its start is one of lo..hi-size."""
    schedule: Literal["uniform", "random", "progressive", "decay", "exp_decay"] = "uniform"
    """Start of windows. `uniform`: drawn for every group (Flow-GRPO-Fast). The others use the same window for a whole
    update (MixGRPO): `random` draws it; `progressive` stays `updates_per_position` updates, then moves by `stride`;
    `decay` and `exp_decay` stay ever shorter at later positions."""
    updates_per_position: Updates = 25
    """Updates a sliding window stays at its first position."""
    stride: Annotated[int, most(MOST_STEPS, ge=1)] = 1
    """Steps a sliding window moves by."""
    at_end: Literal["roll_back", "stay"] = "roll_back"
    """After the last position: restart at the first, or stay."""
    decay_rate: Annotated[float, most(1000, gt=0)] = 0.1
    """`exp_decay`: rate k per position beyond `decay_from`."""
    decay_from: Annotated[int, most(MOST_STEPS, ge=0)] = 0
    """`exp_decay`: the last position with the full stay."""


class Sde(Section, kw_only=True, frozen=True):
    kind: Literal["flow", "cps", "dance"] = "flow"
    """Transition kernel: Flow-GRPO, coefficient-preserving, or DanceGRPO."""
    noise_level: Annotated[float, Meta(gt=0, le=10)] = 0.7
    """Noise scale n (eta)."""
    window: WindowConfig = WindowConfig()
    """The steps that carry noise and are trained."""


class Emulated(Section, kw_only=True, frozen=True):
    step_s: Pause = 0.01
    """Seconds of one denoising step of a batch."""
    per_sample_s: Pause = 0.0
    """Seconds each further sample of the batch adds to a step."""
    decode_s: Pause = 0.0
    """Seconds to decode one sample."""


class Bucket(Section, kw_only=True, frozen=True):
    sampling: Any = msgspec.field(default_factory=dict)
    """The keys that differ from `rollout.sampling`."""
    weight: Annotated[float, most(1_000_000, gt=0)] = 1.0
    """Share of the groups, relative to the other buckets'."""


class Program(Section, kw_only=True, frozen=True):
    name: str
    """A registered rollout program; `omni-async list` shows them."""
    settings: Any = msgspec.field(default_factory=dict)
    """Settings of the program; its package defines the keys."""


AttentionBackend = Annotated[
    str,
    Meta(
        pattern=r"^(auto|[A-Z][A-Z0-9_]{0,39})\Z",
        extra={"why": "'auto', or upper-case letters, digits and '_', at most 40"},
    ),
]
EngineArg = Annotated[
    str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,79}\Z", extra={"why": "letters, digits and '_', at most 80"})
]


class Rollout(Section, kw_only=True, frozen=True):
    engine: Literal["vllm_omni", "diffusers", "vllm", "transformers", "emulated"] = "vllm_omni"
    """Engine that generates the samples. `vllm_omni` and `diffusers` draw latents, `vllm` and `transformers` draw
    tokens."""
    workers: Workers = 1
    """Number of engines, one producer actor each."""
    group_size: Alive = 8
    """Samples per prompt group."""
    sampling: Any = msgspec.field(default_factory=dict)
    """Size, guidance and other settings of generation; the model family defines the keys, see below."""
    buckets: tuple[Bucket, ...] = ()
    """Several resolutions, frame counts or other settings in one run: every group draws a bucket for all its samples.
    Empty: all samples use `rollout.sampling`."""
    num_inference_steps: Annotated[int, most(MOST_STEPS, SCHEDULERS, ge=2)] = 10
    """Denoising steps N of a training sample."""
    max_inflight: InMemory = 16
    """Samples one engine holds at a time (running and queued)."""
    max_batch: InMemory = 16
    """Samples one denoising step computes together."""
    batching: Literal["step", "request"] = "step"
    """`step`: samples join and leave an engine's batch at every denoising step, and new weights are swapped in between
    steps. `request`: all steps of a batch run before the next batch begins, which costs less per step; needs
    `weights.swap: request` or `drain`."""
    conditioning_cache: SizeText = "512MiB"
    """Cache of encoded prompts on an engine's device: prompts repeated in a group, an epoch or a validation round are
    encoded once. The least recently used prompt is evicted first."""
    offload: bool = False
    """Keep text encoders in host memory, and on the device only while an engine encodes prompts missing from its cache.
    For `diffusers` and `vllm_omni`."""
    attention_backend: AttentionBackend = "auto"
    """vLLM-Omni's name of the attention kernels, such as `FLASH_ATTN` or `TORCH_SDPA`. `auto`: `TORCH_SDPA` for float32
    weights, which flash kernels refuse; otherwise the device's default."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the model's repeated layers; only for `vllm_omni` and `vllm`. `auto`: on an accelerator whose compiler is
    supported."""
    engine_args: dict[EngineArg, Any] = msgspec.field(default_factory=dict)
    """More arguments of vLLM-Omni's engine, such as `vae_use_tiling: true`, or of vLLM's, such as `max_model_len: 512`;
    keys that the run sets are refused."""
    timeout_s: Seconds = 600.0
    """Longest time of a sample before the engine counts as hung."""
    retries: Retries = 2
    """Times a failed sample is generated again (same seed) before its group is dropped."""
    share_initial_noise: bool = False
    """Samples of a group start from the same noise (lowers reward variance)."""
    share_prefix: bool = False
    """Take the noise-free steps before the window once for all samples of a group on an engine (Flow-GRPO-Fast); needs
    `share_initial_noise`. For `diffusers` and `vllm_omni`."""
    sde: Sde | None = Sde()
    """Injection of noise; null: plain ODE sampling, for objectives that train on the final latents alone."""
    calls: Annotated[int, most(100, ge=1)] = 1
    """Calls of the engine for one sample by a program, for example to generate, judge and edit."""
    program: Program | None = None
    """Program that runs between the calls of a sample; required for several calls."""
    emulated: Emulated = Emulated()
    """Service times of the emulated engine."""

    @property
    def specs(self) -> tuple[Any, ...]:
        """Return the `SamplingSpec` of every bucket; of `sampling` alone without buckets."""
        return tuple(bucket.sampling for bucket in self.buckets) or (self.sampling,)

    @property
    def as_one_call(self) -> Rollout:
        """Return the same section without a program, because a profile's time for a sample includes all its calls."""
        return msgspec.structs.replace(self, calls=1, program=None)

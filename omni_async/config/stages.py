"""Defines the sections of the three stages: `rollout`, `reward` and `trainer`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config.section import (
    MOST_BYTES,
    MOST_STEPS,
    MOST_UPDATES,
    MOST_WORKERS,
    SCHEDULERS,
    Alive,
    InMemory,
    NumSteps,
    Pause,
    Plain,
    Positive,
    Retries,
    Seconds,
    Section,
    SizeText,
    Updates,
    Urls,
    Workers,
    bytes_of,
    most,
)

Step = Annotated[int, most(MOST_STEPS)]


class Resources(Section, kw_only=True, frozen=True):
    cpus: Annotated[float, most(10_000, "no machine has so many", gt=0)] = 1.0
    """CPUs of one actor; also its thread count."""
    gpus: Annotated[float, most(1000, "no machine has so many", ge=0)] = 0.0
    """Accelerators of one actor. Its process and children see no others; 0 hides all."""


class WindowConfig(Section, kw_only=True, frozen=True):
    size: NumSteps = 2
    """Number of consecutive trained (noisy) steps."""
    range: tuple[Step, Step] = (0, 5)
    """The window lies in [lo, hi): its start is one of lo..hi-size."""
    schedule: Literal["uniform", "random", "progressive", "decay", "exp_decay"] = "uniform"
    """Where windows start. `uniform`: drawn for every group (Flow-GRPO-Fast). The others share one window per update
    (MixGRPO): `random` draws it; `progressive` stays `updates_per_position` updates, then moves by `stride`; `decay`
    and `exp_decay` stay ever shorter at later positions."""
    updates_per_position: Updates = 25
    """Updates a sliding window stays at its first position."""
    stride: Annotated[int, most(MOST_STEPS, ge=1)] = 1
    """Steps a sliding window moves by."""
    at_end: Literal["roll_back", "stay"] = "roll_back"
    """After the last position: start over, or stay there."""
    decay_rate: Annotated[float, most(1000, gt=0)] = 0.1
    """`exp_decay`: rate k per position beyond `decay_from`."""
    decay_from: Annotated[int, most(MOST_STEPS, ge=0)] = 0
    """`exp_decay`: the first position that is left sooner."""


class Sde(Section, kw_only=True, frozen=True):
    kind: Literal["flow", "cps", "dance"] = "flow"
    """Transition kernel: Flow-GRPO, coefficient-preserving, or DanceGRPO."""
    noise_level: Annotated[float, Meta(gt=0, le=10)] = 0.7
    """Noise scale n (eta)."""
    window: WindowConfig = WindowConfig()
    """Which steps carry noise and are trained."""


class Emulated(Section, kw_only=True, frozen=True):
    step_s: Pause = 0.01
    """Seconds of one denoising step of a batch."""
    per_sample_s: Pause = 0.0
    """Seconds each further sample of the batch adds to a step."""
    decode_s: Pause = 0.0
    """Seconds to decode one sample."""


class Bucket(Section, kw_only=True, frozen=True):
    sampling: Any = msgspec.field(default_factory=dict)
    """What differs from `rollout.sampling`; the same keys."""
    weight: Annotated[float, most(1_000_000, gt=0)] = 1.0
    """Share of the groups, relative to the other buckets'."""


class Program(Section, kw_only=True, frozen=True):
    name: str
    """A registered rollout program; `omni-async list` shows them."""
    settings: Any = msgspec.field(default_factory=dict)
    """Settings of the program; the keys are its package's."""


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
    engine: Literal["vllm_omni", "diffusers", "emulated"] = "vllm_omni"
    """Engine that generates the samples."""
    workers: Workers = 1
    """Number of engines, one producer actor each."""
    group_size: Alive = 8
    """Samples per prompt group."""
    sampling: Any = msgspec.field(default_factory=dict)
    """Size, guidance and whatever else changes what is drawn; the keys are the model family's, see below."""
    buckets: tuple[Bucket, ...] = ()
    """Several resolutions, frame counts or other settings in one run: every group draws one of these, for all of its
    samples. Empty: all are drawn as `rollout.sampling` says."""
    num_inference_steps: Annotated[int, most(MOST_STEPS, SCHEDULERS, ge=2)] = 10
    """Denoising steps N of a training sample."""
    max_inflight: InMemory = 16
    """Samples one engine holds at a time (running and queued)."""
    max_batch: InMemory = 16
    """Samples one denoising step computes together."""
    batching: Literal["step", "request"] = "step"
    """`step`: samples join and leave an engine's batch at every denoising step, and new weights are swapped in between
    steps. `request`: a batch is drawn from noise to the end before the next begins, which costs less per step; needs
    `weights.swap: request` or `drain`."""
    conditioning_cache: SizeText = "512MiB"
    """Encoded prompts that an engine keeps, on its device: what is repeated in a group, an epoch or a validation round
    is encoded once. The prompt that was not drawn for the longest goes first."""
    offload: bool = False
    """Keep text encoders in host memory, and on the device only while an engine encodes prompts that it does not keep.
    For `diffusers` and `vllm_omni`."""
    attention_backend: AttentionBackend = "auto"
    """vLLM-Omni's name of the attention kernels, such as `FLASH_ATTN` or `TORCH_SDPA`. `auto`: `TORCH_SDPA` for float32
    weights, which flash kernels refuse; otherwise the device's default."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the denoisers' repeated layers with torch.compile; only for `vllm_omni`. `auto`: on an accelerator, if
    vLLM-Omni supports its compiler."""
    engine_args: dict[EngineArg, Any] = msgspec.field(default_factory=dict)
    """More arguments of vLLM-Omni's engine, such as `vae_use_tiling: true`; keys that the run sets are refused."""
    timeout_s: Seconds = 600.0
    """Longest a sample may take before the engine counts as hung."""
    retries: Retries = 2
    """Times a failed sample is generated again (same seed) before its group is dropped."""
    share_initial_noise: bool = False
    """Samples of a group start from the same noise (lowers reward variance)."""
    sde: Sde | None = Sde()
    """How noise is injected; null: plain ODE sampling, for objectives that train on the final latents alone."""
    calls: Annotated[int, most(100, ge=1)] = 1
    """Times the engine is called for one sample, by a program: to draw, judge and edit, say."""
    program: Program | None = None
    """What happens between the calls of a sample; needed where there are several."""
    emulated: Emulated = Emulated()
    """Service times of the emulated engine."""

    @property
    def specs(self) -> tuple[Any, ...]:
        """The `SamplingSpec` of every bucket; the one of `sampling` where there are none."""
        return tuple(bucket.sampling for bucket in self.buckets) or (self.sampling,)

    @property
    def as_one_call(self) -> Rollout:
        """The same without a program: a profile's time for a sample includes all of its calls."""
        return msgspec.structs.replace(self, calls=1, program=None)


RoleName = Annotated[
    str, Meta(pattern=r"^[a-z][a-z_]{0,39}\Z", extra={"why": "lower-case letters and '_', at most 40"})
]
Weight = Annotated[float, most(1e6, ge=-1e6)]
Scalar = str | int | float | bool


class Scorer(Section, kw_only=True, frozen=True):
    name: str
    """A registered scorer; `omni-async list` shows them."""
    weight: Weight = 1.0
    """Factor in the weighted sum, exponent in the product (weights are not normalised)."""
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """The scorer's own options."""
    pool: RoleName | None = None
    """The entry of `reward.pools` whose workers run it; null: the reward workers themselves."""
    batch: InMemory | None = None
    """Most samples of one call; null: `reward.batch`."""
    concurrency: InMemory | None = None
    """Calls of it that run at once in a worker; null: as many as the scorer says, which is one if it blocks and any
    number if it is asynchronous."""
    latency_s: Seconds | None = None
    """How long a call should take: batches are made smaller where larger ones took longer. null: as large as `batch`
    allows."""
    timeout_s: Seconds | None = None
    """Longest one call may take; null: `reward.timeout_s`."""
    hedge_s: Seconds | None = None
    """A second call is made beside one that takes longer; null: `reward.hedge_s`."""
    on_failure: Literal["reject", "leave_out"] = "reject"
    """What becomes of a group with a sample that it cannot score, after all retries: `reject`: it is not trained on.
    `leave_out`: its samples are compared without this scorer, and the ledger says so."""
    when: dict[str, Scalar | tuple[Scalar, ...]] = msgspec.field(default_factory=dict)
    """Metadata that a prompt must have, each key with this value or one of these, for its samples to be scored by it;
    empty: every prompt."""
    gate: Annotated[float, most(1e12, ge=-1e12)] | None = None
    """Where its value is less, the sample's reward is `reward.gated`; null: no condition."""
    components: Annotated[dict[str, Weight], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """Parts of its score that count in place of its value, with their weights; empty: the value."""


class Pool(Section, kw_only=True, frozen=True):
    name: RoleName
    """Name of the pool, by which scorers choose it and `omni-async scale` changes it."""
    workers: Workers = 1
    """Number of its workers, each with all scorers of the pool."""
    resources: Resources = Resources()
    """Each of its workers."""


class Server(Section, kw_only=True, frozen=True):
    name: RoleName
    """Name of the servers, which scorers give as `server` and `omni-async scale` changes."""
    model: Plain
    """Checkpoint folder, or `owner/name` of a model hub, whose cache on this machine has it."""
    served_name: Plain | None = None
    """Name that the model is asked for by; null: the entry's name."""
    replicas: Annotated[int, most(MOST_WORKERS, "each is a process", ge=0)] = 1
    """Number of vLLM servers that the run starts; 0: none, there are `urls`."""
    resources: Resources = Resources()
    """Each of them; without accelerators, a server of vLLM's CPU build."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, such as `--max-model-len` and its value."""
    urls: Urls = ()
    """Servers that are there already, without `/v1`, which are asked like those that are started."""
    access: Plain | None = None
    """What `urls` are given as a bearer token, as the environment variable that holds it: `env:NAME`. Started servers
    have tokens of their own."""

    @property
    def served_as(self) -> str:
        """The name that the model is asked for by."""
        return self.name if self.served_name is None else self.served_name


class ScoreCache(Section, kw_only=True, frozen=True):
    memory: Annotated[int, most(MOST_BYTES, ge=0)] | SizeText = "64MiB"
    """Bytes of answers that a reward worker holds."""
    path: Plain | None = None
    """SQLite file that keeps answers, too, for other workers, later runs and `omni-async score`; on a local file
    system. null: no file."""
    size: Annotated[int, most(MOST_BYTES, ge=2**16)] | SizeText = "1GiB"
    """Bytes of answers in the file; the oldest are deleted."""

    @property
    def memory_bound(self) -> int:
        """Returns `memory` as a number."""
        return bytes_of(self.memory) if isinstance(self.memory, str) else self.memory

    @property
    def size_bound(self) -> int:
        """Returns `size` as a number."""
        return bytes_of(self.size) if isinstance(self.size, str) else self.size

    @property
    def enabled(self) -> bool:
        """Returns whether answers are kept anywhere."""
        return self.memory_bound > 0 or self.path is not None


class Reward(Section, kw_only=True, frozen=True):
    workers: Workers = 1
    """Number of reward workers."""
    batch: InMemory = 8
    """Most samples of one call of a scorer; it never waits to fill a batch."""
    streaming: bool = True
    """Score samples as they appear; false: only once everything that may be generated now is generated, as an in-step
    loop does."""
    timeout_s: Seconds = 60.0
    """Longest one call of a scorer may take."""
    hedge_s: Seconds | None = None
    """A second call is made beside one that takes longer, and the first answer counts: for scorers that may be called
    again while a call runs. null: never."""
    retries: Retries = 3
    """Times a failed score is tried again before its group is rejected."""
    backoff_s: Pause = 1.0
    """Pause before a failed score is tried again, and before a scorer that is down is called again; it doubles every
    time."""
    backoff_max_s: Seconds = 30.0
    """Longest such pause."""
    outage_s: Pause = 600.0
    """How long samples wait for a scorer that is down (every call fails); then their groups are rejected."""
    max_abs: Annotated[float, Meta(gt=0, le=1e12)] = 1e6
    """Largest absolute reward: a group with a larger one, or with a scorer whose weighted value is larger, is rejected
    with the reason."""
    probe: bool = True
    """Let every scorer score a synthetic sample before samples are drawn, and end the run if it fails twice with the
    same error that is no outage. false: a scorer that has scored nothing yet counts as down."""
    cache: ScoreCache = ScoreCache()
    """Answers of scorers that are `deterministic`, which are asked once for the same media and prompt."""
    combine: Literal["sum", "product"] = "sum"
    """How the reward is made of the scorers' values v and weights w: the sum of w v, or the product of v ** w."""
    gated: Annotated[float, most(1e12, ge=-1e12)] = 0.0
    """The reward of a sample whose value is below a scorer's `gate`."""
    pools: tuple[Pool, ...] = ()
    """Workers beside the reward workers, with processes and accelerators of their own, for scorers that name them."""
    servers: tuple[Server, ...] = ()
    """Model servers that the run starts, watches and replaces, for judges among the scorers."""
    scorers: tuple[Scorer, ...] = ()
    """The reward is made of the values of these, which score a sample side by side."""


Beta = Annotated[float, Meta(ge=0, lt=1)]


class Optimizer(Section, kw_only=True, frozen=True):
    name: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    lr: Annotated[float, most(1000, gt=0)] = 3e-4
    """Learning rate after warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's betas."""
    eps: Annotated[float, most(1, gt=0)] = 1e-8
    """AdamW's epsilon: keep it <= 1e-8, gradients of mean log-ratios are small."""
    weight_decay: Annotated[float, most(1000, ge=0)] = 1e-4
    """Decoupled weight decay."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """SGD's momentum."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, over trainer.updates."""
    warmup_steps: Annotated[int, most(MOST_UPDATES, ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    max_grad_norm: Positive | None = 1.0
    """Clip the gradient's global norm; null leaves it."""
    fused: bool | None = None
    """AdamW in one kernel, without temporary copies of the weights; its last bits differ. Null: on accelerators whose
    torch has the kernel."""


class Ema(Section, kw_only=True, frozen=True):
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay after warm-up."""
    warmup: Literal["ratio", "linear"] = "ratio"
    """Decay of average t: `ratio` min((1 + t) / (10 + t), decay); `linear` min(.001 t, decay) (AWM)."""
    every: Updates = 8
    """Optimizer steps between averages."""


class Trainer(Section, kw_only=True, frozen=True):
    backend: Plain = "auto"
    """How ranks hold the model: `fsdp2`, `plain` (one rank), or one of another package; `auto`: plain on one CPU rank
    (wrapping only costs time there), FSDP2 otherwise."""
    workers: Workers = 1
    """Trainer ranks; each group's samples are dealt over them."""
    sequence_parallel: Annotated[int, most(MOST_WORKERS, ge=1)] = 1
    """Ranks that compute each row together, every one a part of its tokens (Ulysses)."""
    shard: Annotated[int, most(MOST_WORKERS, ge=1)] | None = None
    """Ranks that hold one copy of the weights together (HSDP); null spreads it over all of them."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory between their uses."""
    gather: Literal["layer", "step"] = "layer"
    """When ranks gather the weights that they share. `layer`: before every pass of a layer, freed after it. `step`:
    once per optimizer step, kept until it; a device then holds all weights in `model.dtype`. Both give the same
    bits."""
    compile: bool = False
    """Compile the repeated layers of each component with torch.compile."""
    updates: Updates = 100
    """Policy updates in this run."""
    groups_per_update: Alive = 4
    """P: prompt groups per update."""
    steps_per_update: Annotated[int, most(10_000, ge=1)] = 1
    """Optimizer steps an update is cut into."""
    micro_batch_size: InMemory = 8
    """Rows (sample x trained step) per forward and backward on one rank."""
    groups_per_micro_batch: Alive = 1
    """Prompt groups whose rows share micro-batches, for a `micro_batch_size` above a rank's rows of one group. Groups
    wait for each other. It must divide the groups of an optimizer step; groups of different buckets never share."""
    max_mismatch: Positive | None = 0.01
    """Most that log-probs of engine and trainer may differ by in the first update, where they hold the same weights,
    per latent element. Rounding is far below it, bfloat16's too; above it the run fails. Null: only warn."""
    streaming: Literal["auto", "on", "off"] = "auto"
    """Start a group's backward when it is ready instead of when the update is complete; `auto` does so wherever it is
    exact."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward."""
    peak_tflops: Annotated[float, most(1_000_000, gt=0)] | None = None
    """TFLOP/s that a rank's device can do at most in `model.dtype`, of which `mfu` is a share. Null: the data sheet's,
    where the device is a known one and computes in bfloat16."""
    ema: Ema | None = None
    """Keep an exponential moving average of the trained weights, saved with every checkpoint."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and schedule."""

    @property
    def fewest_ranks(self) -> int:
        """Return the least number of ranks that the degrees of sequences and copies divide."""
        return math.lcm(self.sequence_parallel, self.shard or 1)

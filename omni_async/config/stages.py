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
    engine: Literal["vllm_omni", "diffusers", "emulated"] = "vllm_omni"
    """Engine that generates the samples."""
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
    """Compile the denoisers' repeated layers with torch.compile; only for `vllm_omni`. `auto`: on an accelerator, if
    vLLM-Omni supports its compiler."""
    engine_args: dict[EngineArg, Any] = msgspec.field(default_factory=dict)
    """More arguments of vLLM-Omni's engine, such as `vae_use_tiling: true`; keys that the run sets are refused."""
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


RoleName = Annotated[
    str, Meta(pattern=r"^[a-z][a-z_]{0,39}\Z", extra={"why": "lower-case letters and '_', at most 40"})
]
Weight = Annotated[float, most(1e6, ge=-1e6)]
Scalar = str | int | float | bool


class Scorer(Section, kw_only=True, frozen=True):
    name: str
    """A registered scorer (`omni-async list` shows them), or your own class or function: `module:name` or
    `path/file.py:name`."""
    weight: Weight = 1.0
    """Factor in the weighted sum, exponent in the product (weights are not normalised)."""
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    """The scorer's own options."""
    pool: RoleName | None = None
    """The entry of `reward.pools` whose workers run the scorer; null: the reward workers themselves."""
    batch: InMemory | None = None
    """Most samples in a call; null: `reward.batch`."""
    concurrency: InMemory | None = None
    """Concurrent calls in a worker; null: the scorer's own number, by default one if it blocks and unlimited if it is
    asynchronous."""
    latency_s: Seconds | None = None
    """Target duration of a call: batches shrink if larger ones took longer. null: batches as large as `batch`
    allows."""
    timeout_s: Seconds | None = None
    """Longest duration of a call; null: `reward.timeout_s`."""
    hedge_s: Seconds | None = None
    """Start a second, concurrent call if a call takes longer; null: `reward.hedge_s`."""
    on_failure: Literal["reject", "leave_out"] = "reject"
    """Treatment of a group with a sample that the scorer cannot score, after all retries. `reject`: it is not trained.
    `leave_out`: its samples are compared without this scorer, and the ledger records that."""
    when: dict[str, Scalar | tuple[Scalar, ...]] = msgspec.field(default_factory=dict)
    """Metadata that selects prompts for the scorer: every key must have the given value, or a value of the given list.
    Empty: every prompt."""
    gate: Annotated[float, most(1e12, ge=-1e12)] | None = None
    """If the scorer's value is lower, the sample's reward is `reward.gated`; null: no condition."""
    components: Annotated[dict[str, Weight], Meta(max_length=64)] = msgspec.field(default_factory=dict)
    """Parts of the score that count instead of its value, with their weights; empty: the value."""


class Pool(Section, kw_only=True, frozen=True):
    name: RoleName
    """Name of the pool, used by scorers and `omni-async scale`."""
    workers: Workers = 1
    """Number of its workers, each with all scorers of the pool."""
    resources: Resources = Resources()
    """Resources of each worker."""


class Server(Section, kw_only=True, frozen=True):
    name: RoleName
    """Name of the servers, used by scorers (`server`) and `omni-async scale`."""
    model: Plain
    """Checkpoint folder, or `owner/name` of a model hub if this machine's cache has it."""
    served_name: Plain | None = None
    """Name of the model in requests; null: the entry's name."""
    replicas: Annotated[int, most(MOST_WORKERS, "each is a process", ge=0)] = 1
    """Number of vLLM servers that the run starts; 0: only `urls`."""
    resources: Resources = Resources()
    """Resources of each server; without accelerators, vLLM's CPU build runs."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, such as `--max-model-len` and its value."""
    urls: Urls = ()
    """Existing servers, without `/v1`; they get the same requests as started servers."""
    access: Plain | None = None
    """Bearer token for `urls`, as the environment variable that holds it: `env:NAME`. Started servers get their own
    tokens."""

    @property
    def served_as(self) -> str:
        """Return the name of the model in requests."""
        return self.name if self.served_name is None else self.served_name


class ScoreCache(Section, kw_only=True, frozen=True):
    memory: Annotated[int, most(MOST_BYTES, ge=0)] | SizeText = "64MiB"
    """Bytes of answers in a reward worker's memory."""
    path: Plain | None = None
    """SQLite file, on a local file system, that also stores answers, for other workers, later runs and
    `omni-async score`. null: no file."""
    size: Annotated[int, most(MOST_BYTES, ge=2**16)] | SizeText = "1GiB"
    """Bytes of answers in the file; the oldest are deleted."""

    @property
    def memory_bound(self) -> int:
        """Return `memory` as a number."""
        return bytes_of(self.memory) if isinstance(self.memory, str) else self.memory

    @property
    def size_bound(self) -> int:
        """Return `size` as a number."""
        return bytes_of(self.size) if isinstance(self.size, str) else self.size

    @property
    def enabled(self) -> bool:
        """Return whether answers are stored anywhere."""
        return self.memory_bound > 0 or self.path is not None


class Reward(Section, kw_only=True, frozen=True):
    workers: Workers = 1
    """Number of reward workers."""
    batch: InMemory = 8
    """Most samples in a call of a scorer; a call never waits to fill a batch."""
    streaming: bool = True
    """Score samples as they appear; false: only once everything that may be generated now is generated, as in a
    synchronous loop."""
    timeout_s: Seconds = 60.0
    """Longest duration of a scorer's call."""
    hedge_s: Seconds | None = None
    """Start a second, concurrent call if a call takes longer; the first answer counts. For scorers that allow
    concurrent calls. null: never."""
    retries: Retries = 3
    """Retries of a failed score before its group is rejected."""
    backoff_s: Pause = 1.0
    """Pause before a failed score is retried, and before a scorer that is down is called again; it doubles every
    time."""
    backoff_max_s: Seconds = 30.0
    """Longest such pause."""
    outage_s: Pause = 600.0
    """Longest wait of samples for a scorer that is down (every call fails); then their groups are rejected."""
    max_abs: Annotated[float, Meta(gt=0, le=1e12)] = 1e6
    """Largest absolute reward: a group whose reward, or a scorer's weighted value, is larger is rejected with the
    reason."""
    probe: bool = True
    """Let every scorer score a synthetic sample before generation starts. End the run if it fails twice with the same
    error, unless that is an outage. false: a scorer that has scored nothing yet counts as down."""
    cache: ScoreCache = ScoreCache()
    """Cache of answers: a `deterministic` scorer is called once for the same media and prompt."""
    combine: Literal["sum", "product"] = "sum"
    """Combination of the scorers' values v with weights w: the sum of w v, or the product of v ** w."""
    gated: Annotated[float, most(1e12, ge=-1e12)] = 0.0
    """The reward of a sample whose value is below a scorer's `gate`."""
    pools: tuple[Pool, ...] = ()
    """Additional workers with separate processes and accelerators, for scorers that name them."""
    servers: tuple[Server, ...] = ()
    """Model servers that the run starts, watches and replaces, for judges among the scorers."""
    scorers: tuple[Scorer, ...] = ()
    """The scorers, which score a sample concurrently; their values give the reward."""


Beta = Annotated[float, Meta(ge=0, lt=1)]


class StepSize(Section, kw_only=True, frozen=True):
    by: Literal["drift", "ess"]
    """What is measured on the rows of an optimizer step, before it is taken. `drift`: D kappa, as half the variance of
    the log-ratios in nats; the rate has the factor sqrt(target / drift). `ess`: effective sample size of the steps'
    importance weights; the factor is sqrt(ess / target), as in VCPO."""
    target: Positive
    """Drift in nats, or effective sample size in (0, 1]. The rate is unchanged until it is missed."""


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
    """Clip the gradient's global norm; null does not clip."""
    max_alignment: Annotated[float, Meta(ge=0, lt=1)] | None = None
    """Largest cosine between the gradient and the optimizer's momentum, an average of earlier gradients: the part of
    the gradient along the momentum that exceeds it is removed. null: any."""
    step_size: StepSize | None = None
    """Lower the learning rate of optimizer steps whose samples' policy is far from the trained one; null: never."""
    fused: bool | None = None
    """Use AdamW in one kernel, without temporary copies of the weights; its last bits differ. Null: on accelerators
    whose torch has the kernel."""


class Ema(Section, kw_only=True, frozen=True):
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay after warm-up."""
    warmup: Literal["ratio", "linear"] = "ratio"
    """Decay of average t: `ratio` min((1 + t) / (10 + t), decay); `linear` min(.001 t, decay) (AWM)."""
    every: Updates = 8
    """Optimizer steps between averages."""


class Trainer(Section, kw_only=True, frozen=True):
    backend: Plain = "auto"
    """Distribution of the model over ranks: `fsdp2`, `plain` (one rank), or a backend of another package; `auto`: plain
    on one CPU rank (wrapping only costs time there), FSDP2 otherwise."""
    workers: Workers = 1
    """Trainer ranks; each group's samples are dealt over them."""
    sequence_parallel: Annotated[int, most(MOST_WORKERS, ge=1)] = 1
    """Ranks that compute each row together, each a part of its tokens (Ulysses)."""
    shard: Annotated[int, most(MOST_WORKERS, ge=1)] | None = None
    """Ranks that hold one copy of the weights together (HSDP); null spreads it over all ranks."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory between their uses."""
    gather: Literal["layer", "step"] = "layer"
    """Time at which ranks gather the sharded weights. `layer`: before every pass of a layer, freed after it. `step`:
    once per optimizer step, kept until it; a device then holds all weights in `model.dtype`. Both give the same
    bits."""
    compile: bool = False
    """Compile the repeated layers of each component with torch.compile."""
    updates: Updates = 100
    """Policy updates in this run."""
    groups_per_update: Alive = 4
    """P: prompt groups per update."""
    steps_per_update: Annotated[int, most(10_000, ge=1)] = 1
    """Optimizer steps per update."""
    micro_batch_size: InMemory = 8
    """Rows (sample x trained step) per forward and backward on one rank."""
    groups_per_micro_batch: Alive = 1
    """Prompt groups whose rows share micro-batches, for a `micro_batch_size` above a rank's rows of one group. Groups
    wait for each other. It must divide the groups of an optimizer step; groups of different buckets never share."""
    max_mismatch: Positive | None = 0.01
    """Largest difference per latent element between log-probs of engine and trainer in the first update, when both hold
    the same weights. Rounding, even bfloat16's, is far below it; above it the run fails. Null: only warn."""
    streaming: Literal["auto", "on", "off"] = "auto"
    """Start a group's backward when it is ready instead of when the update is complete; `auto`: whenever that is
    exact."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward."""
    peak_tflops: Annotated[float, most(1_000_000, gt=0)] | None = None
    """Peak TFLOP/s of a rank's device in `model.dtype`, the reference of `mfu`. Null: the data sheet's, if the device
    is known and computes in bfloat16."""
    ema: Ema | None = None
    """Keep an exponential moving average of the trained weights, saved with every checkpoint."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and schedule."""

    @property
    def fewest_ranks(self) -> int:
        """Return the least number of ranks that both `sequence_parallel` and `shard` divide."""
        return math.lcm(self.sequence_parallel, self.shard or 1)

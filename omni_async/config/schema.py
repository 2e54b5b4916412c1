"""Defines the YAML schema, `Config`: one struct per section, bounds in the types, defaults that work.

The sections of the stages are in `stages`, those of the algorithm in `algorithm`.

Imports no torch and no Ray.

`docs/configuration.md` is generated from these sections (`omni-async docs`): the text below a field is its
documentation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config.algorithm import Algorithm, Correction, automatic_correction
from omni_async.config.reward import Reward
from omni_async.config.rollout import Rollout
from omni_async.config.section import (
    MOST_BYTES,
    InMemory,
    NumSteps,
    Plain,
    Positive,
    Resources,
    Retries,
    RoleName,
    Seconds,
    Section,
    SizeText,
    Updates,
    Url,
    Workers,
    bytes_of,
    most,
)
from omni_async.config.trainer import Trainer
from omni_async.worker import Worker


class Run(Section, kw_only=True, frozen=True):
    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}\Z",
            extra={"why": "letters, digits, '.', '_' and '-', at most 80 and beginning with a letter, a digit or '_'"},
        ),
    ] = "run"
    """First part of the run id and the MLflow run name."""
    seed: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Seeds prompt order, SDE windows and every sample's noise."""
    dir: Plain = "runs"
    """Parent folder of all runs, relative to the working directory."""
    runtime: Literal["ray", "inprocess"] = "ray"
    """`ray`: roles are long-lived Ray actors. `inprocess`: the same roles on one event loop."""
    ray_address: Plain | None = None
    """A Ray cluster to join (`auto`, `ray://...`); null joins the cluster of RAY_ADDRESS, or starts a local Ray."""
    startup_timeout_s: Seconds = 600.0
    """Longest start of actors and of the processes of their engines."""
    health_timeout_s: Seconds = 60.0
    """Longest silence of an actor before it counts as hung, is killed and replaced."""
    restarts: Retries = 5
    """Restarts per hour of each lost part (killed, hung, its machine gone) before the run ends; 0: any loss ends the
    run."""
    closing_timeout_s: Seconds = 1800.0
    """Longest time for the current update and the last checkpoint once a run is over or interrupted."""


class Lora(Section, kw_only=True, frozen=True):
    rank: Annotated[int, most(16_384, "no layer is that wide", ge=1)] = 32
    """Rank of the update."""
    alpha: Positive = 64.0
    """Scale: the update is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Meta(min_length=1)] = ("to_q", "to_k", "to_v", "to_out.0")
    """Names (suffixes) of the linear layers that get adapters."""


class Model(Section, kw_only=True, frozen=True):
    pipeline: str | None = None
    """Model family, a name of the entry-point group `omni_async.pipelines`; null: the family of the checkpoint at
    `model.path`."""
    path: Plain
    """Checkpoint folder in diffusers or transformers layout, relative to the recipe's folder; or `owner/name` of a
    model hub if this machine's cache has it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the engines' weights, and of the trainer's compute."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""


class Data(Section, kw_only=True, frozen=True):
    prompts: Plain | None = None
    """Prompts: `.txt` (a prompt a line), `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, `.arrow` (`prompt`, optional
    `target` and `images`, any other columns), a folder, or a data set in the hub's cache, `owner/name`."""
    preferences: Plain | None = None
    """Preference pairs to train on instead of generating, a table with `prompt`, `chosen`, `rejected`: offline
    diffusion_dpo."""
    columns: dict[str, Plain | None] = msgspec.field(default_factory=dict)
    """Names of columns of prompts and preferences by field, such as `prompt: caption`; null leaves a field out."""
    shuffle: bool = True
    """A new seeded order every epoch."""
    max_prompt_chars: Annotated[int, most(2**20, "a line of a prompt file has no more", ge=1)] = 4000
    """Longer prompts are refused before anything starts."""


_STALE = "S + 1 updates' groups may be admitted at once, and what a policy made a thousand updates ago teaches nothing"


class Staleness(Section, kw_only=True, frozen=True):
    max_updates: Annotated[int, most(1000, _STALE, ge=0)] = 2
    """S: the most updates between the policy that generated a sample and the policy trained on it. 0 is the synchronous
    loop. With a `reserve` other than `all` it is a cap: samples are as old as the slowest stage requires."""
    reserve: Literal["auto", "all"] | Annotated[int, most(1_000_000, "more groups than slots", ge=0)] = "auto"
    """Groups admitted before the trainer needs them by the median of measured times, for stages that vary or fail.
    `auto`: the longest time of recent updates counts, and half of its distance to the median. A number: that many
    groups. `all`: every free slot gets a group at once; if the trainer is the slowest stage, it then trains on samples
    that are S updates old."""
    exact: bool = False
    """Train only when every admitted group is ready. After the first S updates all samples are then exactly S updates
    old: slow, but reproducible; for experiments on staleness."""


class Buffer(Section, kw_only=True, frozen=True):
    trajectories: Annotated[int, most(1_000_000, "they all lie in memory", ge=1)] = 64
    """Samples being generated or waiting for a score, over all engines."""
    groups: InMemory = 16
    """Admitted groups the trainer has not taken yet."""
    window: Annotated[int, most(100_000, ge=1)] = 1
    """The trainer takes any ready group among the oldest `window`; 1 is strict admission order."""
    max_bytes: Annotated[int, most(MOST_BYTES, ge=1)] | SizeText | None = None
    """Most bytes of live samples, reserved at a group's admission: trajectories until its end, media until the score;
    an update's groups must fit. A number, or a text like `8GiB`; null: bounded only by the counts."""

    @property
    def bound(self) -> int | None:
        """Return `max_bytes` as a number."""
        return bytes_of(self.max_bytes) if isinstance(self.max_bytes, str) else self.max_bytes


class Weights(Section, kw_only=True, frozen=True):
    transport: Literal["object_store", "collective", "disk"] = "object_store"
    """Transport of weights. `object_store`: Ray's shared memory (in one process: by reference). `collective`: a
    torch.distributed broadcast in a separate process group. `disk`: safetensors files in the run folder, renamed into
    place."""
    payload: Literal["full", "lora"] = "full"
    """Content of a version: all weights (adapters merged), or the adapters alone."""
    publish_every: Annotated[int, most(1001, ge=1)] = 1
    """Updates per publish; needs publish_every <= staleness.max_updates + 1."""
    swap: Literal["step", "request", "drain"] = "step"
    """Time at which engines switch: between two denoising steps or tokens, between samples, or after all leased
    samples."""
    kv: Literal["keep", "recompute"] = "keep"
    """Keys and values of the tokens before a swap in the middle of an answer: keep those of the old weights, or compute
    them again with the new ones. Only for families that draw tokens."""
    bucket_mb: Annotated[int, most(65_536, "a bucket is one piece of memory on either side", ge=1)] = 256
    """Size of the flat buckets."""
    timeout_s: Seconds = 600.0
    """Longest time for an engine to stage and swap a version."""


class Validation(Section, kw_only=True, frozen=True):
    every: Updates = 20
    """Updates between validation rounds; the first (version 0) and the last version are always validated."""
    prompts: Plain | None = None
    """Prompts never trained on."""
    split: InMemory | Annotated[float, Meta(gt=0, lt=1)] | None = None
    """In place of `prompts`: how many prompts of `data.prompts` to hold out, as a number or a share. Texts and
    files alone decide which, so they are the same in every attempt."""
    limit: InMemory | None = None
    """Most prompts of a round, spread evenly over the file and the same in every round; null: all prompts."""
    samples_per_prompt: Annotated[int, most(10_000, ge=1)] = 1
    """Seeds per prompt, the same in every round. Tokens are drawn at the recipe's temperature."""
    num_inference_steps: NumSteps = 20
    """Denoising steps, noise 0."""
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Largest share of an engine's slots for validation while training samples wait."""


class Checkpoint(Section, kw_only=True, frozen=True):
    every: Updates = 20
    """Updates between checkpoints; a checkpoint is also written at the end and on interruption."""
    keep: Updates = 3
    """Number of newest checkpoints to keep."""
    keep_best: Annotated[int, most(1000, ge=0)] = 1
    """Number of checkpoints with the highest validation reward to keep in addition; every validated version then gets a
    checkpoint. Rounds are compared over the samples that both have scored; a round with less than 90 % of its samples
    scored does not count. 0: no best checkpoints, and none for validation."""
    resume: Plain | None = None
    """`auto`: resume the newest run of this name that is not done and has a usable checkpoint, or start a new run, and
    report the runs passed over. A run folder: resume that run, done or not. A checkpoint folder: start a new run from
    it."""


class Mlflow(Section, kw_only=True, frozen=True):
    enabled: bool = True
    """Log to MLflow."""
    tracking_uri: Plain | None = None
    """Null: a local sqlite file, `mlflow.db`, in run.dir."""
    experiment: Plain = "omni_async"
    """Experiment name."""


class Wandb(Section, kw_only=True, frozen=True):
    enabled: bool = False
    """Log to Weights & Biases."""
    mode: Literal["offline", "online"] = "offline"
    """`offline`: write into the run folder, for `wandb sync`; nothing is sent. `online`: send to the server."""
    project: Annotated[
        str,
        Meta(
            pattern=r"^[^\x00-\x1f\x7f/\\#?%:]{1,128}\Z",
            extra={"why": "1 to 128 characters, none of / \\ # ? % :"},
        ),
    ] = "omni_async"
    """Project name."""
    entity: Plain | None = None
    """Team or user; null: the account's default."""
    api_key: Plain | None = None
    """API key, such as `env:WANDB_API_KEY`; null: the key stored by `wandb login`."""
    base_url: Url | None = None
    """Address of a private server; null: the public server of Weights & Biases."""


class Tensorboard(Section, kw_only=True, frozen=True):
    enabled: bool = False
    """Write event files for TensorBoard into `tensorboard` in the run folder."""


class Prometheus(Section, kw_only=True, frozen=True):
    enabled: bool = False
    """Serve the newest numbers at `http://host:port/metrics` while the run lasts."""
    host: Plain = "127.0.0.1"
    """Address to listen at. It is not protected: use an address other than loopback only in a trusted network."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 9464
    """Port; 0: any free port, which the console shows."""


class Tracking(Section, kw_only=True, frozen=True):
    mlflow: Mlflow = Mlflow()
    """MLflow."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""
    tensorboard: Tensorboard = Tensorboard()
    """TensorBoard."""
    prometheus: Prometheus = Prometheus()
    """Prometheus."""
    images_every: Updates = 10
    """Updates between image grids."""
    images: Annotated[int, Meta(ge=1, le=256)] = 16
    """Samples in a grid, and samples whose image, video and audio are saved."""


class Placement(Section, kw_only=True, frozen=True):
    rollout: Resources = Resources()
    """Resources of each producer with its engine. `vllm` splits a model over several `gpus`."""
    reward: Resources = Resources()
    """Resources of each reward worker."""
    trainer: Resources = Resources()
    """Resources of each trainer rank."""
    colocated: bool = False
    """The roles share the same devices and take turns: a device holds an engine, a reward worker and a trainer rank."""
    accelerator: Literal["auto", "GPU", "NPU"] = "auto"
    """Kind of accelerator that `gpus` counts, by Ray's name: `NPU` is Ascend, `GPU` every other maker; `auto`: the kind
    found."""
    object_store: SizeText | None = None
    """Shared memory of the Ray that the run starts, for samples and versions of the weights; beyond it Ray writes to
    disk. null: 30 % of the memory that is free at the start, at most 200 GB and 95 % of `/dev/shm`. Refused if the run
    joins a cluster."""

    @property
    def store_bytes(self) -> int | None:
        """Return the bytes of `object_store`; None if Ray chooses."""
        return None if self.object_store is None else bytes_of(self.object_store)

    @property
    def reward_in_turn(self) -> bool:
        """Return whether reward workers wait for shared devices; they do not if they alone need no accelerator."""
        return self.colocated and not (self.rollout.gpus > 0 and self.reward.gpus == 0)


class Role(Section, kw_only=True, frozen=True):
    name: RoleName
    """Name of the entry-point group `omni_async.roles`; `omni-async list` shows them."""
    workers: Workers = 1
    """Number of its workers."""
    resources: Resources = Resources()
    """Resources of each worker."""
    settings: Any = msgspec.field(default_factory=dict)
    """Settings of the role; its package defines the keys."""


class Emulation(Section, kw_only=True, frozen=True):
    profile: Plain
    """Service times and payload sizes to replay: a `profile.json` of a run, or the name of a shipped profile."""
    time_scale: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Factor on every service time: 0.01 turns 100 s into 1 s."""
    payload_scale: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """Factor on every payload's size."""


ScheduleName = Literal["sync", "sync_colocated", "async_reward", "one_step_off", "async"]


class Config(Section, kw_only=True, frozen=True):
    schedule: ScheduleName | None = None
    """Named values for the keys that control the overlap of stages (docs/tuning.md); null: the keys as given."""
    run: Run = Run()
    """The run itself: its name, seed, folder and runtime."""
    model: Model
    """The model that is trained."""
    data: Data
    """The prompts."""
    rollout: Rollout = Rollout()
    """Generation of samples."""
    reward: Reward = Reward()
    """Scoring of samples."""
    staleness: Staleness = Staleness()
    """Bound on how far generation runs ahead of training."""
    buffer: Buffer = Buffer()
    """Sizes of the buffers."""
    weights: Weights = Weights()
    """Delivery of new weights to the engines."""
    algorithm: Algorithm = Algorithm()
    """The objective."""
    trainer: Trainer = Trainer()
    """Training of the policy."""
    validation: Validation | None = None
    """Rounds on held-out prompts; null: no validation."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints to continue from."""
    tracking: Tracking = Tracking()
    """Destinations of numbers and images in addition to the run folder."""
    emulation: Emulation | None = None
    """Replace engines, scorers and trainer ranks by emulated devices that take a profile's time; everything between
    them stays real."""
    placement: Placement = Placement()
    """CPUs and accelerators of each actor."""
    roles: tuple[Role, ...] = ()
    """Roles of installed packages: the run starts, watches and replaces their workers."""

    @property
    def correction(self) -> Correction:
        """Return `algorithm.correction`; for mode `auto`, the correction that a run starts with."""
        chosen = self.algorithm.correction
        return automatic_correction() if chosen.mode == "auto" else chosen

    @property
    def slots(self) -> int:
        """Return (S + 1) P: the groups that may be admitted and not yet trained and published."""
        return (self.staleness.max_updates + 1) * self.trainer.groups_per_update

    @property
    def scored(self) -> bool:
        """Return whether scorers score the samples; not those of a dataset, nor of a recipe without scorers."""
        return self.data.preferences is None and not self.unscored

    @property
    def unscored(self) -> bool:
        """Return whether samples are generated and nobody scores them: with a teacher, a recipe needs no scorers."""
        return self.data.preferences is None and self.algorithm.teacher is not None and not self.reward.scorers

    def encoded_for(self, spec: Any) -> Any:
        """Return the `SamplingSpec` that prompts of the policy's `spec` are encoded for.

        It is the teacher's if the teacher alone is guided: trajectories then contain the negative prompt too."""
        teacher = None if self.algorithm.teacher is None else self.algorithm.teacher.spec_of(spec)
        return teacher if getattr(teacher, "guided", False) and not spec.guided else spec

    @property
    def engine_names(self) -> tuple[str, ...]:
        """Return the names of the actors that produce samples: engines, or the reader of a preference dataset."""
        if self.data.preferences is not None:
            return (str(Worker("reader")),)
        return tuple(str(Worker("rollout", index)) for index in range(self.rollout.workers))

    @property
    def services(self) -> tuple[str, ...]:
        """Return the roles whose workers have addresses: roles of packages, pools of scorers, and model servers."""
        reward = self.reward
        return (
            *(role.name for role in self.roles),
            *(pool.name for pool in reward.pools),
            *(server.name for server in reward.servers),
        )

    @property
    def resources(self) -> dict[str, Resources]:
        """Return the resources of a worker of each role, by the key that defines them."""
        placement = self.placement
        built_in = {"rollout": placement.rollout, "reward": placement.reward, "trainer": placement.trainer}
        return {
            **{f"placement.{role}": resources for role, resources in built_in.items()},
            **{f"roles.{number}.resources": role.resources for number, role in enumerate(self.roles)},
            **{f"reward.servers.{number}.resources": one.resources for number, one in enumerate(self.reward.servers)},
            **{f"reward.pools.{number}.resources": pool.resources for number, pool in enumerate(self.reward.pools)},
        }

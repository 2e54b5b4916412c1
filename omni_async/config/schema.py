"""Defines the whole YAML schema: one struct per section, bounds in the types, defaults that work.

Imports no torch and no Ray.

`docs/configuration.md` is generated from this file (`omni-async docs`), so every field's comment is its documentation:
write it as `Meta(description=...)`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from omni_async.config.algorithm import Algorithm, Correction, automatic_correction
from omni_async.config.reward import Reward as Reward
from omni_async.config.reward import Scorer as Scorer
from omni_async.config.rollout import Emulated as Emulated
from omni_async.config.rollout import Rollout as Rollout
from omni_async.config.rollout import Sde as Sde
from omni_async.config.rollout import WindowConfig as WindowConfig
from omni_async.config.section import (
    MOST_BYTES,
    NumSteps,
    Plain,
    Positive,
    Retries,
    Seconds,
    Section,
    Updates,
    Workers,
    doc,
    most,
)
from omni_async.config.sizes import SizeText, bytes_of
from omni_async.config.trainer import Ema as Ema
from omni_async.config.trainer import Optimizer as Optimizer
from omni_async.config.trainer import Trainer as Trainer
from omni_async.worker import Worker


class Run(Section, kw_only=True, frozen=True):
    name: Annotated[
        str,
        doc(
            "First part of the run id and the MLflow run name.",
            "letters, digits, '.', '_' and '-', at most 80 and beginning with a letter, a digit or '_'",
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}\Z",
        ),
    ] = "run"
    seed: Annotated[int, doc("Seeds prompt order, SDE windows and every sample's noise.", ge=0, lt=2**31)] = 0
    dir: Annotated[Plain, doc("Parent folder of all runs, relative to the working directory.")] = "runs"
    runtime: Annotated[
        Literal["ray", "inprocess"],
        doc("`ray`: roles are long-lived Ray actors. `inprocess`: the same roles on one event loop."),
    ] = "ray"
    ray_address: Annotated[
        Plain | None, doc("A Ray cluster to join (`auto`, `ray://...`); null starts a local Ray.")
    ] = None
    startup_timeout_s: Annotated[
        Seconds, doc("How long actors, and the processes of their engines, may take to start.")
    ] = 600.0
    health_timeout_s: Annotated[
        Seconds, doc("How long an actor may not answer before it counts as hung, is killed and replaced.")
    ] = 60.0
    restarts: Annotated[
        Retries,
        doc(
            "How often within an hour each part that was lost (killed, hung, its machine gone) comes back before the"
            " run gives up; 0: any loss ends the run."
        ),
    ] = 5
    closing_timeout_s: Annotated[
        Seconds,
        doc("How long the update under way and the last checkpoint may take once a run is over or interrupted."),
    ] = 1800.0


class Lora(Section, kw_only=True, frozen=True):
    rank: Annotated[int, doc("Rank of the update.", "no layer is that wide", ge=1, most=16_384)] = 32
    alpha: Annotated[Positive, doc("Scale: the update is multiplied by alpha / rank.")] = 64.0
    target_modules: Annotated[
        tuple[str, ...], doc("Names (suffixes) of the linear layers that get adapters.", min_length=1)
    ] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
    )


class Model(Section, kw_only=True, frozen=True):
    pipeline: Annotated[
        str | None,
        doc(
            "Model family, a name of the entry-point group `omni_async.pipelines`; null: the one that takes the"
            " checkpoint at `model.path`."
        ),
    ] = None
    path: Annotated[Plain, doc("Checkpoint folder in diffusers layout; relative paths start at the recipe's folder.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"], doc("Dtype of the engines' weights, and of the trainer's compute.")
    ] = "float32"
    lora: Annotated[Lora | None, doc("Train adapters instead of all weights.")] = None


class Data(Section, kw_only=True, frozen=True):
    prompts: Annotated[
        Plain | None,
        doc(
            "Prompt file: `.txt` (a prompt a line) or `.jsonl` (`prompt`, optional `target` and `images`, any other"
            " keys)."
        ),
    ] = None
    preferences: Annotated[
        Plain | None,
        doc(
            "Preference pairs (`.parquet` with `prompt`, `chosen`, `rejected`) to train on instead of generating:"
            " offline diffusion_dpo."
        ),
    ] = None
    shuffle: Annotated[bool, doc("A new seeded order every epoch.")] = True
    max_prompt_chars: Annotated[
        int,
        doc(
            "Longer prompts are refused before anything starts.",
            "a line of a prompt file has no more",
            ge=1,
            most=2**20,
        ),
    ] = 4000


class Staleness(Section, kw_only=True, frozen=True):
    max_updates: Annotated[
        int,
        doc(
            "S: the most updates between the policy that made a sample and the one trained on it. 0 is the synchronous"
            " loop.",
            "S + 1 updates' groups are admitted at once, and what a policy made a thousand updates ago teaches nothing",
            ge=0,
            most=1000,
        ),
    ] = 2
    exact: Annotated[
        bool,
        doc(
            "Train only when every admitted group is ready, so that after the first S updates all samples are exactly S"
            " updates old: slow, but reproducible; for experiments on staleness."
        ),
    ] = False


class Buffer(Section, kw_only=True, frozen=True):
    trajectories: Annotated[
        int,
        doc(
            "Samples being generated or waiting for a score, over all engines.",
            "they all lie in memory",
            ge=1,
            most=1_000_000,
        ),
    ] = 64
    groups: Annotated[
        int, doc("Admitted groups the trainer has not taken yet.", "they all lie in memory", ge=1, most=100_000)
    ] = 16
    window: Annotated[
        int,
        doc(
            "The trainer takes any ready group among the oldest `window`; 1 is strict admission order.",
            ge=1,
            most=100_000,
        ),
    ] = 1
    max_bytes: Annotated[
        Annotated[int, most(MOST_BYTES, ge=1)] | SizeText | None,
        doc(
            "Bytes that trajectories and media of live samples may hold, reserved when a group is admitted and freed"
            " when it has ended; an update's groups must fit. A number, or a text like `8GiB`; null: no bound but the"
            " counts."
        ),
    ] = None

    @property
    def bound(self) -> int | None:
        """Returns `max_bytes` as a number."""
        return bytes_of(self.max_bytes) if isinstance(self.max_bytes, str) else self.max_bytes


class Weights(Section, kw_only=True, frozen=True):
    transport: Annotated[
        Literal["object_store", "collective", "disk"],
        doc(
            "How weights are sent. `object_store`: Ray's shared memory (in one process: by reference). `collective`: a"
            " torch.distributed broadcast in a process group of its own. `disk`: safetensors files in the run folder,"
            " renamed into place."
        ),
    ] = "object_store"
    payload: Annotated[
        Literal["full", "lora"], doc("What is sent: all weights (adapters merged) or the adapters alone.")
    ] = "full"
    publish_every: Annotated[
        int, doc("Updates per publish; needs publish_every <= staleness.max_updates + 1.", ge=1, most=1001)
    ] = 1
    swap: Annotated[
        Literal["step", "request", "drain"],
        doc("When engines switch: between two denoising steps, between samples, or when all leased samples are done."),
    ] = "step"
    bucket_mb: Annotated[
        int, doc("Size of the flat buckets.", "a bucket is one piece of memory on either side", ge=1, most=65_536)
    ] = 256
    timeout_s: Annotated[Seconds, doc("Longest an engine may take to stage and swap a version.")] = 600.0


class Validation(Section, kw_only=True, frozen=True):
    every: Annotated[
        Updates,
        doc("Updates between validation rounds; the first (version 0) and the last version are always validated."),
    ] = 20
    prompts: Annotated[Plain, doc("Prompts never trained on.")]
    samples_per_prompt: Annotated[int, doc("Seeds per prompt.", ge=1, most=10_000)] = 1
    num_inference_steps: Annotated[NumSteps, doc("Denoising steps, noise 0.")] = 20
    share: Annotated[
        float, doc("Most of an engine's slots validation may take while training samples wait.", gt=0, le=1)
    ] = 0.5


class Checkpoint(Section, kw_only=True, frozen=True):
    every: Annotated[
        Updates, doc("Updates between checkpoints (one is always written at the end and on interruption).")
    ] = 20
    keep: Annotated[Updates, doc("Newest checkpoints kept.")] = 3
    resume: Annotated[
        Plain | None,
        doc(
            "`auto`: go on with the newest run of this name that is not done and has a checkpoint to go on from, or"
            " start one, and say what was passed over; a run folder: go on with it, done or not; a checkpoint folder:"
            " start a new run from it."
        ),
    ] = None


class Mlflow(Section, kw_only=True, frozen=True):
    enabled: Annotated[bool, doc("Log to MLflow.")] = True
    tracking_uri: Annotated[Plain | None, doc("Null: a local sqlite file, `mlflow.db`, in run.dir.")] = None
    experiment: Annotated[Plain, doc("Experiment name.")] = "omni_async"


class Tracking(Section, kw_only=True, frozen=True):
    mlflow: Annotated[Mlflow, doc("MLflow.")] = Mlflow()
    images_every: Annotated[Updates, doc("Updates between image grids.")] = 10
    images: Annotated[int, doc("Samples in a grid; the video and audio of as many are saved.", ge=1, le=256)] = 16


class Resources(Section, kw_only=True, frozen=True):
    cpus: Annotated[
        float, doc("CPUs of one actor; also its thread count.", "no machine has so many", gt=0, most=10_000)
    ] = 1.0
    gpus: Annotated[float, doc("Accelerators of one actor.", "no machine has so many", ge=0, most=1000)] = 0.0


class Placement(Section, kw_only=True, frozen=True):
    rollout: Annotated[Resources, doc("Each producer with its engine.")] = Resources()
    reward: Annotated[Resources, doc("Each reward worker.")] = Resources()
    trainer: Annotated[Resources, doc("Each trainer rank.")] = Resources()
    colocated: Annotated[
        bool,
        doc(
            "The roles share the same devices and take turns: a device holds an engine, a reward worker and a trainer"
            " rank."
        ),
    ] = False
    accelerator: Annotated[
        Literal["auto", "GPU", "NPU"],
        doc("What `gpus` counts, by Ray's name: `NPU` is Ascend, `GPU` every other maker; `auto`: what is there."),
    ] = "auto"

    @property
    def reward_in_turn(self) -> bool:
        """Whether reward workers wait for shared devices: not if they alone need no accelerator."""
        return self.colocated and not (self.rollout.gpus > 0 and self.reward.gpus == 0)


class Role(Section, kw_only=True, frozen=True):
    name: Annotated[
        str,
        doc(
            "Name of the entry-point group `omni_async.roles`; `omni-async list` shows them.",
            "lower-case letters and '_', at most 40",
            pattern=r"^[a-z][a-z_]{0,39}\Z",
        ),
    ]
    workers: Annotated[Workers, doc("Number of its workers.")] = 1
    resources: Annotated[Resources, doc("Each of its workers.")] = Resources()
    settings: Annotated[Any, doc("Settings of the role; the keys are its package's.")] = msgspec.field(
        default_factory=dict
    )


class Emulation(Section, kw_only=True, frozen=True):
    profile: Annotated[
        Plain,
        doc("Service times and payload sizes to replay: a `profile.json` of a run, or the name of a shipped profile."),
    ]
    time_scale: Annotated[float, doc("Factor on every service time: 0.01 turns 100 s into 1 s.", gt=0, le=1000)] = 1.0
    payload_scale: Annotated[float, doc("Factor on every payload's size.", ge=0, le=1000)] = 1.0


ScheduleName = Literal["sync", "sync_colocated", "async_reward", "one_step_off", "async"]


class Config(Section, kw_only=True, frozen=True):
    schedule: Annotated[
        ScheduleName | None,
        doc(
            "A named arrangement of the keys that decide what overlaps with what (docs/tuning.md); null: the keys as"
            " they are."
        ),
    ] = None
    run: Annotated[Run, doc("The run itself: its name, seed, folder and where its roles run.")] = Run()
    model: Annotated[Model, doc("The model that is trained.")]
    data: Annotated[Data, doc("The prompts.")]
    rollout: Annotated[Rollout, doc("How samples are made.")] = Rollout()
    reward: Annotated[Reward, doc("How samples are scored.")] = Reward()
    staleness: Annotated[Staleness, doc("How far generation may run ahead of training.")] = Staleness()
    buffer: Annotated[Buffer, doc("Sizes of the buffers.")] = Buffer()
    weights: Annotated[Weights, doc("How new weights reach the engines.")] = Weights()
    algorithm: Annotated[Algorithm, doc("The objective.")] = Algorithm()
    trainer: Annotated[Trainer, doc("How the policy is trained.")] = Trainer()
    validation: Annotated[Validation | None, doc("Rounds on held-out prompts; null: none.")] = None
    checkpoint: Annotated[Checkpoint, doc("Checkpoints to continue from.")] = Checkpoint()
    tracking: Annotated[Tracking, doc("MLflow and image grids.")] = Tracking()
    emulation: Annotated[
        Emulation | None,
        doc(
            "Replace engines, scorers and trainer ranks by emulated devices that take a profile's time; everything"
            " between them stays real."
        ),
    ] = None
    placement: Annotated[Placement, doc("CPUs and accelerators of each actor.")] = Placement()
    roles: Annotated[
        tuple[Role, ...],
        doc("Roles of installed packages: their workers start, are watched and are replaced with the run."),
    ] = ()

    @property
    def correction(self) -> Correction:
        """Returns `algorithm.correction`, with mode `auto` decided by the staleness budget."""
        chosen = self.algorithm.correction
        return automatic_correction(self.staleness.max_updates) if chosen.mode == "auto" else chosen

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The names of the actors that make samples: engines, or the one reader of a preference dataset."""
        if self.data.preferences is not None:
            return (str(Worker("reader")),)
        return tuple(str(Worker("rollout", index)) for index in range(self.rollout.workers))

    @property
    def resources(self) -> dict[str, Resources]:
        """What one worker of each role asks for, by the key that says so."""
        placement = self.placement
        built_in = {"rollout": placement.rollout, "reward": placement.reward, "trainer": placement.trainer}
        return {
            **{f"placement.{role}": resources for role, resources in built_in.items()},
            **{f"roles.{number}.resources": role.resources for number, role in enumerate(self.roles)},
        }

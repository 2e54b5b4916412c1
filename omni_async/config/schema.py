"""Defines the whole YAML schema: one struct per section, bounds in the types, defaults that work. Imports no torch and
no Ray.

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
    A_PROCESS_EACH,
    LARGEST,
    MOST_BYTES,
    MOST_SECONDS,
    MOST_STEPS,
    MOST_UPDATES,
    MOST_WORKERS,
    SCHEDULERS,
    Plain,
    Section,
    most,
)
from omni_async.config.section import doc as _doc
from omni_async.config.sizes import SizeText, bytes_of
from omni_async.config.trainer import Ema as Ema
from omni_async.config.trainer import Optimizer as Optimizer
from omni_async.config.trainer import Trainer as Trainer
from omni_async.worker import Worker


class Run(Section, kw_only=True, frozen=True):
    name: Annotated[
        str,
        _doc(
            "First part of the run id and the MLflow run name.",
            "letters, digits, '.', '_' and '-', at most 80 and beginning with a letter, a digit or '_'",
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,79}\Z",
        ),
    ] = "run"
    seed: Annotated[int, _doc("Seeds prompt order, SDE windows and every sample's noise.", ge=0, lt=2**31)] = 0
    dir: Annotated[Plain, _doc("Parent folder of all runs, relative to the working directory.")] = "runs"
    runtime: Annotated[
        Literal["ray", "inprocess"],
        _doc("`ray`: roles are long-lived Ray actors. `inprocess`: the same roles on one event loop."),
    ] = "ray"
    ray_address: Annotated[
        Plain | None, _doc("A Ray cluster to join (`auto`, `ray://...`); null starts a local Ray.")
    ] = None
    startup_timeout_s: Annotated[
        float, _doc("How long actors, and the processes of their engines, may take to start.", gt=0, most=MOST_SECONDS)
    ] = 600.0
    health_timeout_s: Annotated[
        float,
        _doc(
            "How long an actor may not answer before it counts as hung, is killed and replaced.",
            gt=0,
            most=MOST_SECONDS,
        ),
    ] = 60.0
    restarts: Annotated[
        int,
        _doc(
            "How often within an hour each part that was lost (killed, hung, its machine gone) comes back before the"
            " run gives up; 0: any loss ends the run.",
            ge=0,
            most=1000,
        ),
    ] = 5
    closing_timeout_s: Annotated[
        float,
        _doc(
            "How long the update under way and the last checkpoint may take once a run is over or interrupted.",
            gt=0,
            most=MOST_SECONDS,
        ),
    ] = 1800.0


class Lora(Section, kw_only=True, frozen=True):
    rank: Annotated[int, _doc("Rank of the update.", "no layer is that wide", ge=1, most=16_384)] = 32
    alpha: Annotated[float, _doc("Scale: the update is multiplied by alpha / rank.", gt=0, most=LARGEST)] = 64.0
    target_modules: Annotated[
        tuple[str, ...], _doc("Names (suffixes) of the linear layers that get adapters.", min_length=1)
    ] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
    )


class Model(Section, kw_only=True, frozen=True):
    pipeline: Annotated[
        str | None,
        _doc(
            "Model family, a name of the entry-point group `omni_async.pipelines`; null: the one that takes the"
            " checkpoint at `model.path`."
        ),
    ] = None
    path: Annotated[Plain, _doc("Checkpoint folder in diffusers layout; relative paths start at the recipe's folder.")]
    dtype: Annotated[
        Literal["float32", "bfloat16"], _doc("Dtype of the engines' weights, and of the trainer's compute.")
    ] = "float32"
    lora: Annotated[Lora | None, _doc("Train adapters instead of all weights.")] = None


class Data(Section, kw_only=True, frozen=True):
    prompts: Annotated[
        Plain | None,
        _doc(
            "Prompt file: `.txt` (a prompt a line) or `.jsonl` (`prompt`, optional `target` and `images`, any other"
            " keys)."
        ),
    ] = None
    preferences: Annotated[
        Plain | None,
        _doc(
            "Preference pairs (`.parquet` with `prompt`, `chosen`, `rejected`) to train on instead of generating:"
            " offline diffusion_dpo."
        ),
    ] = None
    shuffle: Annotated[bool, _doc("A new seeded order every epoch.")] = True
    max_prompt_chars: Annotated[
        int,
        _doc(
            "Longer prompts are refused before anything starts.",
            "a line of a prompt file has no more",
            ge=1,
            most=2**20,
        ),
    ] = 4000


class Staleness(Section, kw_only=True, frozen=True):
    max_updates: Annotated[
        int,
        _doc(
            "S: the most updates between the policy that made a sample and the one trained on it. 0 is the synchronous"
            " loop.",
            "S + 1 updates' groups are admitted at once, and what a policy made a thousand updates ago teaches nothing",
            ge=0,
            most=1000,
        ),
    ] = 2
    exact: Annotated[
        bool,
        _doc(
            "Train only when every admitted group is ready, so that after the first S updates all samples are exactly S"
            " updates old: slow, but reproducible; for experiments on staleness."
        ),
    ] = False


class Buffer(Section, kw_only=True, frozen=True):
    trajectories: Annotated[
        int,
        _doc(
            "Samples being generated or waiting for a score, over all engines.",
            "they all lie in memory",
            ge=1,
            most=1_000_000,
        ),
    ] = 64
    groups: Annotated[
        int, _doc("Admitted groups the trainer has not taken yet.", "they all lie in memory", ge=1, most=100_000)
    ] = 16
    window: Annotated[
        int,
        _doc(
            "The trainer takes any ready group among the oldest `window`; 1 is strict admission order.",
            ge=1,
            most=100_000,
        ),
    ] = 1
    max_bytes: Annotated[
        Annotated[int, most(MOST_BYTES, ge=1)] | SizeText | None,
        _doc(
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
        _doc(
            "How weights are sent. `object_store`: Ray's shared memory (in one process: by reference). `collective`: a"
            " torch.distributed broadcast in a process group of its own. `disk`: safetensors files in the run folder,"
            " renamed into place."
        ),
    ] = "object_store"
    payload: Annotated[
        Literal["full", "lora"], _doc("What is sent: all weights (adapters merged) or the adapters alone.")
    ] = "full"
    publish_every: Annotated[
        int, _doc("Updates per publish; needs publish_every <= staleness.max_updates + 1.", ge=1, most=1001)
    ] = 1
    swap: Annotated[
        Literal["step", "request", "drain"],
        _doc("When engines switch: between two denoising steps, between samples, or when all leased samples are done."),
    ] = "step"
    bucket_mb: Annotated[
        int, _doc("Size of the flat buckets.", "a bucket is one piece of memory on either side", ge=1, most=65_536)
    ] = 256
    timeout_s: Annotated[
        float, _doc("Longest an engine may take to stage and swap a version.", gt=0, most=MOST_SECONDS)
    ] = 600.0


class Validation(Section, kw_only=True, frozen=True):
    every: Annotated[
        int,
        _doc(
            "Updates between validation rounds; the first (version 0) and the last version are always validated.",
            ge=1,
            most=MOST_UPDATES,
        ),
    ] = 20
    prompts: Annotated[Plain, _doc("Prompts never trained on.")]
    samples_per_prompt: Annotated[int, _doc("Seeds per prompt.", ge=1, most=10_000)] = 1
    num_inference_steps: Annotated[int, _doc("Denoising steps, noise 0.", SCHEDULERS, ge=1, most=MOST_STEPS)] = 20
    share: Annotated[
        float, _doc("Most of an engine's slots validation may take while training samples wait.", gt=0, le=1)
    ] = 0.5


class Checkpoint(Section, kw_only=True, frozen=True):
    every: Annotated[
        int,
        _doc(
            "Updates between checkpoints (one is always written at the end and on interruption).",
            ge=1,
            most=MOST_UPDATES,
        ),
    ] = 20
    keep: Annotated[int, _doc("Newest checkpoints kept.", ge=1, most=MOST_UPDATES)] = 3
    resume: Annotated[
        Plain | None,
        _doc(
            "`auto`: go on with the newest run of this name that is not done and has a checkpoint to go on from, or"
            " start one, and say what was passed over; a run folder: go on with it, done or not; a checkpoint folder:"
            " start a new run from it."
        ),
    ] = None


class Mlflow(Section, kw_only=True, frozen=True):
    enabled: Annotated[bool, _doc("Log to MLflow.")] = True
    tracking_uri: Annotated[Plain | None, _doc("Null: a local sqlite file, `mlflow.db`, in run.dir.")] = None
    experiment: Annotated[Plain, _doc("Experiment name.")] = "omni_async"


class Tracking(Section, kw_only=True, frozen=True):
    mlflow: Annotated[Mlflow, _doc("MLflow.")] = msgspec.field(default_factory=Mlflow)
    images_every: Annotated[int, _doc("Updates between image grids.", ge=1, most=MOST_UPDATES)] = 10
    images: Annotated[int, _doc("Samples in a grid; the video and audio of as many are saved.", ge=1, le=256)] = 16


class Resources(Section, kw_only=True, frozen=True):
    cpus: Annotated[
        float, _doc("CPUs of one actor; also its thread count.", "no machine has so many", gt=0, most=10_000)
    ] = 1.0
    gpus: Annotated[float, _doc("Accelerators of one actor.", "no machine has so many", ge=0, most=1000)] = 0.0


class Placement(Section, kw_only=True, frozen=True):
    rollout: Annotated[Resources, _doc("Each producer with its engine.")] = msgspec.field(default_factory=Resources)
    reward: Annotated[Resources, _doc("Each reward worker.")] = msgspec.field(default_factory=Resources)
    trainer: Annotated[Resources, _doc("Each trainer rank.")] = msgspec.field(default_factory=Resources)
    colocated: Annotated[
        bool,
        _doc(
            "The roles share the same devices and take turns: a device holds an engine, a reward worker and a trainer"
            " rank."
        ),
    ] = False
    accelerator: Annotated[
        Literal["auto", "GPU", "NPU"],
        _doc("What `gpus` counts, by Ray's name: `NPU` is Ascend, `GPU` every other maker; `auto`: what is there."),
    ] = "auto"

    @property
    def reward_in_turn(self) -> bool:
        """Tells whether reward workers wait for shared devices: not if they need none of the accelerators that the
        others share."""
        return self.colocated and not (self.rollout.gpus > 0 and self.reward.gpus == 0)


class Role(Section, kw_only=True, frozen=True):
    name: Annotated[
        str,
        _doc(
            "Name of the entry-point group `omni_async.roles`; `omni-async list` shows them.",
            "lower-case letters and '_', at most 40",
            pattern=r"^[a-z][a-z_]{0,39}\Z",
        ),
    ]
    workers: Annotated[int, _doc("Number of its workers.", A_PROCESS_EACH, ge=1, most=MOST_WORKERS)] = 1
    resources: Annotated[Resources, _doc("Each of its workers.")] = msgspec.field(default_factory=Resources)
    settings: Annotated[Any, _doc("Settings of the role; the keys are its package's.")] = msgspec.field(
        default_factory=dict
    )


class Emulation(Section, kw_only=True, frozen=True):
    profile: Annotated[
        Plain,
        _doc("Service times and payload sizes to replay: a `profile.json` of a run, or the name of a shipped profile."),
    ]
    time_scale: Annotated[float, _doc("Factor on every service time: 0.01 turns 100 s into 1 s.", gt=0, le=1000)] = 1.0
    payload_scale: Annotated[float, _doc("Factor on every payload's size.", ge=0, le=1000)] = 1.0


ScheduleName = Literal["sync", "sync_colocated", "async_reward", "one_step_off", "async"]


class Config(Section, kw_only=True, frozen=True):
    schedule: Annotated[
        ScheduleName | None,
        _doc(
            "A named arrangement of the keys that decide what overlaps with what (docs/tuning.md); null: the keys as"
            " they are."
        ),
    ] = None
    run: Annotated[Run, _doc("The run itself: its name, seed, folder and where its roles run.")] = msgspec.field(
        default_factory=Run
    )
    model: Annotated[Model, _doc("The model that is trained.")]
    data: Annotated[Data, _doc("The prompts.")]
    rollout: Annotated[Rollout, _doc("How samples are made.")] = msgspec.field(default_factory=Rollout)
    reward: Annotated[Reward, _doc("How samples are scored.")] = msgspec.field(default_factory=Reward)
    staleness: Annotated[Staleness, _doc("How far generation may run ahead of training.")] = msgspec.field(
        default_factory=Staleness
    )
    buffer: Annotated[Buffer, _doc("Sizes of the buffers.")] = msgspec.field(default_factory=Buffer)
    weights: Annotated[Weights, _doc("How new weights reach the engines.")] = msgspec.field(default_factory=Weights)
    algorithm: Annotated[Algorithm, _doc("The objective.")] = msgspec.field(default_factory=Algorithm)
    trainer: Annotated[Trainer, _doc("How the policy is trained.")] = msgspec.field(default_factory=Trainer)
    validation: Annotated[Validation | None, _doc("Rounds on held-out prompts; null: none.")] = None
    checkpoint: Annotated[Checkpoint, _doc("Checkpoints to continue from.")] = msgspec.field(default_factory=Checkpoint)
    tracking: Annotated[Tracking, _doc("MLflow and image grids.")] = msgspec.field(default_factory=Tracking)
    emulation: Annotated[
        Emulation | None,
        _doc(
            "Replace engines, scorers and trainer ranks by emulated devices that take a profile's time; everything"
            " between them stays real."
        ),
    ] = None
    placement: Annotated[Placement, _doc("CPUs and accelerators of each actor.")] = msgspec.field(
        default_factory=Placement
    )
    roles: Annotated[
        tuple[Role, ...],
        _doc("Roles of installed packages: their workers start, are watched and are replaced with the run."),
    ] = ()

    @property
    def correction(self) -> Correction:
        """Returns `algorithm.correction`, with mode `auto` decided by the staleness budget."""
        chosen = self.algorithm.correction
        return automatic_correction(self.staleness.max_updates) if chosen.mode == "auto" else chosen

    @property
    def engine_names(self) -> tuple[str, ...]:
        """Returns the names of the actors that make samples: engines, or the one reader of a preference dataset."""
        if self.data.preferences is not None:
            return (str(Worker("reader")),)
        return tuple(str(Worker("rollout", index)) for index in range(self.rollout.workers))

    @property
    def resources(self) -> dict[str, Resources]:
        """Returns what one worker of each role asks for, by the key that says so."""
        placement = self.placement
        built_in = {"rollout": placement.rollout, "reward": placement.reward, "trainer": placement.trainer}
        return {
            **{f"placement.{role}": resources for role, resources in built_in.items()},
            **{f"roles.{number}.resources": role.resources for number, role in enumerate(self.roles)},
        }

"""Composes a recipe's values from a few answers, with reasons for the chosen values.

The numbers come from docs/tuning.md (buffers, staleness), from recipes/ (learning rates, windows, noise) and from the
model family (sizes). Omitted keys have their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from omni_async.algorithms.registry import Objective
from omni_async.plugins.families import PipelineFamily, SamplingSpec

S = 2  # if every role has devices
_STEPS, _WINDOW = 10, 2
_FORWARD_PASSES_OF_TRAINING = 4  # with gradient checkpointing: forward, recomputed forward, and backward as two
_LARGE = 4 * 10**9  # bytes of weights; from this size on, a model is trained with adapters

Tree = dict[str, Any]


@dataclass(frozen=True)
class Reward:
    """A scorer, with its `cost` as in `omni_async.rewards.base.Scorer`, and the model of a judge to serve."""

    name: str
    params: Tree
    cost: str = "cpu"
    judge: str | None = None


@dataclass(frozen=True)
class Answers:
    """All inputs of a recipe; paths are as given, relative to the working directory."""

    name: str
    family: PipelineFamily
    model: str
    weight_bytes: int
    prompts: str
    validation: str | None
    reward: Reward
    objective: Objective
    devices: int
    engine: str


@dataclass
class Draft:
    """The values of a recipe as a tree of plain data, and the reasons for them by key."""

    tree: Tree = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: Any, why: str = "") -> None:
        *sections, key = path.split(".")
        here = self.tree
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
        if why:
            self.reasons[path] = why


@dataclass(frozen=True)
class Split:
    """The number of devices of each role; `shared` if they take turns on one."""

    rollout: int
    trainer: int
    reward: int
    judge: int
    shared: bool = False


def share_out(devices: int, reward: Reward) -> Split:
    """Divide the devices so that generation and training take about as long (recipes/README.md).

    ValueError, one line, if there are too few for a judge that the run must serve."""
    judge = int(reward.judge is not None and devices > 0)
    if judge and devices < 3:
        raise ValueError(
            f"--devices: a judge that the run serves needs a separate device, expected 3 or more, got {devices}; or"
            " give --param urls=[...] of a server that is there"
        )
    if devices <= 1:
        return Split(1, 1, int(devices == 1 and reward.cost == "model"), 0, shared=devices == 1)
    scoring = int(reward.cost == "model" and devices >= 3)
    left = devices - judge - scoring
    generating = _STEPS / (_STEPS + _WINDOW * _FORWARD_PASSES_OF_TRAINING)
    rollout = min(left - 1, max(1, round(left * generating)))
    return Split(rollout, left - rollout, scoring, judge)


def compose(answers: Answers) -> Draft:
    """Return the recipe. ValueError, one line, as from `share_out`."""
    split = share_out(answers.devices, answers.reward)
    spec = answers.family.sampling()
    draft = Draft()
    _model(draft, answers)
    group = _rollout(draft, answers, split, spec)
    _reward(draft, answers, split)
    _overlap(draft, answers, split, group)
    _algorithm(draft, answers)
    _trainer(draft, answers, split, is_video(spec))
    _records(draft, answers)
    if answers.devices:
        _placement(draft, answers, split)
    return draft


def is_video(spec: SamplingSpec) -> bool:
    return any(shape.part == "video" for shape in spec.media())


def _model(draft: Draft, answers: Answers) -> None:
    draft.put("run.name", answers.name)
    draft.put("run.seed", 0)
    if answers.devices:
        draft.put("run.startup_timeout_s", 1800, "a large checkpoint takes minutes to load")
    draft.put("model.pipeline", answers.family.name)
    draft.put("model.path", answers.model)
    if answers.devices:
        draft.put("model.dtype", "bfloat16", "half the memory, and what accelerators are fast with")
    if answers.weight_bytes >= _LARGE:
        size = f"{answers.weight_bytes / 1e9:.0f} GB of weights"
        draft.put("model.lora.rank", 64, f"{size}; all of them with gradients and moments take several times that")
        draft.put("model.lora.alpha", 128)
        draft.put("model.lora.target_modules", ["to_q", "to_k", "to_v", "to_out.0"], "the attention's layers")
    draft.put("data.prompts", answers.prompts)


def _rollout(draft: Draft, answers: Answers, split: Split, spec: SamplingSpec) -> int:
    """Add the section; return the size of a group."""
    on_device, video = answers.devices > 0, is_video(spec)
    ranks = split.trainer
    group = -(-(16 if on_device else 8) // ranks) * ranks
    batch = (4 if video else group) if on_device else 2 * group
    more = f", and a multiple of the {ranks} trainer ranks, so that none is idle" if ranks > 1 else ""
    draft.put("rollout.engine", answers.engine)
    draft.put("rollout.workers", split.rollout)
    draft.put("rollout.group_size", group, f"samples of a prompt are compared with each other{more}")
    for name, value in msgspec.structs.asdict(spec).items():
        draft.put(f"rollout.sampling.{name}", value)
    draft.put("rollout.num_inference_steps", _STEPS, "fewer than a finished picture takes, enough to compare")
    draft.put("rollout.max_inflight", 2 * group, "two groups: one is drawn, one waits")
    draft.put("rollout.max_batch", batch, "lower it if an engine runs out of memory")
    _sde(draft, answers.objective, small=answers.weight_bytes < _LARGE)
    return group


def _sde(draft: Draft, objective: Objective, small: bool) -> None:
    if objective.kind != "transition":
        draft.put("rollout.sde", None, f"{objective.name} trains on final latents")
        return
    kind, noise = {"dance_grpo": ("dance", 1.2 if small else 0.3), "grpo_guard": ("flow", 0.7)}.get(
        objective.name, ("cps", 0.8)
    )
    draft.put("rollout.sde.kind", kind)
    draft.put("rollout.sde.noise_level", noise, "more explores more, and spoils the picture more")
    draft.put("rollout.sde.window.size", _WINDOW)
    draft.put("rollout.sde.window.range", [0, _STEPS // 2], "the early steps decide what is drawn")
    if objective.name == "mix_grpo":
        draft.put("rollout.sde.window.schedule", "progressive")


def _reward(draft: Draft, answers: Answers, split: Split) -> None:
    reward = answers.reward
    scorer: Tree = {"name": reward.name, **({"params": reward.params} if reward.params else {})}
    workers = 1 if split.reward or reward.cost == "elsewhere" else max(1, 2 * split.rollout)
    draft.put("reward.workers", workers, f"a worker scores on {'its device' if split.reward else 'a CPU core'}")
    if split.reward:
        draft.put("reward.batch", 16)
    if reward.judge is not None:
        server: Tree = {"name": reward.params["server"], "model": reward.judge}
        if split.judge:
            server["resources"] = {"cpus": 4, "gpus": split.judge}
        draft.put("reward.timeout_s", 120, "a judge answers in seconds, more when many ask")
        draft.put("reward.servers", [server])
    draft.put("reward.scorers", [scorer])


def _overlap(draft: Draft, answers: Answers, split: Split, group: int) -> None:
    staleness = 0 if split.shared else S
    per_update = _groups_per_update(answers)
    why = (
        "one device, on which the roles take turns: nothing runs ahead"
        if split.shared
        else "enough for all roles to be busy in most runs, and hardly ever a loss (docs/tuning.md)"
    )
    draft.put("staleness.max_updates", staleness, why)
    held = split.rollout * 2 * group
    draft.put("buffer.trajectories", 2 * held, "twice what the engines hold, so that slow scores do not stop them")
    draft.put("buffer.groups", (staleness + 1) * per_update, "(S + 1) x groups_per_update: never what others wait for")
    draft.put("buffer.window", 1)
    if answers.weight_bytes >= _LARGE:
        draft.put("weights.payload", "lora", "the base never changes")


def _groups_per_update(answers: Answers) -> int:
    return 4 if not answers.devices else 16 if answers.devices < 8 else 32


def _algorithm(draft: Draft, answers: Answers) -> None:
    objective = answers.objective
    draft.put("algorithm.name", objective.name, objective.summary)
    match objective.name:
        case "grpo_guard":
            draft.put("algorithm.clip_range", 2e-6, "as published")
            draft.put("algorithm.guard.scale", "sample")
        case "flow_dppo":
            draft.put("algorithm.dppo.kappa_max_nats", 1.0)
        case "diffusion_nft":
            draft.put("algorithm.kl_coef", 1e-4)
        case "gspo":
            draft.put("algorithm.clip_range_nats", 0.3)
        case "flow_grpo" | "dance_grpo" | "mix_grpo":
            draft.put("algorithm.clip_range_nats", 0.66, "1e-5 of the published recipes, at 512x512")
    if objective.kind != "transition":
        draft.put("algorithm.forward.draws", 6 if objective.kind == "preference" else 3)


def _trainer(draft: Draft, answers: Answers, split: Split, video: bool) -> None:
    on_device, large = answers.devices > 0, answers.weight_bytes >= _LARGE
    draft.put("trainer.workers", split.trainer)
    draft.put("trainer.updates", 300 if on_device else 100)
    draft.put("trainer.groups_per_update", _groups_per_update(answers))
    draft.put("trainer.micro_batch_size", (1 if video else 4) if on_device else 8, "it decides on memory alone")
    if on_device:
        draft.put("trainer.gradient_checkpointing", True, "a third more time, a fraction of the memory")
    rate = 3e-4 if large else 1e-4
    draft.put("trainer.optimizer.lr", rate, "of adapters; of all weights it would be a tenth" if large else "")


def _records(draft: Draft, answers: Answers) -> None:
    every = 30 if answers.devices else 20
    if answers.validation is None:
        draft.put(
            "validation", None, "no prompts for it were given; {every: 20, prompts: FILE} measures what is learnt"
        )
    else:
        draft.put("validation.every", every)
        draft.put("validation.prompts", answers.validation)
        draft.put("validation.num_inference_steps", _STEPS if not answers.devices else 2 * _STEPS)
    draft.put("checkpoint.every", every)


def _placement(draft: Draft, answers: Answers, split: Split) -> None:
    if split.shared:
        draft.put("placement.colocated", True)
    draft.put("placement.rollout", {"cpus": 4, "gpus": 1})
    draft.put("placement.reward", {"cpus": 2, "gpus": 1} if split.reward else {"cpus": 1})
    draft.put("placement.trainer", {"cpus": 4, "gpus": 1})

"""Composes a recipe's values from a few answers.

The numbers come from docs/tuning.md (buffers, staleness), from recipes/ (learning rates, windows, noise) and from the
model family (sizes). Omitted keys have their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import Objective
from omni_async.config import ConfigError
from omni_async.plugins.families import PipelineFamily

Tree = dict[str, Any]

HELD_OUT_SHARE = 0.1  # of the prompts, if no other prompts are there to validate with

_STEPS, _WINDOW = 10, 2
_FORWARD_PASSES_OF_TRAINING = 4  # with gradient checkpointing: forward, recomputed forward, and backward as two
_LARGE = 4 * 10**9  # bytes of weights; from this size on, a model is trained with adapters
_TINY = 10**8  # bytes of weights; smaller models are made for tests
# The share of devices that generate.
_GENERATING = {"latents": _STEPS / (_STEPS + _WINDOW * _FORWARD_PASSES_OF_TRAINING), "tokens": 0.5}
_OF_LATENTS = ("rollout.num_inference_steps", "trainer.micro_batch_size", "algorithm.forward.draws")
_CLIP = {"algorithm.clip_range_nats": 0.66}
_OBJECTIVES: dict[str, Tree] = {
    "flow_grpo": _CLIP,
    "dance_grpo": {**_CLIP, "rollout.sde.kind": "dance", "rollout.sde.noise_level": 0.3},
    "mix_grpo": {**_CLIP, "rollout.sde.window.schedule": "progressive"},
    "grpo_guard": {
        "algorithm.clip_range": 2e-6,
        "algorithm.guard.scale": "sample",
        "rollout.sde.kind": "flow",
        "rollout.sde.noise_level": 0.7,
    },
    "flow_dppo": {"algorithm.dppo.kappa_max_nats": 1.0},
    "diffusion_nft": {"algorithm.kl_coef": 1e-4},
    "gspo": {"algorithm.clip_range_nats": 0.3},
    "reinforce": {"algorithm.correction.mode": "bypass", "algorithm.correction.weights": "tempered"},
    "distill": {"algorithm.kl_form": "exact"},
}
REASONS = {
    "run.startup_timeout_s": "a large checkpoint takes minutes to load",
    "model.dtype": "half the memory, and what accelerators are fast with",
    "model.lora.rank": "all weights of a model of this size, with gradients and moments, take several times its memory",
    "model.lora.target_modules": "the attention's layers",
    "rollout.group_size": "samples of a prompt are compared with each other; a multiple of the trainer ranks, so that"
    " none is idle",
    "rollout.num_inference_steps": "fewer than a finished picture takes, enough to compare",
    "rollout.max_inflight": "two groups: one is drawn, one waits",
    "rollout.max_batch": "lower it if an engine runs out of memory",
    "rollout.sde": "the objective trains on final latents",
    "rollout.sde.noise_level": "more explores more, and spoils the picture more",
    "rollout.sde.window.range": "the early steps decide what is drawn",
    "reward.workers": "a worker scores on a CPU core, or on its device if placement.reward has one",
    "reward.timeout_s": "a judge answers in seconds, more when many ask",
    "staleness.max_updates": "a cap: samples are as old as the slowest stage requires (docs/choose.md); 0 if the roles"
    " take turns on one device",
    "buffer.trajectories": "twice what the engines hold, so that slow scores do not stop them",
    "buffer.groups": "(S + 1) x groups_per_update: never what others wait for",
    "weights.payload": "the base never changes",
    "algorithm.clip_range": "as published",
    "algorithm.correction.weights": "the loss has no ratio, so weights correct for stale samples",
    "algorithm.clip_range_nats": "from the published recipes, at 512x512",
    "trainer.micro_batch_size": "it decides on memory alone",
    "trainer.gradient_checkpointing": "a third more time, a fraction of the memory",
    "trainer.optimizer.lr": "3e-4 for adapters, 1e-4 for all weights of a small model, a tenth of it for a large one",
    "validation": "no prompts for it were given; to measure what is learnt, validation.split=0.1 holds out a tenth of"
    " data.prompts, and validation.prompts=FILE names other prompts",
    "validation.split": "a tenth of the prompts is never trained on",
}

TOKEN_REASONS = {
    "rollout.sde": "tokens are drawn without noise",
    "rollout.max_inflight": "two groups, drawn at once",
    "trainer.optimizer.lr": "as in recipes/qwen3_omni_thinker; 3e-4 for a few million parameters, as in read_digits",
}


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
    validation: Tree | None  # `prompts` or `split`; None: no validation
    reward: Reward
    objective: Objective
    devices: int
    engine: str
    sampling: Tree


@dataclass(frozen=True)
class Split:
    """The number of devices of each role; `shared` if they take turns on one."""

    rollout: int
    trainer: int
    reward: int
    judge: int
    shared: bool = False


def share_out(devices: int, reward: Reward, draws: str = "latents") -> Split:
    """Divide the devices so that generation and training take about as long (recipes/README.md).

    `draws`: what the model's family draws. ConfigError, one line, if there are too few for a judge that the run must
    serve."""
    judge = int(reward.judge is not None and devices > 0)
    if judge and devices < 3:
        raise ConfigError(
            f"--devices: a judge that the run serves needs a separate device, expected 3 or more, got {devices}; or"
            " give --param urls=[...] of a server that is there"
        )
    if devices <= 1:
        return Split(1, 1, int(devices == 1 and reward.cost == "model"), 0, shared=devices == 1)
    scoring = int(reward.cost == "model" and devices >= 3)
    left = devices - judge - scoring
    rollout = min(left - 1, max(1, round(left * _GENERATING[draws])))
    return Split(rollout, left - rollout, scoring, judge)


def compose(answers: Answers) -> Tree:
    """Return the recipe. ConfigError, one line, as from `share_out`."""
    split = share_out(answers.devices, answers.reward, answers.family.draws)
    keys = _base(answers, split)
    if answers.devices:
        keys |= _with_devices(answers, split)
    if answers.weight_bytes >= _LARGE:
        keys |= {
            "model.lora": {"rank": 64, "alpha": 128, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]},
            "weights.payload": "lora",
            "trainer.optimizer.lr": 3e-4,
        }
    tree: Tree = {}
    keys |= _objective(answers) | _reward(answers.reward, split)
    for path, value in (_of_tokens(keys, answers) if answers.family.draws == "tokens" else keys).items():
        *sections, key = path.split(".")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
    return tree


def _of_tokens(keys: Tree, answers: Answers) -> Tree:
    """Return the keys of a model that draws tokens: without those of latents, with the values of recipes/."""
    own: Tree = {
        "rollout.max_batch": keys["rollout.max_inflight"],
        "trainer.optimizer.lr": 3e-4 if answers.weight_bytes < _TINY else 3e-6,
    }
    if keys["validation"] is not None:
        own["validation"] = {key: value for key, value in keys["validation"].items() if key != "num_inference_steps"}
    if answers.weight_bytes >= _LARGE:
        own["model.lora"] = {"rank": 32, "alpha": 64, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    return {path: value for path, value in (keys | own).items() if path not in _OF_LATENTS}


def _base(answers: Answers, split: Split) -> Tree:
    """Return the keys of every recipe, with values for CPUs, by path."""
    group = -(-(16 if answers.devices else 8) // split.trainer) * split.trainer
    per_update = 4 if not answers.devices else 16 if answers.devices < 8 else 32
    staleness = 0 if split.shared else 2
    keys: Tree = {
        "run.name": answers.name,
        "run.seed": 0,
        "model.pipeline": answers.family.name,
        "model.path": answers.model,
        "data.prompts": answers.prompts,
        "rollout.engine": answers.engine,
        "rollout.workers": split.rollout,
        "rollout.group_size": group,
        "rollout.sampling": answers.sampling,
        "rollout.num_inference_steps": _STEPS,
        "rollout.max_inflight": 2 * group,
        "rollout.max_batch": 2 * group,
        "staleness.max_updates": staleness,
        "buffer.trajectories": 4 * group * split.rollout,
        "buffer.groups": (staleness + 1) * per_update,
        "buffer.window": 1,
        "trainer.workers": split.trainer,
        "trainer.updates": 100,
        "trainer.groups_per_update": per_update,
        "trainer.micro_batch_size": 8,
        "trainer.optimizer.lr": 1e-4,
        "validation": None,
        "checkpoint.every": 20,
    }
    if answers.validation is not None:
        keys["validation"] = {"every": 20, **answers.validation, "num_inference_steps": _STEPS}
    return keys


def _with_devices(answers: Answers, split: Split) -> Tree:
    video = any(shape.part == "video" for shape in answers.family.sampling().media())
    keys: Tree = {
        "run.startup_timeout_s": 1800,
        "model.dtype": "bfloat16",
        "rollout.max_batch": 4 if video else -(-16 // split.trainer) * split.trainer,
        "trainer.updates": 300,
        "trainer.micro_batch_size": 1 if video else 4,
        "trainer.gradient_checkpointing": True,
        "checkpoint.every": 30,
        "placement.rollout": {"cpus": 4, "gpus": 1},
        "placement.reward": {"cpus": 2, "gpus": 1} if split.reward else {"cpus": 1},
        "placement.trainer": {"cpus": 4, "gpus": 1},
    }
    if split.shared:
        keys["placement.colocated"] = True
    if answers.validation is not None:
        keys["validation"] = {"every": 30, **answers.validation, "num_inference_steps": 2 * _STEPS}
    return keys


def _objective(answers: Answers) -> Tree:
    objective = answers.objective
    own = {"algorithm.name": objective.name, **_OBJECTIVES.get(objective.name, {})}
    if not find_kind(objective.kind).noisy:
        return {**own, "rollout.sde": None, "algorithm.forward.draws": 6 if objective.kind == "preference" else 3}
    noise: Tree = {
        "rollout.sde.kind": "cps",
        "rollout.sde.noise_level": 0.8,
        "rollout.sde.window.size": _WINDOW,
        "rollout.sde.window.range": [0, _STEPS // 2],
    }
    small = objective.name == "dance_grpo" and answers.weight_bytes < _LARGE
    return noise | own | ({"rollout.sde.noise_level": 1.2} if small else {})


def _reward(reward: Reward, split: Split) -> Tree:
    scorer: Tree = {"name": reward.name, **({"params": reward.params} if reward.params else {})}
    workers = 1 if split.reward or reward.cost == "elsewhere" else max(1, 2 * split.rollout)
    keys: Tree = {"reward.workers": workers, "reward.scorers": [scorer]}
    if split.reward:
        keys["reward.batch"] = 16
    if reward.judge is not None:
        resources = {"resources": {"cpus": 4, "gpus": split.judge}} if split.judge else {}
        keys["reward.timeout_s"] = 120
        keys["reward.servers"] = [{"name": reward.params["server"], "model": reward.judge, **resources}]
    return keys

"""Finds kinds of trained rows by name, and counts rows. Imports no torch.

A `Kind` has the common properties of its objectives, and names the class that builds their rows and losses. Built-in
kinds are listed here; other packages add theirs through the entry-point group `omni_async.kinds` (each entry point is a
`Kind`). No code outside a kind depends on its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from omni_async.algorithms.registry import FINAL, STEPS, TOKENS, Objective, find_objective
from omni_async.config.algorithm import Algorithm, Forward
from omni_async.config.layout import ParallelLayout
from omni_async.config.rollout import Sde
from omni_async.config.schema import Config
from omni_async.plugins.entry_points import find_registered, load_named

ENTRY_POINT_GROUP = "omni_async.kinds"


@dataclass(frozen=True)
class Kind:
    """A kind of rows of a loss.

    summary: the predicate of a message about an objective of this kind ("trains on final latents").
    loss: `module:Class`, an `omni_async.training.row_loss.RowLoss`, called with (config, objective, policy, model,
        metrics, layout), the last an `omni_async.config.layout.ParallelLayout`.
    rows_per_sample: the number of trained rows of a sample; the loss of an update is the mean over all its rows.
    noisy: whether it trains denoising steps that were taken with noise, so that rollout.sde must name a window;
        otherwise the steps of a sample carry no noise.
    ratio: whether rows have an importance ratio to the policy that generated them, which algorithm.clip_range clips and
        algorithm.correction corrects; its loss then recomputes proximal log-probs.
    paired: whether only a group's best and worst sample are trained, as a pair: every rank then has both, and their
        rows are dealt. Preference files consist of such pairs.
    rewarded: whether its losses depend on rewards. Otherwise scorers only measure, and groups of one sample and groups
        of equal rewards are trained.
    draws: what its rows are made of, as `PipelineFamily.draws`.
    requires: the trajectory tensors of its rows; every objective of the kind must name them.
    fields: the trajectory tensors that engines must return for an objective under a configuration.
    problems: combinations of an objective and the rest of the configuration that cannot work, one message each, in
        addition to problems that follow from the fields above."""

    name: str
    summary: str
    loss: str
    rows_per_sample: Callable[[Config], int]
    noisy: bool = False
    ratio: bool = False
    paired: bool = False
    rewarded: bool = True
    draws: Literal["latents", "tokens"] = "latents"
    requires: tuple[str, ...] = ()
    fields: Callable[[Objective, Config], tuple[str, ...]] = lambda objective, config: objective.fields
    problems: Callable[[Objective, Config], Iterator[str]] = lambda objective, config: iter(())

    def load_loss(self) -> Callable[..., Any]:
        """Load the class of the losses (imports torch)."""
        found: Callable[..., Any] = load_named(self.loss)
        return found


_MEANS = "means"


def sde_of(config: Config) -> Sde:
    """Return `rollout.sde`, which objectives on noisy steps need. Raises ValueError if it is null."""
    if config.rollout.sde is None:
        raise ValueError(f"rollout.sde: {config.algorithm.name} trains noisy steps, and null takes none")
    return config.rollout.sde


def _steps(config: Config) -> int:
    return config.rollout.calls * num_trained(sde_of(config).window.size, config.algorithm.timestep_fraction)


def _draws(config: Config) -> int:
    algorithm = config.algorithm
    return num_draws(config.rollout.num_inference_steps, algorithm.forward, algorithm.timestep_fraction)


def _step_fields(objective: Objective, config: Config) -> tuple[str, ...]:
    """Return the objective's fields, with the means of the behaviour policy only if a gradient depends on them.

    They are as large as the latents, so a metric alone (`kappa_nats`) does not request them. An objective with old
    means gets the means of its ratio's denominator: the behaviour policy in mode `bypass`, and a policy computed by the
    trainer in `decoupled` and `none`."""
    correction = config.correction
    fields = tuple(field for field in objective.fields if field != _MEANS)
    of_ratio = reads_old_means(objective, config.algorithm) and correction.mode == "bypass"
    return (*fields, _MEANS) if of_ratio or correction.kappa_nats is not None else fields


def reads_old_means(objective: Objective, algorithm: Algorithm) -> bool:
    """Return whether a transition objective reads the means of its ratio's denominator."""
    return _MEANS in objective.fields or algorithm.clip_centre == "drift"


def _step_problems(objective: Objective, config: Config) -> Iterator[str]:
    if reads_old_means(objective, config.algorithm) and config.correction.mode == "interpolated":
        reader = objective.name if _MEANS in objective.fields else "algorithm.clip_centre: drift"
        yield (
            f"algorithm.correction.mode: {reader} needs the mean of the policy its ratio is taken to, and"
            " 'interpolated' estimates its log-prob alone; use bypass or decoupled"
        )


# Keys of `algorithm` that have no meaning for tokens: the reason, and the alternative.
_NOT_OF_TOKENS = {
    "clip_range_nats": "the log-ratio of a token is in nats already; set algorithm.clip_range",
    "clip_centre": "the KL of a token has no closed form to centre the clip on; remove it",
    "kl_form": "it is a form of the KL between Gaussian steps, and tokens have the estimate k3 alone; remove it",
    "timestep_fraction": "all tokens of an answer are trained; remove it",
    "unconditional_gradient": "answers are drawn without guidance; remove it",
    "forward": "tokens are trained without noise; remove the section",
    "correction.kappa_nats": "the KL of a token has no closed form; use k3",
    "correction.tempering": "a token is no denoising step; use tempering: update",
}


def _token_problems(objective: Objective, config: Config) -> Iterator[str]:
    for key, reason in _NOT_OF_TOKENS.items():
        given, default = (attrgetter(key)(algorithm) for algorithm in (config.algorithm, Algorithm()))
        if given != default:
            yield f"algorithm.{key}: {reason}"


BUILT_IN: tuple[Kind, ...] = (
    Kind(
        name="transition",
        summary="trains denoising steps that were taken with noise",
        loss="omni_async.training.transition_loss:TransitionLoss",
        rows_per_sample=_steps,
        noisy=True,
        ratio=True,
        requires=STEPS,
        fields=_step_fields,
        problems=_step_problems,
    ),
    Kind(
        name="distillation",
        summary="trains denoising steps that were taken with noise",
        loss="omni_async.training.transition_loss:TransitionLoss",
        rows_per_sample=_steps,
        noisy=True,
        rewarded=False,
        requires=STEPS,
    ),
    *(
        Kind(
            name=name,
            summary="trains on final latents and noises them itself",
            loss="omni_async.training.forward_loss:ForwardLoss",
            rows_per_sample=_draws,
            paired=name == "preference",
            requires=FINAL,
        )
        for name in ("forward", "preference")
    ),
    Kind(
        name="token",
        summary="trains the tokens of answers",
        loss="omni_async.training.token_loss:TokenLoss",
        rows_per_sample=lambda config: 1,  # a row is a whole answer
        ratio=True,
        draws="tokens",
        requires=TOKENS,
        problems=_token_problems,
    ),
)


def find_kind(name: str) -> Kind:
    """Return the kind called `name`. Raises ValueError like `find_registered`."""
    own = {kind.name: kind for kind in BUILT_IN}
    return find_registered(name, ENTRY_POINT_GROUP, Kind, "the objective's kind", own)


def trajectory_fields(objective: Objective, config: Config) -> tuple[str, ...]:
    """Return the names of the `Trajectory.tensors` that engines must return with a training sample of this run.

    They are exactly the tensors that training reads, because each is sent, stored and checkpointed for every sample."""
    return find_kind(objective.kind).fields(objective, config)


def num_trained(window: int, fraction: float) -> int:
    """Return the number of trained steps of a window: `algorithm.timestep_fraction` of it, rounded down, at least 1."""
    return max(1, int(window * fraction + 1e-9))  # 0.7 * 10 is slightly below 7


def num_draws(num_inference_steps: int, forward: Forward, timestep_fraction: float) -> int:
    """Return the number K of noise draws of a sample: `forward.draws`, or a fraction of the available sigmas.

    Args:
        num_inference_steps: N, also the number of available sigmas (N - 1 for `schedule_wo_first`).
        forward: `algorithm.forward`.
        timestep_fraction: applies without `forward.draws`; rounded down, but to at least 1 draw.

    Raises:
        ValueError: no sigma is available."""
    if num_inference_steps < 1:
        raise ValueError(f"num_inference_steps must be >= 1, got {num_inference_steps}")
    choices = num_inference_steps - (forward.sigmas == "schedule_wo_first")
    if choices == 0:
        raise ValueError("forward.sigmas: schedule_wo_first leaves nothing of a schedule of 1 step")
    return forward.draws or num_trained(choices, timestep_fraction)


def samples_per_rank(config: Config, group_size: int | None = None) -> float:
    """Return the work, in samples, of a group on the rank that has most of it; all ranks wait for that rank.

    `group_size` replaces the recipe's. Raises ValueError for an unknown objective, or degrees that do not divide the
    ranks."""
    layout, size = ParallelLayout.of(config.trainer), group_size or config.rollout.group_size
    kind = find_kind(find_objective(config.algorithm.name).kind)
    if not kind.paired:
        return layout.slowest_share(size)
    draws = kind.rows_per_sample(config)  # a pair's draws are dealt instead of its samples
    return size * layout.slowest_share(draws) / draws

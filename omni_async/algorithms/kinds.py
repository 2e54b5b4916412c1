"""Finds kinds of trained rows by name.

What objectives of one kind have in common, known without importing torch, and the class that makes rows and losses of
them.

Built-in kinds are listed here; other packages add theirs through the entry-point group
`omni_async.kinds` (each entry point is a `Kind`). Nothing outside a kind asks which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omni_async.algorithms.registry import Objective
from omni_async.algorithms.timesteps import num_draws, num_trained
from omni_async.config.schema import Config
from omni_async.entry_points import find_registered, load_named

ENTRY_POINT_GROUP = "omni_async.kinds"


def _of_the_objective(objective: Objective, config: Config) -> tuple[str, ...]:
    return objective.fields


def _nothing(objective: Objective, config: Config) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class Kind:
    """A kind of rows that a loss is computed of.

    summary: what an objective of this kind does, as the predicate of a message ("trains on final latents").
    loss: `module:Class`, an `omni_async.training.row_loss.RowLoss`, made with (config, objective, policy, model,
        metrics, layout), the last an `omni_async.layout.ParallelLayout`.
    rows_per_sample: the number of trained rows of one sample; the loss of an update is the mean over all of them.
    noisy: whether it trains denoising steps that were taken with noise, so that rollout.sde must name a window;
        otherwise the steps of a sample carry none.
    ratio: whether rows have an importance ratio to the policy that made them, which algorithm.clip_range clips and
        algorithm.correction corrects; its loss then recomputes proximal log-probs.
    paired: whether a group's best and worst sample alone are trained, as a pair: every rank then has both, and
        their rows are dealt. Preference files are made of such pairs.
    fields: the trajectory tensors that engines must return for an objective under a configuration.
    problems: combinations of an objective and the rest of the configuration that cannot work, one message each, beside
        those that follow from the above."""

    name: str
    summary: str
    loss: str
    rows_per_sample: Callable[[Config], int]
    noisy: bool = False
    ratio: bool = False
    paired: bool = False
    fields: Callable[[Objective, Config], tuple[str, ...]] = _of_the_objective
    problems: Callable[[Objective, Config], Iterator[str]] = _nothing

    def load_loss(self) -> Callable[..., Any]:
        """Load the class of the losses (imports torch)."""
        found: Callable[..., Any] = load_named(self.loss)
        return found


_MEANS = "means"


def _steps(config: Config) -> int:
    if config.rollout.sde is None:
        raise ValueError(f"rollout.sde: {config.algorithm.name} trains noisy steps, and null takes none")
    return num_trained(config.rollout.sde.window.size, config.algorithm.timestep_fraction)


def _draws(config: Config) -> int:
    algorithm = config.algorithm
    return num_draws(config.rollout.num_inference_steps, algorithm.forward, algorithm.timestep_fraction)


def _step_fields(objective: Objective, config: Config) -> tuple[str, ...]:
    """Return the objective's fields, with the means of the behaviour policy only where a gradient depends on them.

    The objective or the off-policy correction reads them then. They are as large as the latents, so a metric alone
    (`kappa_nats`) does not ask for them.

    An objective that takes old means gets those of the policy its ratio is taken to, which is the behaviour policy in
    mode `bypass` and is computed by the trainer in `decoupled` and `none`."""
    correction = config.correction
    fields = tuple(field for field in objective.fields if field != _MEANS)
    read = correction.kappa_nats is not None or (_MEANS in objective.fields and correction.mode == "bypass")
    return (*fields, _MEANS) if read else fields


def _step_problems(objective: Objective, config: Config) -> Iterator[str]:
    if _MEANS in objective.fields and config.correction.mode == "interpolated":
        yield (
            f"algorithm.correction.mode: {objective.name} needs the mean of the policy its ratio is taken to, and"
            " 'interpolated' estimates its log-prob alone; use bypass or decoupled"
        )


BUILT_IN: tuple[Kind, ...] = (
    Kind(
        name="transition",
        summary="trains denoising steps that were taken with noise",
        loss="omni_async.training.transition_loss:TransitionLoss",
        rows_per_sample=_steps,
        noisy=True,
        ratio=True,
        fields=_step_fields,
        problems=_step_problems,
    ),
    *(
        Kind(
            name=name,
            summary="trains on final latents and noises them itself",
            loss="omni_async.training.forward_loss:ForwardLoss",
            rows_per_sample=_draws,
            paired=name == "preference",
        )
        for name in ("forward", "preference")
    ),
)


def find_kind(name: str) -> Kind:
    """Return the kind called `name`; ValueError lists the known ones. A built-in name cannot be taken."""
    known = {kind.name: kind for kind in BUILT_IN}
    return known.get(name) or find_registered(name, ENTRY_POINT_GROUP, Kind, "kinds of rows", known)

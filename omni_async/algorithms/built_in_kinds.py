"""Lists the built-in kinds of rows: denoising steps, final latents, and preference pairs of final latents.

Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from omni_async.algorithms.kinds import Kind
from omni_async.algorithms.registry import Objective
from omni_async.algorithms.timesteps import num_draws, num_trained
from omni_async.config.schema import Config

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
    mode `bypass` and is computed by the trainer in `decoupled` and `none`.
    """
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

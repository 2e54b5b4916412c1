"""Decides, once from the configuration, how updates are carried out.

The plan determines how far an update may stream, and what it needs before its first gradient.

as_ready   advantages only need their group (std: group or none): each group's backward runs when the group is ready
unscaled   std: global with an objective that is homogeneous in the advantage: backward runs on reward - group mean,
           and the gradient is multiplied by 1 / (std + eps) once the last group is in. Exact, unless the advantage
           clip binds, which the last group reveals: then the gradients are discarded and the update is recomputed
           from the same groups.
collect    everything else waits for the whole update first
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from omni_async.algorithms.checks import problems
from omni_async.algorithms.kinds import Kind, find_kind
from omni_async.algorithms.registry import Objective, find_objective
from omni_async.config import Config, ConfigError

Streaming = Literal["as_ready", "unscaled", "collect"]


@dataclass(frozen=True)
class Plan:
    """The way updates are carried out: `mode`, and `why` in words.

    `proximal`: groups get a proximal pass when they arrive. `weigh`: importance weights are computed from all groups
    together. `ratio`: rows have an importance ratio. `paired`: only a group's best and worst sample are trained.
    `rows_per_sample`: trained rows of one sample (half of a pair's). `draws_tokens`: rows are answers, and ranks need
    the group's prompt."""

    mode: Streaming
    why: str
    proximal: bool
    weigh: bool
    ratio: bool
    paired: bool
    rows_per_sample: int
    samples_per_group: int
    draws_tokens: bool

    @property
    def said(self) -> str:
        """Return how far training streams, and why, as a sentence for the console."""
        how = (
            "groups are trained on when the whole update is scored"
            if self.mode == "collect"
            else "each group is trained on as soon as it is scored"
        )
        return f"{how} ({self.why})"


def require_trainable(config: Config) -> Plan:
    """Return how updates are carried out. Raises ConfigError if the objective is unknown, unfit, or cannot stream."""
    try:
        problem = next(problems(config), None)
    except ValueError as error:  # no such objective
        raise ConfigError(str(error)) from None
    if problem is not None:
        raise ConfigError(problem)
    plan = plan_updates(config)
    if config.trainer.streaming == "on" and plan.mode == "collect":
        raise ConfigError(f"trainer.streaming: 'on' cannot be had here: {plan.why}; use 'auto'")
    return plan


def plan_updates(config: Config) -> Plan:
    objective, correction = find_objective(config.algorithm.name), config.correction
    kind = find_kind(objective.kind)
    weigh = kind.ratio and correction.weighs_update(config.algorithm.penalised)
    # By the time some rows are trained, the proximal policy no longer exists.
    recomputes = correction.mode in ("decoupled", "none") and config.trainer.steps_per_update > 1
    mode, why = _streaming(config, objective, kind, weigh)
    return Plan(
        mode=mode,
        why=why,
        weigh=weigh,
        proximal=weigh or (kind.ratio and recomputes),
        ratio=kind.ratio,
        paired=kind.paired,
        rows_per_sample=kind.rows_per_sample(config),
        samples_per_group=2 if kind.paired else config.rollout.group_size,
        draws_tokens=kind.draws == "tokens",
    )


def _streaming(config: Config, objective: Objective, kind: Kind, weigh: bool) -> tuple[Streaming, str]:
    trainer, advantage = config.trainer, config.algorithm.advantage
    several_steps = "several optimizer steps need the whole update: it is applied whole or, if the run ends, not at all"
    first_that_holds: tuple[tuple[bool, Streaming, str], ...] = (
        (trainer.streaming == "off", "collect", "trainer.streaming is off"),
        (trainer.steps_per_update > 1, "collect", several_steps),
        (weigh, "collect", "the off-policy correction looks at the whole update"),
        (kind.paired, "as_ready", "a preference needs its pair alone"),
        (not kind.rewarded, "as_ready", "the loss reads no rewards"),
        (advantage.track_prompts, "collect", "prompts are tracked across groups"),
        (advantage.aggregate == "gdpo", "collect", "GDPO whitens advantages over the update"),
        (advantage.std != "global", "as_ready", f"advantage.std: {advantage.std} needs the group alone"),
        (advantage.aggregate != "rewards", "collect", "a global std of every scorer needs the whole update"),
        (advantage.form == "best_of_n", "as_ready", "the best of a group need the group alone"),
        (advantage.form == "reward_weighted", "collect", "a temperature in units of the global std needs the update"),
    )
    for holds, mode, reason in first_that_holds:
        if holds:
            return mode, reason
    if not objective.homogeneous(config.algorithm):
        return "collect", "a global std and a loss that does not scale with the advantage need the whole update"
    return "unscaled", "the objective scales with the advantage: the global std is applied to the gradient at the end"

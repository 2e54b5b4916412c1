"""Finds settings of a recipe that cannot work with its objective, with reason and alternative. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from omni_async.algorithms.kinds import Kind, find_kind
from omni_async.algorithms.registry import Objective, clips, find_objective
from omni_async.config.algorithm import Advantage, Correction
from omni_async.config.draws import drawn
from omni_async.config.layout import layout_problems
from omni_async.config.schema import Config


def problems(config: Config) -> Iterator[str]:
    """Yield one message per combination that cannot work. Raises ValueError for an unknown objective."""
    objective = find_objective(config.algorithm.name)
    kind = find_kind(objective.kind)
    if missing := [field for field in kind.requires if field not in objective.fields]:
        yield f"algorithm.name: objective {objective.name!r}: fields: {kind.name!r} rows are made of {missing} too"
    yield from _drawn(config, objective, kind)
    yield from _rows(config, objective, kind)
    yield from _ratio(config, objective, kind)
    yield from _rewards(config, objective, kind)
    if config.algorithm.teacher is not None and "teacher" not in objective.auxiliary(config.algorithm):
        yield (
            f"algorithm.teacher: {objective.name} has no term for a teacher; remove it, or set algorithm.name to"
            " distill, flow_grpo or another objective on denoising steps"
        )
    if kind.paired and config.trainer.groups_per_micro_batch > 1:
        yield (
            f"trainer.groups_per_micro_batch: {objective.name} deals the noise draws of one pair over the ranks; use 1,"
            f" and more algorithm.forward.draws to fill a micro-batch, got {config.trainer.groups_per_micro_batch}"
        )
    if config.algorithm.settings and objective.settings is None:
        yield (
            f"algorithm.settings: these are settings of an objective of another package, and {objective.name!r} has"
            " none; remove them, or set algorithm.name"
        )
    yield from kind.problems(objective, config)
    yield from layout_problems(config.trainer.workers, config.trainer.sequence_parallel, config.trainer.shard)
    if config.data.preferences is not None:
        yield from _offline(config, objective, kind)
    yield from objective.problems(config)


def _drawn(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    draws = drawn(config)
    if draws not in (None, kind.draws):
        model = "an emulated model" if config.model.pipeline is None else config.model.pipeline
        fitting = "flow_grpo" if draws == "latents" else "token_grpo"
        yield (
            f"algorithm.name: {objective.name} {kind.summary}, and {model} draws {draws}; use an objective on {draws},"
            f" such as {fitting}"
        )


def _rows(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    if kind.noisy and config.rollout.sde is None:
        yield f"rollout.sde: {objective.name} {kind.summary}, and null takes none; set kind, noise_level and window"
    if not kind.noisy and config.rollout.sde is not None:
        yield (
            f"rollout.sde: {objective.name} {kind.summary}, so an SDE window would be noise that nobody learns from;"
            " set rollout.sde: null"
        )

    if not kind.noisy and config.rollout.calls > 1:
        yield (
            f"rollout.calls: {objective.name} {kind.summary}, which a sample of several calls has several of; take an"
            f" objective that trains denoising steps, or 1 call, got {config.rollout.calls}"
        )


def _rewards(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    if not kind.rewarded:
        if config.algorithm.advantage != Advantage():
            yield (
                f"algorithm.advantage: {objective.name} reads no rewards, so there is no advantage to compute; remove"
                " the section"
            )
        if config.validation is not None and config.unscored:
            yield "validation: without reward.scorers there is nothing to measure; set scorers, or validation: null"
        return
    if config.unscored:
        yield (
            f"reward.scorers: {objective.name} learns from rewards, and a teacher gives none; set at least one scorer,"
            " or algorithm.name: distill"
        )
    yield from _advantage(config, kind)
    if not kind.paired and config.rollout.group_size < 2:
        yield (
            f"rollout.group_size: {objective.name} compares the samples of a prompt, so it needs at least 2, got"
            f" {config.rollout.group_size}"
        )


def _ratio(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    algorithm, name = config.algorithm, objective.name
    if config.trainer.optimizer.step_size is not None:
        yield from _step_size(algorithm.correction, name, kind)
    if kind.ratio:
        yield from correction_problems(algorithm.correction, objective.ratio)
        yield from _kept_steps(algorithm.correction, objective, kind)
        if not objective.ratio:
            yield from _weights_alone(config, name)
        return
    if algorithm.correction != Correction():
        yield (
            f"algorithm.correction: {name} has no ratio to the policy that made a sample, so there is nothing to"
            " correct; remove the section"
        )
    if clips(algorithm):
        instead = "; algorithm.awm.clip_range is its own" if name == "awm" else ""
        yield f"algorithm.{clips(algorithm)[0]}: {name} does not clip a ratio of denoising steps{instead}; remove it"


def _step_size(settings: Correction, name: str, kind: Kind) -> Iterator[str]:
    key = "trainer.optimizer.step_size"
    if not kind.ratio:
        yield f"{key}: {name} has no ratio to the policy that made a sample, so drift is not measured; use schedule"
    elif settings.mode == "interpolated":
        yield f"{key}: mode interpolated measures only a part of the drift; use another correction.mode, or null"


def _kept_steps(settings: Correction, objective: Objective, kind: Kind) -> Iterator[str]:
    if settings.steps == "all" or settings.mode == "auto":
        return
    if not settings.masks:
        yield _problem("steps", "no rule masks steps, so kept means all", "a rule such as k3, or steps: all")
    if objective.unit == "row" and (settings.weights == "none" or settings.level == "step"):
        yield _problem(
            "steps",
            f"neither the ratio of {objective.name} nor a weight is computed over the steps of a sample",
            f"algorithm.name: {'gspo' if kind.draws == 'latents' else 'token_gspo'}, level: trajectory, or steps: all",
        )


def _weights_alone(config: Config, name: str) -> Iterator[str]:
    """Yield problems of an objective without a ratio: its weights must contain the whole drift, once."""
    settings = config.algorithm.correction
    stands_for = f"the loss of {name} has no ratio, so weights to the policy that took the step correct it"
    if settings.mode in ("decoupled", "interpolated"):
        yield _problem("mode", f"{stands_for}, got {settings.mode}", "mode: bypass, with weights")
    if settings.mode == "auto" and config.staleness.max_updates > 0:
        yield _problem("mode", f"{stands_for}, and auto may use none", "mode: bypass, weights: importance or tempered")
    several = config.trainer.steps_per_update > 1
    if several and settings.mode == "bypass" and settings.weighs_update(config.algorithm.penalised):
        yield (
            "trainer.steps_per_update: these weights are computed once, before the first optimizer step, and"
            f" {name} has no ratio for the steps after it; use 1, or weights: importance without m2 and kl_coef, got"
            f" {config.trainer.steps_per_update}"
        )


def _advantage(config: Config, kind: Kind) -> Iterator[str]:
    advantage, name, size = config.algorithm.advantage, config.algorithm.name, config.rollout.group_size
    for key, form in (("temperature", "reward_weighted"), ("best", "best_of_n")):
        if advantage.form != form and (given := getattr(advantage, key)) != getattr(Advantage(), key):
            yield (
                f"algorithm.advantage.{key}: it belongs to form {form}, and form is {advantage.form}; set"
                f" algorithm.advantage.form: {form}, or remove it, got {given:g}"
            )
    if advantage.form == "standardised":
        return
    if kind.paired:
        yield (
            f"algorithm.advantage.form: {name} compares the best with the worst sample and reads no advantage; remove"
            f" it, got {advantage.form}"
        )
        return
    if advantage.track_prompts:
        yield (
            f"algorithm.advantage.track_prompts: weights of form {advantage.form} compare the samples of a group alone;"
            " remove it"
        )
    if advantage.form == "best_of_n" and advantage.best >= size:
        yield (
            f"algorithm.advantage.best: {advantage.best} of rollout.group_size = {size} samples is all of them; use a"
            " smaller number"
        )
    elif (largest := size / advantage.best if advantage.form == "best_of_n" else size) > advantage.clip_max:
        yield (
            f"algorithm.advantage.clip_max: with rollout.group_size = {size} weights of form {advantage.form} reach"
            f" {largest:g}, which clip_max = {advantage.clip_max:g} would cut; use at least that"
        )


def _offline(config: Config, objective: Objective, kind: Kind) -> Iterator[str]:
    if not kind.paired:
        yield (
            f"data.preferences: {objective.name} learns from rewards of generated samples; preference pairs are for"
            " diffusion_dpo"
        )
    if config.rollout.group_size != 2:
        yield f"rollout.group_size: a preference pair is a group of 2, got {config.rollout.group_size}"
    if config.reward.scorers:
        yield "reward.scorers: with data.preferences nothing is scored; remove them"
    if config.validation is not None:
        yield (
            "validation: with data.preferences nothing is generated, so nothing can be validated; set validation: null"
        )
    if config.data.prompts is not None:
        yield "data.prompts: with data.preferences the prompts come from the pairs; remove it"


# Keys that a mode of the correction cannot use: the mode, the keys, the reason, and the alternative. An
# objective without a ratio may have weights in mode bypass.
_OF_MODE = (
    ("none", ("weights",), "mode none takes samples as if they were fresh", "mode: decoupled, or weights: none"),
    (
        "none",
        ("kappa_nats", "m2", "k1", "k2", "k3"),
        "mode none takes samples as if they were fresh and masks nothing",
        "mode: decoupled, or null",
    ),
    (
        "bypass",
        ("weights",),
        "with mode bypass the ratio is taken to the behaviour policy already, whose distance a weight would"
        " count twice",
        "mode: decoupled, or weights: none",
    ),
    (
        "bypass",
        ("kappa_nats", "m2"),
        "it measures the proximal policy against the behaviour policy, and mode bypass knows no proximal policy",
        "mode: decoupled, or k1, k2 or k3",
    ),
    (
        "interpolated",
        ("kappa_nats",),
        "mode interpolated estimates the proximal log-prob and has no proximal mean",
        "mode: decoupled, or k1, k2 or k3",
    ),
    (
        "auto",
        tuple(name for name in Correction.__struct_fields__ if name != "mode"),
        "mode auto decides on weights and masks itself",
        "mode: decoupled, or mode: bypass",
    ),
)


def correction_problems(settings: Correction, ratio: bool = True) -> Iterator[str]:
    """Yield one message per combination within `algorithm.correction` that cannot work.

    `ratio` is that of the `Objective`."""
    for mode, names, reason, instead in _OF_MODE:
        if mode == "bypass" and not ratio:
            continue
        for name in names if settings.mode == mode else ():
            if getattr(settings, name) != getattr(Correction(), name):
                yield _problem(name, reason, instead)
    if settings.mode == "auto":
        return
    for name in ("band", "k1"):
        pair = getattr(settings, name)
        if pair is not None and pair[0] >= pair[1]:
            yield _problem(name, f"[{pair[0]}, {pair[1]}] is no interval", "lo < hi, such as [0.5, 2.0]")
    if settings.band is not None and settings.weights == "tempered":
        yield _problem(
            "band",
            "tempering already bounds the spread of the weights, and tempered ratios mean nothing to a band",
            "cap, or weights: importance",
        )
    if settings.weights == "none" and settings.floor is not None:
        yield _problem("floor", "it raises importance weights and weights is none", "weights: importance, or null")
    if settings.floor is not None and settings.cap is not None and settings.floor >= settings.cap:
        yield _problem(
            "floor",
            f"{settings.floor} is not below cap, {settings.cap}, so all weights would be equal",
            "a lower floor",
        )
    if settings.floor is not None and settings.band is not None and settings.floor <= settings.band[0]:
        yield _problem(
            "floor",
            f"{settings.floor} raises no weight, because band sets those below {settings.band[0]} to 0",
            "null, or a floor inside the band",
        )
    if settings.interpolation != "loglinear" and settings.mode != "interpolated":
        yield _problem(
            "interpolation",
            f"mode {settings.mode} interpolates nothing, got {settings.interpolation}",
            "mode: interpolated, or remove it",
        )
    if settings.tempering == "step" and settings.weights != "tempered":
        yield _problem("tempering", f"weights is {settings.weights}, so no exponent is chosen", "weights: tempered")
    elif settings.tempering == "step" and settings.level != "step":
        yield _problem(
            "tempering",
            f"level is {settings.level}: the steps of a sample share a weight, so they cannot have exponents each",
            "tempering: update, or level: step",
        )
    for rule in ("k1", "k2", "k3"):
        level = "step" if isinstance(settings.reject_level, str) else settings.reject_level_of(rule)
        if level != "step" and getattr(settings, rule) is None:
            yield _problem(
                f"reject_level.{rule}",
                f"{level} is the level of {rule}, which is null",
                f"a bound {rule}, or remove it",
            )
    if settings.level == "sequence" and settings.log_ratio == "sum":
        yield _problem(
            "level",
            "sequence is the sum over steps of log-ratios per element, and log_ratio is sum",
            "log_ratio: mean, or level: trajectory",
        )
    if settings.weights == "none" and settings.band is not None:
        instead = "k1, which needs no weights, or weights: importance"
        yield _problem("band", "it is a rule on importance weights and weights is none", instead)
    if settings.weights == "none" and settings.normalise:
        yield _problem(
            "normalise", "weights is none, so there is nothing to normalise", "denominator: kept, or weights"
        )


def _problem(name: str, reason: str, instead: str) -> str:
    return f"algorithm.correction.{name}: {reason}; use {instead}"

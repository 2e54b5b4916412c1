"""Finds objectives by name: the requirements of each, without importing torch, and the function that computes it.

Built-in objectives are listed here; other packages add theirs through the entry-point group
`omni_async.objectives` (each entry point is an `Objective`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from omni_async.config.algorithm import Algorithm
from omni_async.config.schema import Config
from omni_async.config.section import Section
from omni_async.plugins.entry_points import OBJECTIVES, find_registered, load_named, registered_names

AuxiliaryPolicy = Literal["reference", "old", "ema", "teacher"]


# The tensors that engines can return with a sample (`omni_async.rollout.base.Trajectory`).
TRAJECTORY_FIELDS = ("latents", "log_probs", "means", "final", "conditioning", "prompt", "tokens")
STEPS = ("latents", "log_probs", "conditioning")
FINAL = ("final", "conditioning")
TOKENS = ("prompt", "tokens", "log_probs")


@dataclass(frozen=True)
class Objective:
    """An objective, its requirements and the function that computes it.

    kind: the `omni_async.algorithms.kinds.Kind` of its rows. "transition" objectives train denoising steps of a window,
        from recorded latents and log-probs; "distillation" objectives do so without rewards. "forward" objectives add
        noise to final latents, and need nothing else of a sample. "preference" objectives do the same with a group's
        best and worst sample. "token" objectives train whole answers.
    compute: `module:function`; (inputs of its kind, Algorithm) -> ObjectiveOutput. TransitionInputs for "transition"
        and "distillation", ForwardInputs for "forward" and "preference", TokenInputs for "token".
    fields: the trajectory tensors it reads, from `TRAJECTORY_FIELDS`; its kind selects the tensors that engines return.
    unit: the rows that a micro-batch must not separate: a "row", or all rows of a "sample". Pairs always stay together.
    ratio: whether the loss contains the ratio of `algorithm.correction.mode`. Without a ratio, the weights of mode
        bypass correct for the drift. Read only if its kind has a ratio.
    homogeneous: whether loss(c A) = c loss(A) for c > 0 under these settings, which lets the trainer stream groups
        under a global std.
    auxiliary: the auxiliary policies whose outputs the function needs (`ref_velocity`, `ref_mean`, `ref_log_prob`...).
    old_decay: decay of the old policy, which generates the samples if it exists: after update u (from 1) it becomes
        decay(u) * itself + (1 - decay(u)) * the current policy.
    settings: the section of `algorithm.settings`, for an objective of another package; built-in objectives have
        sections of the schema. Every field has a `doc`.
    problems: combinations with the rest of the configuration that cannot work, one message each."""

    name: str
    summary: str
    kind: str
    compute: str
    fields: tuple[str, ...]
    unit: Literal["row", "sample"] = "row"
    ratio: bool = True
    homogeneous: Callable[[Algorithm], bool] = lambda algorithm: False
    auxiliary: Callable[[Algorithm], frozenset[AuxiliaryPolicy]] = lambda algorithm: frozenset()
    old_decay: Callable[[Algorithm, int], float] = lambda algorithm, update: 0.0
    settings: type[Section] | None = None
    problems: Callable[[Config], Iterator[str]] = lambda config: iter(())

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.fields) - set(TRAJECTORY_FIELDS)):
            raise ValueError(
                f"objective {self.name!r}: fields: engines return {list(TRAJECTORY_FIELDS)}, got {unknown}"
            )
        for name in ("homogeneous", "auxiliary", "old_decay", "problems"):
            if not callable(given := getattr(self, name)):
                raise TypeError(f"objective {self.name!r}: {name}: expected a function, got {given!r}")
        if self.settings is not None and not issubclass(self.settings, Section):
            raise TypeError(
                f"objective {self.name!r}: settings must be a subclass of omni_async.config.section.Section, which"
                f" refuses unknown keys, got {self.settings!r}"
            )

    def load(self) -> Callable[[Any, Algorithm], Any]:
        """Load the function itself (imports torch).

        Raises:
            ValueError: one line, if it cannot be imported, or is not callable."""
        try:
            function: Callable[[Any, Algorithm], Any] = load_named(self.compute)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (another package's code)
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"objective {self.name!r}: compute: cannot load {self.compute!r}: {why}") from None
        if not callable(function):
            raise ValueError(f"objective {self.name!r}: compute: {self.compute!r} is {function!r}, no function")
        return function


def stored_policies(objective: Objective, config: Config) -> tuple[str, ...]:
    """Return the auxiliary policies that trainer and checkpoints store as tensors, sorted.

    Under LoRA the reference is not stored: it is the model without its adapters. The teacher is read from its own
    checkpoint."""
    wanted = {*objective.auxiliary(config.algorithm), *(("ema",) if config.trainer.ema is not None else ())}
    elsewhere = {"teacher", *(("reference",) if config.model.lora is not None else ())}
    return tuple(sorted(wanted - elsewhere))


def clips(algorithm: Algorithm) -> list[str]:
    """Return the keys of `algorithm` that clip a ratio of denoising steps, and that a recipe sets."""
    names = ("clip_range", "clip_range_nats", "clip_centre", "dual_clip")
    return [name for name in names if getattr(algorithm, name) not in (None, "zero")]


def _no_kl(algorithm: Algorithm) -> bool:
    return algorithm.kl_coef == 0 and algorithm.teacher is None


def _reference(algorithm: Algorithm) -> frozenset[AuxiliaryPolicy]:
    return frozenset({"reference"}) if algorithm.kl_coef > 0 else frozenset()


def _frozen(algorithm: Algorithm) -> frozenset[AuxiliaryPolicy]:
    return _reference(algorithm) | (frozenset({"teacher"}) if algorithm.teacher is not None else frozenset())


def _mix_problems(config: Config) -> Iterator[str]:
    if config.rollout.sde is not None and config.rollout.sde.window.schedule == "uniform":
        yield (
            "rollout.sde.window.schedule: mix_grpo slides one window over the steps; set random, progressive, decay or"
            " exp_decay (or algorithm.name: flow_grpo, whose windows are drawn per group)"
        )


def _dance_problems(config: Config) -> Iterator[str]:
    if config.rollout.sde is not None and config.rollout.sde.kind != "dance":
        yield (
            f"rollout.sde.kind: dance_grpo is defined for 'dance', got {config.rollout.sde.kind!r}; flow_grpo is the"
            " same loss for any kind"
        )
    if config.algorithm.kl_coef > 0:
        yield (
            f"algorithm.kl_coef: dance_grpo has no KL term, got {config.algorithm.kl_coef}; flow_grpo is the same loss"
            " with one"
        )


def _guard_problems(config: Config) -> Iterator[str]:
    if config.rollout.sde is not None and config.rollout.sde.kind != "flow":
        yield (
            "rollout.sde.kind: grpo_guard rescales ratios by std sqrt(step size), which is the noise scale of 'flow'"
            f" alone; got {config.rollout.sde.kind!r}"
        )
    if config.algorithm.clip_range_nats is not None:
        yield (
            "algorithm.clip_range_nats: grpo_guard compares its clip range with log-ratios that it has rescaled, which"
            " no number of nats bounds; set algorithm.clip_range, 2e-6 as published"
        )
    if config.algorithm.clip_centre == "drift":
        yield "algorithm.clip_centre: grpo_guard centres its ratios itself, through its bias; remove it, got drift"


def _dppo_problems(config: Config) -> Iterator[str]:
    if found := clips(config.algorithm):
        yield (
            f"algorithm.{found[0]}: flow_dppo drops rows by their KL instead of clipping; remove it and set"
            " algorithm.dppo.kappa_max"
        )
    if config.algorithm.dppo.kappa_max_nats is not None and config.algorithm.dppo.width == "unit":
        yield (
            "algorithm.dppo.kappa_max_nats: with width unit the KL is that of Gaussians of variance 1, which is none of"
            " the denoising step's in nats; set algorithm.dppo.kappa_max, or width: transition"
        )


def nft_decay(kind: Literal["none", "slow", "late"], update: int) -> float:
    """Return d of DiffusionNFT's old policy, old <- d old + (1 - d) policy, after `update` updates.

    The three published schedules (arXiv 2509.16117, decay types 0, 1, 2 of its code): `none` 0, the old policy is the
    current policy; `slow` min(.001 u, .5); `late` 0 before u = 75, then min(.0075 (u - 75), .999)."""
    if update < 0:
        raise ValueError(f"update must be >= 0, got {update}")
    match kind:
        case "none":
            return 0.0
        case "slow":
            return min(0.001 * update, 0.5)
        case "late":
            return min(0.0075 * max(update - 75, 0), 0.999)
    raise ValueError(f"kind must be 'none', 'slow' or 'late', got {kind!r}")


def _pulls_to_average(algorithm: Algorithm) -> bool:
    return algorithm.awm.ema_coef > 0 or (algorithm.awm.ema_coef_end or 0) > 0


def _awm_auxiliary(algorithm: Algorithm) -> frozenset[AuxiliaryPolicy]:
    wanted: dict[AuxiliaryPolicy, bool] = {"ema": _pulls_to_average(algorithm), "old": algorithm.awm.off_policy}
    return _reference(algorithm) | {name for name, want in wanted.items() if want}


def _awm_problems(config: Config) -> Iterator[str]:
    if _pulls_to_average(config.algorithm) and config.trainer.ema is None:
        yield "algorithm.awm.ema_coef: a pull to the moving average needs one; set trainer.ema"


def _reinforce_problems(config: Config) -> Iterator[str]:
    if found := clips(config.algorithm):
        yield (
            f"algorithm.{found[0]}: reinforce has no ratio to clip; remove it, and bound the weights by"
            " algorithm.correction.cap"
        )


def _nft_problems(config: Config) -> Iterator[str]:
    if config.algorithm.advantage.form != "standardised":
        yield (
            "algorithm.advantage.form: diffusion_nft contrasts samples better and worse than the mean, and weights >= 0"
            f" know no worse ones; use standardised, or algorithm.name: awm, got {config.algorithm.advantage.form}"
        )


def _dpo_problems(config: Config) -> Iterator[str]:
    if config.data.preferences is None and config.rollout.group_size < 2:
        yield (
            "rollout.group_size: diffusion_dpo compares the best with the worst sample of a prompt, and"
            f" {config.rollout.group_size} sample makes no pair; use at least 2, or data.preferences"
        )
    if config.algorithm.kl_coef > 0:
        yield (
            "algorithm.kl_coef: diffusion_dpo holds on to the reference through dpo.beta, not through a KL; remove it,"
            f" got {config.algorithm.kl_coef}"
        )


def _distill_problems(config: Config) -> Iterator[str]:
    if config.algorithm.teacher is None:
        yield "algorithm.teacher: distill learns from a teacher alone, got null; set algorithm.teacher.path"


def _gspo_problems(config: Config) -> Iterator[str]:
    if config.algorithm.answers.mean != "sequence":
        yield (
            "algorithm.answers.mean: token_gspo has one ratio for an answer, which its tokens share; use sequence, got"
            f" {config.algorithm.answers.mean}"
        )


def _cispo_problems(config: Config) -> Iterator[str]:
    clip_range = config.algorithm.clip_range
    if isinstance(clip_range, tuple):
        yield (
            "algorithm.clip_range: token_cispo bounds its ratio above alone; use the upper number of the pair, got"
            f" {[*clip_range]}"
        )
    if config.algorithm.dual_clip is not None:
        yield (
            "algorithm.dual_clip: the ratio of token_cispo has no gradient, and clip_range bounds it already; remove it"
        )


def _on_steps(name: str, summary: str, kind: str = "transition", **options: Any) -> Objective:
    usual = {"fields": STEPS, "homogeneous": _no_kl, "auxiliary": _frozen}
    compute = f"omni_async.algorithms.objectives.transition:{name}"
    return Objective(name, summary, kind, compute, **{**usual, **options})


def _on_final(name: str, summary: str, kind: str = "forward", **options: Any) -> Objective:
    return Objective(name, summary, kind, f"omni_async.algorithms.objectives.forward:{name}", FINAL, **options)


def _on_tokens(name: str, summary: str, **options: Any) -> Objective:
    usual: dict[str, Any] = {"homogeneous": _no_kl, "auxiliary": _reference}
    return Objective(
        name, summary, "token", f"omni_async.algorithms.objectives.token:{name}", TOKENS, **{**usual, **options}
    )


BUILT_IN: tuple[Objective, ...] = (
    _on_steps("flow_grpo", "PPO's clipped surrogate per denoising step (Flow-GRPO)"),
    _on_steps(
        "dance_grpo",
        "Flow-GRPO's loss on DanceGRPO's transition, without KL",
        auxiliary=lambda algorithm: frozenset(),
        problems=_dance_problems,
    ),
    _on_steps(
        "mix_grpo",
        "Flow-GRPO's loss in a window that slides over the denoising steps (MixGRPO)",
        homogeneous=lambda algorithm: _no_kl(algorithm) and algorithm.mix.log_ratio_coef == 0,
        problems=_mix_problems,
    ),
    _on_steps(
        "grpo_guard",
        "ratios centred and rescaled per step before clipping (GRPO-Guard)",
        fields=(*STEPS, "means"),
        problems=_guard_problems,
    ),
    _on_steps(
        "flow_dppo",
        "no clip: steps that drifted too far, measured by their exact KL, and still move away are dropped (Flow-DPPO)",
        fields=(*STEPS, "means"),
        problems=_dppo_problems,
    ),
    _on_steps("gspo", "one ratio per sample: the geometric mean over its trained steps (GSPO)", unit="sample"),
    _on_steps(
        "reinforce",
        "no ratio: the log-prob times the advantage and an importance weight (REINFORCE)",
        ratio=False,
        problems=_reinforce_problems,
    ),
    _on_steps(
        "distill",
        "the KL to a teacher at the steps of the policy's own samples, without rewards (on-policy distillation)",
        kind="distillation",
        problems=_distill_problems,
    ),
    _on_final(
        "diffusion_nft",
        "contrasts implicit positive and negative policies on final latents (DiffusionNFT)",
        auxiliary=lambda algorithm: _reference(algorithm) | {"old"},
        old_decay=lambda algorithm, update: nft_decay(algorithm.nft.decay, update),
        problems=_nft_problems,
    ),
    _on_final(
        "awm",
        "advantage-weighted flow matching on final latents (AWM)",
        unit="sample",
        auxiliary=_awm_auxiliary,
        problems=_awm_problems,
    ),
    _on_final(
        "diffusion_dpo",
        "preferences between the best and the worst sample of a prompt, or between the pairs of a dataset"
        " (Diffusion-DPO)",
        kind="preference",
        auxiliary=lambda algorithm: frozenset({"reference"}),
        problems=_dpo_problems,
    ),
    _on_tokens("token_grpo", "PPO's clipped surrogate per token of an answer (GRPO, DAPO, Dr.GRPO)"),
    _on_tokens(
        "token_gspo",
        "one ratio per answer: the geometric mean over its tokens (GSPO)",
        unit="sample",
        problems=_gspo_problems,
    ),
    _on_tokens(
        "token_cispo",
        "the log-prob of each token times its advantage and a clipped ratio without gradient (CISPO)",
        problems=_cispo_problems,
    ),
)


def objective_names() -> tuple[str, ...]:
    """Return the names of all objectives, sorted; an entry point of another package may be broken."""
    return registered_names(OBJECTIVES, (objective.name for objective in BUILT_IN))


def find_objective(name: str) -> Objective:
    """Return the objective called `name`. Raises ValueError like `find_registered`, naming `algorithm.name`."""
    own = {objective.name: objective for objective in BUILT_IN}
    found = find_registered(name, OBJECTIVES, Objective, "algorithm.name", own)
    if found.name != name:
        raise ValueError(f"algorithm.name: {name!r} is registered for an objective that is called {found.name!r}")
    return found

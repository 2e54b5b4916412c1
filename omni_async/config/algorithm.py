"""Defines the `algorithm` section: the objective, advantages, and the correction of stale samples.

Objectives are pure functions of tensors and of this section, so its fields are also their settings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config.section import LARGEST, Coefficient, Plain, Positive, Section, most

# Not tuple[Positive, Positive]: in a union with a bounded number, msgspec 0.22 reads the pair's types as the bounds.
ClipRange = Positive | Annotated[tuple[Positive, ...], Meta(min_length=2, max_length=2)]


class Advantage(Section, kw_only=True, frozen=True):
    std: Literal["global", "group", "none"] = "global"
    """Divide (reward - group mean) by the std of the update, of the group, or not at all."""
    ddof: Literal[0, 1] = 1
    """1: unbiased variance (VeRL-Omni); 0: population variance (flow_grpo)."""
    eps: Coefficient = 1e-4
    """Keeps the division by a small std finite; see eps_form."""
    eps_form: Literal["added", "floor"] = "added"
    """`added`: divide by std + eps; `floor`: by max(std, eps)."""
    clip_max: Positive = 5.0
    """Advantages are clamped to +-clip_max."""
    aggregate: Literal["rewards", "advantages", "gdpo"] = "rewards"
    """With several scorers, `rewards`: advantage of the weighted sum. `advantages`: weighted sum of each scorer's own
    advantages (MixGRPO). `gdpo`: the same, whitened over the update (GDPO)."""
    track_prompts: bool = False
    """Compute means (and group stds) over all rewards of a prompt in this run, not of this update alone."""
    drop_zero_variance: bool = True
    """Reject groups whose rewards are all equal: they carry no signal (with track_prompts they do)."""
    form: Literal["standardised", "reward_weighted", "best_of_n"] = "standardised"
    """`standardised`: signed, as the keys above compute it. The others replace it by weights >= 0, of mean 1 in every
    group: `reward_weighted` by its softmax at `temperature` (RWR), `best_of_n` by equal weights of the `best` samples
    and 0 for the others (RAFT)."""
    temperature: Positive = 1.0
    """Temperature of reward_weighted in units of the std; with std none in units of the reward."""
    best: Annotated[int, most(100_000, ge=1)] = 1
    """Number of a group's samples that best_of_n trains."""


RejectLevel = Literal["step", "sum", "mean", "max"]


class RejectLevels(Section, kw_only=True, frozen=True):
    k1: RejectLevel = "step"
    """Of k1 alone."""
    k2: RejectLevel = "step"
    """Of k2 alone."""
    k3: RejectLevel = "step"
    """Of k3 alone."""


class Correction(Section, kw_only=True, frozen=True):
    """The off-policy correction: the denominator of the ratio, and the treatment of samples far from it.

    For objectives on tokens, a step is a token and a sample an answer."""

    mode: Literal["auto", "none", "bypass", "decoupled", "interpolated"] = "auto"
    """`auto`: bypass, until measurements show that the clip range takes many rows that this update has not moved. If
    rounding alone takes more than 5 % of the first update's rows, `auto` becomes decoupled. If drift takes more than a
    fifth of the rows, `auto` becomes decoupled with tempered weights. `bypass`: ratio to the behaviour policy.
    `decoupled`: ratio to the proximal policy (the weights at the start of the update), times an importance weight
    proximal / behaviour. `interpolated`: the same with the proximal log-prob estimated from the other two. `none`:
    ratio to the proximal policy without a weight, as if samples were fresh."""
    interpolation: Literal["loglinear", "linear"] = "loglinear"
    """Mode `interpolated`: the proximal policy is the geometric (`loglinear`) or the arithmetic (`linear`) mean of the
    densities of behaviour and current policy, weighted by staleness (AReaL)."""
    weights: Literal["none", "importance", "tempered"] = "none"
    """`importance`: w = exp(L), L the log-ratio proximal / behaviour. `tempered`: exp(gamma L), with gamma in (0, 1]
    chosen so that the effective sample size of the unmasked rows is `ess_target`."""
    tempering: Literal["update", "step"] = "update"
    """Choose one gamma for all rows of an update, or one for each denoising step, which drift differently."""
    level: Literal["step", "trajectory", "sequence"] = "step"
    """`step`: a weight per denoising step. The others: a weight per sample, from all its trained steps; `trajectory`
    from the sum of L, or the mean of L / D with log_ratio `mean`; `sequence` from the sum of L / D (VeRL-Omni)."""
    log_ratio: Literal["sum", "mean"] = "sum"
    """`sum`: L in nats over all latent elements, a true log-ratio. `mean`: L / D, per element (geometric), as in
    published code; nearly a no-op."""
    ess_target: Annotated[float, Meta(gt=0, lt=1)] = 0.7
    """Target of tempering for the effective sample size, as a fraction."""
    cap: Positive | None = 2.0
    """Truncate weights at this; null does not truncate."""
    floor: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Raise smaller weights to this; null does not raise them. Weights that `band` sets to 0 stay 0."""
    band: tuple[Positive, Positive] | None = None
    """Weights outside [lo, hi] become 0 (IcePop)."""
    normalise: bool | None = None
    """Divide weights by their mean over the rows that `denominator` counts; null: only tempered weights."""
    kappa_nats: Positive | None = None
    """Mask steps whose exact Gaussian KL between proximal and behaviour policy exceeds this many nats (D kappa)."""
    m2: Positive | None = None
    """M2PO: mask the largest squared log-ratios until the mean of the rest is below this."""
    k1: tuple[Positive, Positive] | None = None
    """Reject rows whose ratio exp(L) is outside [lo, hi]."""
    k2: Positive | None = None
    """Reject rows whose L^2 / 2 exceeds this."""
    k3: Positive | None = None
    """Reject rows whose exp(L) - 1 - L exceeds this."""
    reject_level: RejectLevel | RejectLevels = "step"
    """Apply k1, k2, k3 to each step, or to a whole sample: the sum, mean or maximum over its steps. A mapping such as
    {k1: step, k3: max} names a level for each rule."""
    steps: Literal["all", "kept"] = "all"
    """Steps behind weights per sample and the ratio of gspo and token_gspo: all trained steps of the sample, or its
    unmasked steps (VeRL)."""
    denominator: Literal["kept", "all"] = "kept"
    """Average over the unmasked rows, or over all rows as in published code (the gradient shrinks)."""

    @property
    def normalises(self) -> bool:
        return self.weights == "tempered" if self.normalise is None else self.normalise

    @property
    def needs_update(self) -> bool:
        """Return whether a row's correction depends on the other rows of its update.

        All rows must then be known before the first gradient."""
        return self.weights == "tempered" or self.m2 is not None

    def weighs_update(self, penalised: bool) -> bool:
        """Return whether weights are computed once per update, from all its rows, before its first gradient.

        They are if they depend on all rows, or if the scale of the policy gradient must not multiply a penalty.

        Args:
            penalised: whether the loss has a term that is not multiplied by the weights."""
        rescales = self.normalises or (self.denominator == "kept" and self.masks)
        return self.needs_update or (rescales and penalised)

    def reject_level_of(self, rule: str) -> RejectLevel:
        """Return the level at which `k1`, `k2` or `k3` applies."""
        levels = self.reject_level
        if isinstance(levels, str):
            return levels
        found: RejectLevel = getattr(levels, rule)
        return found

    @property
    def needs_samples(self) -> bool:
        """Return whether a row's correction depends on the other rows of its sample."""
        rejects = any(
            bound is not None and self.reject_level_of(rule) != "step"
            for rule, bound in (("k1", self.k1), ("k2", self.k2), ("k3", self.k3))
        )
        return rejects or (self.weights != "none" and self.level != "step")

    @property
    def masks(self) -> bool:
        """Return whether any rule may mask rows."""
        return any(rule is not None for rule in (self.kappa_nats, self.m2, self.k1, self.k2, self.k3, self.band))


# The reasons for which mode `auto` leaves `bypass`.
Reason = Literal["rounding", "drift"]


def automatic_correction(reason: Reason | None = None) -> Correction:
    """Return the correction of mode `auto` (docs/algorithms/correction.md, Which combination).

    Args:
        reason: `rounding`: engine and trainer round so differently that a clip range on their ratio excludes rows that
            no update has moved. `drift`: stale rows have drifted beyond the clip range. None: neither was measured
            (`omni_async.algorithms.mismatch`)."""
    if reason is None:
        return Correction(mode="bypass")
    if reason == "rounding":
        return Correction(mode="decoupled")
    return Correction(mode="decoupled", weights="tempered", ess_target=0.7, cap=2.0)


class Mix(Section, kw_only=True, frozen=True):
    log_ratio_coef: Coefficient = 0.0
    """Weight of half the squared mean log-ratio, MixGRPO's KL term."""


class Guard(Section, kw_only=True, frozen=True):
    scale: Literal["batch", "sample"] = "batch"
    """Normalise ratios by the micro-batch's mean step scale (VeRL-Omni) or each row's own (Flow-Factory)."""
    divide: bool = True
    """Divide the loss by the squared root step size, which equalises steps (as VeRL-Omni, unlike Flow-Factory)."""


class Dppo(Section, kw_only=True, frozen=True):
    kappa_max: Positive = 1e-5
    """Largest KL per latent element that rows may drift."""
    kappa_max_nats: Positive | None = None
    """The same in nats of the whole sample; replaces kappa_max."""
    width: Literal["transition", "unit"] = "transition"
    """KL with the transition's own variance, or with variance 1 (VeRL-Omni: add_kl_coefficient)."""


class Nft(Section, kw_only=True, frozen=True):
    beta: Positive = 1.0
    """Mixes current and old velocity into the positive and negative policies."""
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """The part of the advantage that counts."""
    decay: Literal["none", "slow", "late"] = "slow"
    """Decay with which the old policy, which generates the samples, follows: `none` 0 (type 0); `slow` min(.001 u, .5)
    after u updates (type 1); `late` 0 for 75 updates, then min(.0075 (u - 75), .999) (type 2)."""


class Awm(Section, kw_only=True, frozen=True):
    weighting: Literal["uniform", "sigma", "sigma_squared", "huber", "ghuber"] = "ghuber"
    """Weight of the flow-matching error as a log-likelihood."""
    power: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Exponent p of `ghuber`."""
    ratio: Literal["exp_first", "sum_first"] = "exp_first"
    """A ratio per noise draw, or one per sample from the mean over its draws."""
    advantage_max: Positive | None = 1.0
    """Rescale advantages from +-clip_max to +-this; null does not rescale."""
    clip_range: Positive = 1.0
    """PPO clip range; the log-ratio is of order 1 here, so 1 hardly clips."""
    ema_coef: Coefficient = 0.0
    """Weight of the pull to the moving average (needs trainer.ema)."""
    ema_coef_end: Coefficient | None = None
    """Value of ema_coef at the last update, reached linearly; null keeps it constant."""
    kl_form: Literal["velocity", "elbo"] = "velocity"
    """`velocity`: squared velocity difference; `elbo`: the same over 2 std^2."""
    off_policy: bool = False
    """Ratio to the recomputed policy at the start of the update, instead of to a detached copy."""


class Dpo(Section, kw_only=True, frozen=True):
    beta: Positive = 2000.0
    """Strength of the preference."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of the margin."""
    halved: bool = True
    """Use beta / 2 (flow_grpo, VeRL-Omni) instead of beta (diffusers)."""


class Answers(Section, kw_only=True, frozen=True):
    """Objectives on the tokens of answers."""

    mean: Literal["sequence", "token", "constant"] = "sequence"
    """Average over tokens. `sequence`: over the tokens of each answer, then over answers (GRPO, GSPO). `token`: over
    all tokens of the optimizer step (DAPO, CISPO). `constant`: divide each answer's sum by the largest number of tokens
    (Dr.GRPO)."""
    overlong: Literal["train", "mask"] = "train"
    """Treatment of answers that end at the largest number of tokens: train them like others, or leave them out of the
    loss (DAPO's overlong filtering)."""


class Forward(Section, kw_only=True, frozen=True):
    """Sigmas of the objectives that noise final latents themselves."""

    draws: Annotated[int, most(10_000, ge=1)] | None = None
    """Noise draws per sample; null: timestep_fraction of the sampling steps. More draws than sigmas repeat sigmas."""
    sigmas: Literal["schedule", "schedule_wo_first", "logit_normal"] = "schedule"
    """The sampler's sigmas in random order, with or without the first; or stratified logit-normal."""
    shift: Positive = 3.0
    """Shift of `logit_normal` sigmas."""


class Teacher(Section, kw_only=True, frozen=True):
    """A frozen policy. The policy in training is distilled from it, step by step, at the states of its samples."""

    path: Plain
    """Checkpoint of the teacher in diffusers layout, of the architecture of `model.path`. Relative to the recipe's
    folder; or `owner/name` of a model hub if this machine's cache has it."""
    coef: Positive = 1.0
    """Weight of the KL to the teacher, which has the form `kl_form`."""
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    """The keys of `rollout.sampling` that differ for the teacher: its guidance, and its negative prompt if the policy
    has no guidance. The teacher reads the policy's samples and encoded prompts, so other keys of these are refused."""

    def spec_of(self, spec: Any) -> Any:
        """Return the `SamplingSpec` under which the teacher computes samples of the policy's `spec`."""
        return msgspec.convert(msgspec.to_builtins(spec) | self.sampling, type(spec))


class Algorithm(Section, kw_only=True, frozen=True):
    name: str = "flow_grpo"
    """The objective; `omni-async list` shows them."""
    clip_range: ClipRange | None = None
    """PPO clip range c on r, the exponential of the mean log-ratio per latent element: [1 - c, 1 + c]. A pair [low,
    high] clips to [1 - low, 1 + high] (DAPO). null: 1e-4, unless clip_range_nats is set. For tokens r is the ratio of a
    token, and null is 0.2; of an answer for token_gspo, and null is [3e-4, 4e-4]. token_cispo has one number."""
    clip_range_nats: ClipRange | None = None
    """The same on L, the log-ratio of the whole sample in nats: [-c, c] or [-low, high], independent of the
    resolution, the transition and the step."""
    clip_centre: Literal["zero", "drift"] = "zero"
    """`drift`: clip L + D kappa, whose mean is 0 whatever the drift, in place of L, whose mean is -D kappa. Needs means
    like correction.kappa_nats."""
    dual_clip: Annotated[float, most(LARGEST, gt=1)] | None = None
    """Bound the loss of rows with a negative advantage at c times its absolute value (dual-clip PPO). c bounds r with
    clip_range, exp(L) with clip_range_nats; null: no bound."""
    kl_coef: Coefficient = 0.0
    """Weight of the KL (or squared velocity difference; for tokens the estimate k3) to the reference policy."""
    teacher: Teacher | None = None
    """A teacher for `distill`, or for an added term of the other objectives on denoising steps; null: none."""
    kl_form: Literal["published", "exact", "mean"] = "published"
    """Form of the KL to the reference and to the teacher. `published`: variance without the step size, as in flow_grpo;
    `exact`: the Gaussian KL; `mean`: squared difference of means alone."""
    timestep_fraction: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of a sample's trainable steps that is trained, drawn separately for every sample."""
    unconditional_gradient: bool = True
    """Propagate the gradient through guidance's unconditional branch: the exact derivative. flow_grpo detaches it."""
    advantage: Advantage = Advantage()
    """Computation of advantages from rewards."""
    correction: Correction = Correction()
    """Off-policy correction."""
    forward: Forward = Forward()
    """Noise of objectives on final latents."""
    mix: Mix = Mix()
    """mix_grpo."""
    guard: Guard = Guard()
    """grpo_guard."""
    dppo: Dppo = Dppo()
    """flow_dppo."""
    nft: Nft = Nft()
    """diffusion_nft."""
    awm: Awm = Awm()
    """awm."""
    dpo: Dpo = Dpo()
    """diffusion_dpo."""
    answers: Answers = Answers()
    """token_grpo, token_gspo, token_cispo."""
    settings: Any = msgspec.field(default_factory=dict)
    """Settings of an objective of another package, which defines the keys; `omni-async list` shows them."""

    @property
    def penalised(self) -> bool:
        """Return whether the loss has a term that neither the advantage nor a weight multiplies."""
        return self.kl_coef > 0 or self.mix.log_ratio_coef > 0 or self.teacher is not None

"""Defines the `algorithm` section: the objective, advantages, and the correction of stale samples.

Objectives are pure functions of tensors and of this section, so its fields are also their settings.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from omni_async.config.section import Coefficient, Positive, Section, doc, most


class Advantage(Section, kw_only=True, frozen=True):
    std: Annotated[
        Literal["global", "group", "none"],
        doc("Divide (reward - group mean) by the std of the update, of the group, or not at all."),
    ] = "global"
    ddof: Annotated[Literal[0, 1], doc("1: unbiased variance (VeRL-Omni); 0: population variance (flow_grpo).")] = 1
    eps: Annotated[Coefficient, doc("Keeps the division by a small std finite; see eps_form.")] = 1e-4
    eps_form: Annotated[Literal["added", "floor"], doc("`added`: divide by std + eps; `floor`: by max(std, eps).")] = (
        "added"
    )
    clip_max: Annotated[Positive, doc("Advantages are clamped to +-clip_max.")] = 5.0
    aggregate: Annotated[
        Literal["rewards", "advantages", "gdpo"],
        doc(
            "Several scorers. `rewards`: advantage of the weighted sum. `advantages`: weighted sum of each scorer's own"
            " advantages (MixGRPO). `gdpo`: that, whitened over the update (GDPO)."
        ),
    ] = "rewards"
    track_prompts: Annotated[
        bool, doc("Means (and group stds) over all rewards a prompt has had in this run, not this update's alone.")
    ] = False
    drop_zero_variance: Annotated[
        bool, doc("Reject groups whose rewards are all equal: they carry no signal (with track_prompts they do).")
    ] = True


class Correction(Section, kw_only=True, frozen=True):
    """The off-policy correction: the policy the ratio is taken to, and what happens to samples far from it."""

    mode: Annotated[
        Literal["auto", "none", "bypass", "decoupled", "interpolated"],
        doc(
            "`auto`: bypass up to S = 4, decoupled with tempered weights and kappa_nats 2 beyond: what served best at"
            " this staleness.max_updates. `bypass`: ratio to the behaviour policy. `decoupled`: ratio to the proximal"
            " policy (the weights at the start of the update), times an importance weight proximal / behaviour."
            " `interpolated`: the same with the proximal log-prob estimated from the other two. `none`: ratio to the"
            " proximal policy and no weight, as if samples were fresh."
        ),
    ] = "auto"
    weights: Annotated[
        Literal["none", "importance", "tempered"],
        doc(
            "`importance`: w = exp(L), L the log-ratio proximal / behaviour. `tempered`: exp(gamma L), gamma in (0, 1]"
            " chosen from the update so that the effective sample size of the rows no mask drops is `ess_target`."
        ),
    ] = "none"
    level: Annotated[
        Literal["step", "trajectory", "sequence"],
        doc(
            "`step`: a weight per denoising step. The others: one per sample, from all its trained steps; `trajectory`"
            " from the sum of L, or the mean of L / D with log_ratio `mean`; `sequence` from the sum of L / D"
            " (VeRL-Omni)."
        ),
    ] = "step"
    log_ratio: Annotated[
        Literal["sum", "mean"],
        doc(
            "`sum`: L in nats over all latent elements, a true log-ratio. `mean`: L / D, per element (geometric), as"
            " published code does; nearly a no-op."
        ),
    ] = "sum"
    ess_target: Annotated[float, doc("Effective sample size, as a fraction, that tempering aims at.", gt=0, lt=1)] = 0.7
    cap: Annotated[Positive | None, doc("Truncate weights at this; null leaves them.")] = 2.0
    band: Annotated[tuple[Positive, Positive] | None, doc("Weights outside [lo, hi] become 0 (IcePop).")] = None
    normalise: Annotated[
        bool | None,
        doc("Divide weights by their mean over the rows that `denominator` counts; null: tempered ones only."),
    ] = None
    kappa_nats: Annotated[
        Positive | None,
        doc(
            "Mask steps whose exact Gaussian KL between proximal and behaviour policy exceeds this many nats (D kappa)."
        ),
    ] = None
    m2: Annotated[
        Positive | None, doc("M2PO: mask the largest squared log-ratios until the mean of the rest is below this.")
    ] = None
    k1: Annotated[tuple[Positive, Positive] | None, doc("Reject where the ratio exp(L) leaves [lo, hi].")] = None
    k2: Annotated[Positive | None, doc("Reject where L^2 / 2 exceeds this.")] = None
    k3: Annotated[Positive | None, doc("Reject where exp(L) - 1 - L exceeds this.")] = None
    reject_level: Annotated[
        Literal["step", "sum", "mean", "max"],
        doc("k1, k2, k3 of each step alone, or of a whole sample: the sum, mean or maximum over its steps."),
    ] = "step"
    denominator: Annotated[
        Literal["kept", "all"],
        doc("Average over what is left, or over all rows as published code does (the gradient shrinks)."),
    ] = "kept"

    @property
    def normalises(self) -> bool:
        return self.weights == "tempered" if self.normalise is None else self.normalise

    @property
    def needs_update(self) -> bool:
        """Whether a row's correction depends on the other rows of its update.

        Then all must be known before the first gradient."""
        return self.weights == "tempered" or self.m2 is not None

    @property
    def masks(self) -> bool:
        """Whether any rule may mask rows."""
        return any(rule is not None for rule in (self.kappa_nats, self.m2, self.k1, self.k2, self.k3, self.band))


# The largest S at which taking the ratio to the behaviour policy served at least as well as anything else
# (docs/algorithms/correction.md).
_BYPASS_UP_TO = 4


def automatic_correction(max_updates: int) -> Correction:
    """Return the correction that mode `auto` stands for at a staleness budget of `max_updates`."""
    if max_updates <= _BYPASS_UP_TO:
        return Correction(mode="bypass")
    return Correction(mode="decoupled", weights="tempered", ess_target=0.7, cap=2.0, kappa_nats=2.0)


class Mix(Section, kw_only=True, frozen=True):
    log_ratio_coef: Annotated[Coefficient, doc("Weight of half the squared mean log-ratio, MixGRPO's KL term.")] = 0.0


class Guard(Section, kw_only=True, frozen=True):
    scale: Annotated[
        Literal["batch", "sample"],
        doc("Normalise ratios by the micro-batch's mean step scale (VeRL-Omni) or each row's own (Flow-Factory)."),
    ] = "batch"
    divide: Annotated[
        bool,
        doc("Divide the loss by the squared root step size, which equalises steps (VeRL-Omni does, Flow-Factory not)."),
    ] = True


class Dppo(Section, kw_only=True, frozen=True):
    kappa_max: Annotated[Positive, doc("Rows drift no further than this KL per latent element.")] = 1e-5
    kappa_max_nats: Annotated[Positive | None, doc("The same in nats of the whole sample; wins over kappa_max.")] = None
    width: Annotated[
        Literal["transition", "unit"],
        doc("KL with the transition's own variance, or with variance 1 (VeRL-Omni: add_kl_coefficient)."),
    ] = "transition"


class Nft(Section, kw_only=True, frozen=True):
    beta: Annotated[Positive, doc("Mixes current and old velocity into the positive and negative policies.")] = 1.0
    adv_mode: Annotated[
        Literal["all", "positive_only", "negative_only", "one_only", "binary"],
        doc("The part of the advantage that counts."),
    ] = "all"
    decay: Annotated[
        Literal["none", "slow", "late"],
        doc(
            "How slowly the old policy, which draws the samples, follows: `none` at once (type 0); `slow` min(.001 u,"
            " .5) after u updates (type 1); `late` 0 for 75 updates, then min(.0075 (u - 75), .999) (type 2)."
        ),
    ] = "slow"


class Awm(Section, kw_only=True, frozen=True):
    weighting: Annotated[
        Literal["uniform", "sigma", "sigma_squared", "huber", "ghuber"],
        doc("Weight of the flow-matching error as a log-likelihood."),
    ] = "ghuber"
    power: Annotated[float, doc("Exponent p of `ghuber`.", gt=0, le=1)] = 0.25
    ratio: Annotated[
        Literal["exp_first", "sum_first"],
        doc("A ratio per noise draw, or one per sample from the mean over its draws."),
    ] = "exp_first"
    advantage_max: Annotated[
        Positive | None, doc("Rescale advantages from +-clip_max to +-this; null leaves them.")
    ] = 1.0
    clip_range: Annotated[Positive, doc("PPO clip range; the log-ratio is of order 1 here, so 1 hardly clips.")] = 1.0
    ema_coef: Annotated[Coefficient, doc("Weight of the pull to the moving average (needs trainer.ema).")] = 0.0
    ema_coef_end: Annotated[Coefficient | None, doc("Reached linearly at the last update; null keeps it constant.")] = (
        None
    )
    kl_form: Annotated[
        Literal["velocity", "elbo"], doc("`velocity`: squared velocity difference; `elbo`: that over 2 std^2.")
    ] = "velocity"
    off_policy: Annotated[
        bool, doc("Ratio to the policy at the start of the update, computed again, instead of to a detached copy.")
    ] = False


class Dpo(Section, kw_only=True, frozen=True):
    beta: Annotated[Positive, doc("Strength of the preference.")] = 2000.0
    loss: Annotated[Literal["sigmoid", "hinge", "ipo"], doc("Loss of the margin.")] = "sigmoid"
    halved: Annotated[bool, doc("Use beta / 2 (flow_grpo, VeRL-Omni) instead of beta (diffusers).")] = True


class Forward(Section, kw_only=True, frozen=True):
    """Sigmas of the objectives that noise final latents themselves."""

    draws: Annotated[
        Annotated[int, most(10_000, ge=1)] | None,
        doc(
            "Noise draws per sample; null: timestep_fraction of the sampling steps. More than there are sigmas repeat"
            " them."
        ),
    ] = None
    sigmas: Annotated[
        Literal["schedule", "schedule_wo_first", "logit_normal"],
        doc("The sampler's own sigmas in random order, with or without the first; or stratified logit-normal."),
    ] = "schedule"
    shift: Annotated[Positive, doc("Shift of `logit_normal` sigmas.")] = 3.0


class Algorithm(Section, kw_only=True, frozen=True):
    name: Annotated[str, doc("The objective; `omni-async list` shows them.")] = "flow_grpo"
    clip_range: Annotated[
        Positive | None,
        doc("PPO clip range c on r, the exponential of the mean log-ratio per latent element: [1 - c, 1 + c]."),
    ] = None
    clip_range_nats: Annotated[
        Positive | None,
        doc(
            "The same on L, the log-ratio of the whole sample in nats: [-c, c], whatever the resolution, the transition"
            " and the step."
        ),
    ] = None
    kl_coef: Annotated[
        Coefficient, doc("Weight of the KL (or squared velocity difference) to the reference policy.")
    ] = 0.0
    kl_form: Annotated[
        Literal["published", "exact", "mean"],
        doc(
            "`published`: variance without the step size, as flow_grpo; `exact`: the Gaussian KL; `mean`: squared"
            " difference of means alone."
        ),
    ] = "published"
    timestep_fraction: Annotated[
        float, doc("Share of a sample's trainable steps that is trained, drawn anew for every sample.", gt=0, le=1)
    ] = 1.0
    unconditional_gradient: Annotated[
        bool,
        doc("Let the gradient through guidance's unconditional branch: the exact derivative. flow_grpo detaches it."),
    ] = True
    advantage: Annotated[Advantage, doc("From rewards to advantages.")] = Advantage()
    correction: Annotated[Correction, doc("Off-policy correction.")] = Correction()
    forward: Annotated[Forward, doc("Noise of objectives on final latents.")] = Forward()
    mix: Annotated[Mix, doc("mix_grpo.")] = Mix()
    guard: Annotated[Guard, doc("grpo_guard.")] = Guard()
    dppo: Annotated[Dppo, doc("flow_dppo.")] = Dppo()
    nft: Annotated[Nft, doc("diffusion_nft.")] = Nft()
    awm: Annotated[Awm, doc("awm.")] = Awm()
    dpo: Annotated[Dpo, doc("diffusion_dpo.")] = Dpo()
    settings: Annotated[
        Any, doc("Settings of an objective of another package; the keys are its own, and `omni-async list` shows them.")
    ] = msgspec.field(default_factory=dict)

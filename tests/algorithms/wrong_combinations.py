"""Lists recipes whose parts contradict each other: overrides of a flow_grpo recipe, and parts of the message."""

NFT = ("algorithm.name=diffusion_nft", "rollout.sde=null")
AWM = ("algorithm.name=awm", "rollout.sde=null")
DPO = ("algorithm.name=diffusion_dpo", "rollout.sde=null", "rollout.group_size=2")
OFFLINE = (*DPO, "data={preferences: pairs.parquet}", "reward={}")
MIX = ("algorithm.name=mix_grpo", "rollout.sde.window.schedule=progressive")
GUARD, DPPO = ("algorithm.name=grpo_guard",), ("algorithm.name=flow_dppo",)
REINFORCE = ("algorithm.name=reinforce", "algorithm.correction={mode: bypass, weights: importance}")
GSPO = ("algorithm.name=gspo",)
DANCE = ("algorithm.name=dance_grpo", "rollout.sde.kind=dance")
DISTILL = ("algorithm.name=distill", "algorithm.teacher={path: t}")
TOKEN = ("algorithm.name=token_grpo", "rollout.sde=null")
TOKEN_GSPO = ("algorithm.name=token_gspo", "rollout.sde=null")
CISPO = ("algorithm.name=token_cispo", "rollout.sde=null")
DRIFT = "trainer.optimizer.step_size={by: drift, target: 0.5}"

# Each has exactly this one thing wrong.
WRONG: tuple[tuple[tuple[str, ...], str], ...] = (
    # denoising steps
    (("rollout.sde=null",), "rollout.sde: flow_grpo trains denoising steps that were taken with noise ... set kind"),
    (("rollout.group_size=1",), "flow_grpo compares the samples of a prompt, so it needs at least 2, got 1"),
    ((*GUARD, "rollout.sde.kind=cps"), "rollout.sde.kind: grpo_guard rescales ratios by std sqrt(step size)"),
    ((*GUARD, "rollout.sde.kind=dance"), "got 'dance'"),
    ((*GUARD, "algorithm.correction.mode=interpolated"), "algorithm.correction.mode: grpo_guard needs the mean of the"),
    ((*DPPO, "algorithm.correction.mode=interpolated"), "algorithm.correction.mode: flow_dppo needs the mean of the"),
    ((*DPPO, "algorithm.clip_range=1e-4"), "algorithm.clip_range: flow_dppo drops rows by their KL"),
    ((*DPPO, "algorithm.clip_range_nats=1"), "set algorithm.dppo.kappa_max"),
    ((*DPPO, "algorithm.dppo={kappa_max_nats: 1, width: unit}"), "dppo.kappa_max_nats: with width unit ... variance 1"),
    ((*GUARD, "rollout.sde.kind=flow", "algorithm.clip_range_nats=1"), "clip_range_nats: grpo_guard ... has rescaled"),
    ((*GUARD, "algorithm.clip_centre=drift"), "algorithm.clip_centre: grpo_guard centres its ratios ... remove it"),
    ((*DPPO, "algorithm.clip_centre=drift"), "algorithm.clip_centre: flow_dppo drops rows by their KL"),
    ((*DPPO, "algorithm.dual_clip=3"), "algorithm.dual_clip: flow_dppo drops rows by their KL"),
    (
        ("algorithm.clip_centre=drift", "algorithm.correction.mode=interpolated"),
        "algorithm.correction.mode: algorithm.clip_centre: drift needs the mean ... use bypass or decoupled",
    ),
    # no ratio
    ((*REINFORCE, "algorithm.clip_range=[0.2, 0.28]"), "algorithm.clip_range: reinforce has no ratio to clip ... cap"),
    ((*REINFORCE, "algorithm.dual_clip=3"), "algorithm.dual_clip: reinforce has no ratio to clip; remove it"),
    (
        (*REINFORCE, "algorithm.correction.mode=decoupled"),
        "correction.mode: the loss of reinforce has no ratio ... got",
    ),
    (REINFORCE[:1], "correction.mode: the loss of reinforce has no ratio ... auto may use none; use mode: bypass"),
    (
        (*REINFORCE, "algorithm.correction.weights=tempered", "trainer.steps_per_update=2"),
        "trainer.steps_per_update: these weights are computed once ... use 1, or weights: importance ... got 2",
    ),
    # steps of a sample
    (
        (*GSPO, "algorithm.correction={mode: bypass, steps: kept}"),
        "correction.steps: no rule masks steps ... steps: all",
    ),
    (
        ("algorithm.correction={mode: bypass, k3: 1.0, steps: kept}",),
        "correction.steps: neither the ratio of flow_grpo nor a weight ... use algorithm.name: gspo, level: trajectory",
    ),
    # forms of the advantage
    (
        (*NFT, "algorithm.advantage={form: reward_weighted, clip_max: 8}"),
        "advantage.form: diffusion_nft contrasts ... awm, got reward_",
    ),
    (
        (*DPO, "algorithm.advantage.form=reward_weighted"),
        "advantage.form: diffusion_dpo ... reads no advantage; remove",
    ),
    (
        ("algorithm.advantage={form: reward_weighted, track_prompts: true, clip_max: 8}",),
        "advantage.track_prompts: weights of form reward_weighted compare the samples of a group alone; remove it",
    ),
    (
        ("algorithm.advantage={form: best_of_n, best: 8}", "rollout.group_size=8"),
        "advantage.best: 8 of rollout.group_size = 8 samples is all of them",
    ),
    (
        ("algorithm.advantage={form: best_of_n, best: 1}", "rollout.group_size=8"),
        "advantage.clip_max: with rollout.group_size = 8 weights of form best_of_n reach 8, which clip_max = 5",
    ),
    (
        ("algorithm.advantage.form=reward_weighted", "rollout.group_size=6"),
        "advantage.clip_max: with rollout.group_size = 6 weights of form reward_weighted reach 6, which clip_max = 5",
    ),
    (("algorithm.advantage.temperature=0.3",), "advantage.temperature: it belongs to form reward_weighted ... got 0.3"),
    (("algorithm.advantage.best=3",), "advantage.best: it belongs to form best_of_n, and form is standardised; set"),
    (
        ("algorithm.advantage={form: best_of_n, clip_max: 8, temperature: 0.3}",),
        "advantage.temperature: it belongs to form reward_weighted, and form is best_of_n; set",
    ),
    (("algorithm.name=mix_grpo",), "window.schedule: mix_grpo slides one window ... set random, progressive"),
    (("algorithm.name=dance_grpo",), "rollout.sde.kind: dance_grpo is ... 'dance', got 'flow' ... the same loss"),
    ((*DANCE, "algorithm.kl_coef=0.04"), "algorithm.kl_coef: dance_grpo has no KL term, got 0.04 ... loss with one"),
    (("trainer.workers=6", "trainer.sequence_parallel=4"), "sequence_parallel: 4 ranks ... trainer.workers = 6; use"),
    (("trainer.workers=6", "trainer.shard=4"), "trainer.shard: 4 ranks share ... trainer.workers = 6; use a divisor"),
    # corrections of them: one stands for those that test_correction_problems lists
    (("algorithm.correction={mode: bypass, kappa_nats: 0.5}",), "correction.kappa_nats: it measures ... behaviour"),
    (
        ("algorithm.correction={mode: bypass, k2: 1, reject_level: {k1: sum}}",),
        "reject_level.k1: sum ... which is null",
    ),
    # a teacher
    (("algorithm.name=distill",), "algorithm.teacher: distill learns from a teacher alone ... algorithm.teacher.path"),
    ((*DISTILL, "algorithm.correction.mode=bypass"), "correction: distill has no ratio to the policy that made"),
    ((*DISTILL, "algorithm.clip_range=1e-4"), "algorithm.clip_range: distill does not clip a ratio ... remove it"),
    ((*DISTILL, "algorithm.advantage.std=group"), "algorithm.advantage: distill reads no rewards ... the section"),
    (
        (*DISTILL, "reward.scorers=[]", "validation={prompts: prompts.txt}"),
        "validation: without ... nothing to measure",
    ),
    ((*DISTILL, "rollout.sde=null"), "rollout.sde: distill trains denoising steps that were taken with noise"),
    (("algorithm.teacher={path: t}", "reward.scorers=[]"), "reward.scorers: flow_grpo learns from ... name: distill"),
    ((*NFT, "algorithm.teacher={path: t}"), "algorithm.teacher: diffusion_nft has no term for a teacher"),
    ((*DANCE, "algorithm.teacher={path: t}"), "algorithm.teacher: dance_grpo has no term for a teacher; remove it"),
    # final latents
    (("algorithm.name=diffusion_nft",), "rollout.sde: diffusion_nft trains on final latents ... an SDE window"),
    (("algorithm.name=awm",), "rollout.sde: awm trains on final latents"),
    (("algorithm.name=diffusion_dpo",), "rollout.sde: diffusion_dpo trains on final latents"),
    ((*NFT, "rollout.group_size=1"), "rollout.group_size: diffusion_nft compares the samples ... at least 2, got 1"),
    ((*NFT, "algorithm.correction.mode=decoupled"), "correction: diffusion_nft has no ratio to the policy that made"),
    ((*AWM, "algorithm.correction.k1=[0.5, 2.0]"), "algorithm.correction: awm has no ratio to the policy that made a"),
    ((*NFT, DRIFT), "trainer.optimizer.step_size: diffusion_nft has no ratio ... drift is not measured; use schedule"),
    ((DRIFT, "algorithm.correction.mode=interpolated"), "trainer.optimizer.step_size: mode interpolated measures only"),
    ((*NFT, "algorithm.clip_range=1e-4"), "algorithm.clip_range: diffusion_nft does not clip a ratio ... remove it"),
    ((*NFT, "algorithm.clip_range_nats=1"), "algorithm.clip_range_nats: diffusion_nft does not clip ... remove it"),
    ((*NFT, "algorithm.clip_centre=drift"), "algorithm.clip_centre: diffusion_nft does not clip ... remove it"),
    ((*AWM, "algorithm.dual_clip=3"), "algorithm.dual_clip: awm does not clip ... remove it"),
    ((*AWM, "algorithm.clip_range=1e-4"), "does not clip a ratio ... algorithm.awm.clip_range is its own; remove it"),
    ((*AWM, "algorithm.awm.ema_coef=1"), "algorithm.awm.ema_coef: a pull to the moving average ... set trainer.ema"),
    ((*AWM, "algorithm.awm.ema_coef_end=0.3"), "awm.ema_coef: a pull to the moving average ... set trainer.ema"),
    ((*NFT, "trainer.sequence_parallel=2"), "trainer.sequence_parallel: 2 ranks share a sequence, and do not divide"),
    # preferences
    ((*DPO, "rollout.group_size=1"), "rollout.group_size: diffusion_dpo compares the best ... and 1 sample makes"),
    ((*DPO, "algorithm.kl_coef=0.1"), "algorithm.kl_coef: diffusion_dpo holds on to ... dpo.beta, not through a KL"),
    ((*DPO, "trainer.workers=3", "trainer.shard=2"), "trainer.shard: 2 ranks share a copy of the weights"),
    ((*OFFLINE, "reward={scorers: [{name: jpeg_size}]}"), "reward.scorers: with data.preferences ... remove them"),
    ((*OFFLINE, "validation={prompts: prompts.txt}"), "validation: with data.preferences ... can be validated"),
    ((*OFFLINE, "data.prompts=prompts.txt"), "data.prompts: with data.preferences ... from the pairs; remove it"),
    ((*OFFLINE, "rollout.group_size=4"), "rollout.group_size: a preference pair is a group of 2, got 4"),
    # tokens
    (TOKEN[:1], "rollout.sde: token_grpo trains the tokens of answers ... set rollout.sde: null"),
    (
        (*TOKEN, "algorithm.clip_range_nats=0.2"),
        "algorithm.clip_range_nats: ... in nats already; set algorithm.clip_range",
    ),
    (
        (*TOKEN, "algorithm.clip_centre=drift"),
        "algorithm.clip_centre: the KL of a token has no closed form ... remove it",
    ),
    ((*TOKEN, "algorithm.teacher={path: t}"), "algorithm.teacher: token_grpo has no term for a teacher; remove it"),
    ((*TOKEN, "algorithm.kl_form=exact"), "algorithm.kl_form: ... between Gaussian steps ... k3 alone; remove it"),
    ((*CISPO, "algorithm.kl_form=mean"), "algorithm.kl_form: ... between Gaussian steps ... k3 alone; remove it"),
    ((*TOKEN, "algorithm.timestep_fraction=0.5"), "algorithm.timestep_fraction: all tokens ... trained; remove it"),
    ((*TOKEN, "algorithm.unconditional_gradient=false"), "unconditional_gradient: ... without guidance; remove it"),
    ((*TOKEN, "algorithm.forward.draws=3"), "algorithm.forward: tokens are trained without noise; remove the section"),
    (
        (*TOKEN, "algorithm.correction={mode: decoupled, kappa_nats: 0.5}"),
        "correction.kappa_nats: the KL of a token has no closed form; use k3",
    ),
    (
        (*TOKEN, "algorithm.correction={mode: decoupled, weights: tempered, tempering: step}"),
        "correction.tempering: a token is no denoising step; use tempering: update",
    ),
    (
        (*CISPO, "algorithm.correction={mode: bypass, k3: 1.0, steps: kept}"),
        "correction.steps: neither the ratio of token_cispo nor a weight ... use algorithm.name: token_gspo",
    ),
    (
        (*TOKEN_GSPO, "algorithm.answers.mean=token"),
        "answers.mean: token_gspo has one ratio ... use sequence, got token",
    ),
    (
        (*CISPO, "algorithm.clip_range=[0.2, 0.28]"),
        "clip_range: token_cispo bounds its ratio above ... got [0.2, 0.28]",
    ),
    ((*CISPO, "algorithm.dual_clip=3"), "algorithm.dual_clip: the ratio of token_cispo has no gradient ... remove it"),
    (("data={preferences: pairs.parquet}", "reward={}", "rollout.group_size=2"), "preferences: ... for diffusion_dpo"),
)

RIGHT: tuple[tuple[str, ...], ...] = (
    (),
    ("algorithm.kl_coef=0.04", "algorithm.clip_range=1e-4", "rollout.sde.kind=cps"),
    DANCE,
    MIX,
    (*MIX, "algorithm.mix.log_ratio_coef=0.1", "algorithm.kl_coef=0.1"),
    GUARD,
    (*DPPO, "algorithm.correction.mode=decoupled", "rollout.sde.kind=cps"),
    (*GSPO, "algorithm.correction.mode=interpolated"),
    (*GSPO, "algorithm.correction={mode: bypass, k3: 1.0, steps: kept}", "algorithm.clip_range_nats=[0.2, 0.28]"),
    ("algorithm.correction={mode: decoupled, weights: importance, level: trajectory, kappa_nats: 1, steps: kept}",),
    ("algorithm.clip_range=[2e-4, 2.8e-4]", "algorithm.dual_clip=3", "algorithm.clip_centre=drift"),
    (*GUARD, "algorithm.clip_range=[2e-6, 4e-6]", "algorithm.dual_clip=1.001"),
    REINFORCE,
    (REINFORCE[0], "algorithm.correction={mode: bypass, weights: tempered, kappa_nats: 0.5, m2: 0.04}"),
    (*REINFORCE, "trainer.steps_per_update=2"),
    (REINFORCE[0], "algorithm.correction={mode: none}"),
    (REINFORCE[0], "staleness.max_updates=0"),
    (*REINFORCE, "algorithm.advantage={form: reward_weighted, std: none, temperature: 0.1, clip_max: 8}"),
    (*AWM, "algorithm.advantage={form: best_of_n, best: 2}", "rollout.group_size=8"),
    ("algorithm.teacher={path: t, coef: 0.5}", "algorithm.kl_coef=0.04"),
    DISTILL,
    (*DISTILL, "rollout.group_size=1", "reward.scorers=[]", "staleness.max_updates=8", "algorithm.kl_coef=0.04"),
    ("algorithm.correction={mode: decoupled, weights: tempered, kappa_nats: 0.5, m2: 0.04}",),
    ("algorithm.correction={mode: decoupled, weights: tempered, tempering: step, floor: 0.1, cap: null}",),
    ("algorithm.correction={mode: interpolated, interpolation: linear, k1: [0.5, 2], reject_level: {k1: max}}",),
    NFT,
    (*NFT, "algorithm.kl_coef=1e-4"),
    AWM,
    (*AWM, "algorithm.awm={ema_coef: 1, ema_coef_end: 0.3}", "trainer.ema={}"),
    DPO,
    ("trainer.workers=17", "rollout.group_size=16"),
    ("trainer.workers=8", "trainer.sequence_parallel=2", "trainer.shard=4", "rollout.group_size=6"),
    (*DPO, "rollout.group_size=8", "trainer.workers=3", "algorithm.forward.draws=7"),
    OFFLINE,
    (*OFFLINE, "trainer.workers=4"),
    TOKEN,
    (
        *TOKEN,
        "algorithm.clip_range=[0.2, 0.28]",
        "algorithm.dual_clip=10",
        "algorithm.answers={mean: token, overlong: mask}",
    ),
    (*TOKEN, "algorithm.advantage.std=none", "algorithm.answers.mean=constant", "algorithm.kl_coef=1e-3"),
    (*TOKEN, "algorithm.correction={mode: interpolated, interpolation: linear, k1: [0.5, 2]}"),
    (*TOKEN, "algorithm.correction={mode: decoupled, weights: tempered, level: trajectory, log_ratio: mean, m2: 0.04}"),
    TOKEN_GSPO,
    (*TOKEN_GSPO, "algorithm.correction={mode: bypass, k3: 1.0, steps: kept}"),
    (*CISPO, "algorithm.clip_range=3", "algorithm.answers.mean=token"),
)

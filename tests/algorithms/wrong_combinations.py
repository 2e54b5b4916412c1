"""Lists recipes whose parts contradict each other: overrides of a flow_grpo recipe, and parts of the message."""

NFT = ("algorithm.name=diffusion_nft", "rollout.sde=null")
AWM = ("algorithm.name=awm", "rollout.sde=null")
DPO = ("algorithm.name=diffusion_dpo", "rollout.sde=null", "rollout.group_size=2")
OFFLINE = (*DPO, "data={preferences: pairs.parquet}", "reward={}")
MIX = ("algorithm.name=mix_grpo", "rollout.sde.window.schedule=progressive")
GUARD, DPPO = ("algorithm.name=grpo_guard",), ("algorithm.name=flow_dppo",)
DANCE = ("algorithm.name=dance_grpo", "rollout.sde.kind=dance")

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
    # final latents
    (("algorithm.name=diffusion_nft",), "rollout.sde: diffusion_nft trains on final latents ... an SDE window"),
    (("algorithm.name=awm",), "rollout.sde: awm trains on final latents"),
    (("algorithm.name=diffusion_dpo",), "rollout.sde: diffusion_dpo trains on final latents"),
    ((*NFT, "rollout.group_size=1"), "rollout.group_size: diffusion_nft compares the samples ... at least 2, got 1"),
    ((*NFT, "algorithm.correction.mode=decoupled"), "correction: diffusion_nft has no ratio to the policy that made"),
    ((*AWM, "algorithm.correction.k1=[0.5, 2.0]"), "algorithm.correction: awm has no ratio to the policy that made a"),
    ((*NFT, "algorithm.clip_range=1e-4"), "algorithm.clip_range: diffusion_nft does not clip a ratio ... remove it"),
    ((*NFT, "algorithm.clip_range_nats=1"), "algorithm.clip_range: diffusion_nft does not clip a ratio ... remove it"),
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
    ("algorithm.name=gspo", "algorithm.correction.mode=interpolated"),
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
)

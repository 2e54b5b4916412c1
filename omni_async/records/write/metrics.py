"""Lists every metric: the keys of `metrics.jsonl` and the charts of sinks."""

from __future__ import annotations

from omni_async.records.write.metric import STEP, Group, Metric

_GOAL = (
    Metric(
        "reward",
        Group.GOAL,
        "mean reward of the update's samples; absent without scorers, always 0.5 with `data.preferences`",
        better="up",
    ),
    Metric(
        "validation/reward", Group.GOAL, "mean reward of the samples that were scored", better="up", source="validation"
    ),
    Metric(
        "validation_gain",
        Group.GOAL,
        "reward minus the first round's, over the samples that both have scored",
        better="up",
        source="validation",
    ),
    Metric("not_scored", Group.GOAL, "samples that have no score", "samples", "down", source="validation"),
    Metric(
        "accuracy",
        Group.GOAL,
        "Diffusion-DPO: pairs that the policy orders correctly; 0.5 is chance",
        "fraction",
        "up",
        source="objective",
    ),
    Metric(
        "margin",
        Group.GOAL,
        "Diffusion-DPO: implicit reward of the winner minus the loser's",
        better="up",
        source="objective",
    ),
)
_PARTS = (
    Metric("reward/bucket<n>", Group.PARTS, "the same, of the samples of bucket n (`rollout.buckets`)", better="up"),
    Metric("reward/<part>", Group.PARTS, "mean of each part that scorers return", better="up"),
    Metric(
        "validation/<part>",
        Group.PARTS,
        "mean of each part; `validation/ocr_exact` is the share of images read exactly",
        better="up",
        source="validation",
    ),
)
_LEARNING = (
    Metric("loss", Group.LEARNING, "of the optimizer step", better="down"),
    Metric("grad_norm", Group.LEARNING, "norm of the gradient before clipping"),
    Metric("lr", Group.LEARNING, "learning rate"),
    Metric("lr_factor", Group.LEARNING, "its factor by `trainer.optimizer.step_size`"),
    Metric(
        "alignment",
        Group.LEARNING,
        "cosine between gradient and momentum, before `trainer.optimizer.max_alignment` limits it",
    ),
    Metric("advantage_abs", Group.LEARNING, "mean absolute advantage"),
    Metric("answer_tokens/mean", Group.LEARNING, "tokens of an answer", "tokens"),
    Metric("answer_tokens/max", Group.LEARNING, "of the longest answer", "tokens"),
    Metric("overlong", Group.LEARNING, "answers cut at the largest number of tokens", "fraction", "down"),
    Metric("entropy", Group.LEARNING, "mean of -log p of the answers' tokens under the trainer's policy", "nats"),
    Metric(
        "ratio_deviation",
        Group.LEARNING,
        "mean of |ratio - 1|; the ratio is per latent element",
        source="objective",
    ),
    Metric(
        "clipped_low",
        Group.LEARNING,
        "rows (a sample's trained step) below the clip range",
        "fraction",
        source="objective",
    ),
    Metric("clipped_high", Group.LEARNING, "rows above it", "fraction", source="objective"),
    Metric("clip_fraction", Group.LEARNING, "rows outside it", "fraction", source="objective"),
    Metric(
        "dual_clipped",
        Group.LEARNING,
        "rows with a negative advantage that `algorithm.dual_clip` bounds",
        "fraction",
        source="objective",
    ),
    Metric("approx_kl", Group.LEARNING, "mean of (log ratio)² / 2", source="objective"),
    Metric(
        "kl_ref",
        Group.LEARNING,
        "KL (or squared velocity difference) to the reference policy, with `algorithm.kl_coef` > 0",
        source="objective",
    ),
    Metric(
        "kl_teacher",
        Group.LEARNING,
        "KL to the teacher per latent element, by `algorithm.kl_form`",
        source="objective",
    ),
    Metric("kl_ema", Group.LEARNING, "AWM: squared velocity difference to the average policy", source="objective"),
    Metric("guard_bias", Group.LEARNING, "GRPO-Guard: correction of the mean log-ratio", source="objective"),
    Metric(
        "dropped",
        Group.LEARNING,
        "Flow-DPPO: rows beyond the trust region, without gradient",
        "fraction",
        source="objective",
    ),
    Metric(
        "preference",
        Group.LEARNING,
        "DiffusionNFT: mean preference; near 0.5 there is no signal",
        source="objective",
    ),
    Metric(
        "positive_loss", Group.LEARNING, "DiffusionNFT: loss of the positive branch", better="down", source="objective"
    ),
    Metric(
        "negative_loss", Group.LEARNING, "DiffusionNFT: loss of the negative branch", better="down", source="objective"
    ),
    Metric(
        "old_deviation",
        Group.LEARNING,
        "DiffusionNFT: squared velocity difference to the old policy",
        source="objective",
    ),
    Metric("flow_error", Group.LEARNING, "AWM: flow-matching error of the samples", better="down", source="objective"),
    Metric(
        "winner_error",
        Group.LEARNING,
        "Diffusion-DPO: flow-matching error of winners",
        better="down",
        source="objective",
    ),
    Metric("loser_error", Group.LEARNING, "Diffusion-DPO: that of losers", source="objective"),
)
_POLICY = (
    Metric("staleness/mean", Group.POLICY, "mean over the update's groups, in updates", "updates"),
    Metric("staleness/max", Group.POLICY, "the largest of them", "updates"),
    Metric("row_staleness/mean", Group.POLICY, "over rows: updates since the version that took that step", "updates"),
    Metric("row_staleness/max", Group.POLICY, "the largest of them", "updates"),
    Metric(
        "log_ratio_nats/mean",
        Group.POLICY,
        "log-ratio L of the sample, between the trainer's policy and the policy that took the step",
        "nats",
    ),
    Metric("log_ratio_nats/variance", Group.POLICY, "its variance over rows", "nats²", "down"),
    Metric("log_ratio_nats/absmax", Group.POLICY, "the largest |L|", "nats", "down"),
    Metric(
        "ess",
        Group.POLICY,
        "effective sample size of the weights exp(L), in (0, 1]",
        "fraction",
        "up",
    ),
    Metric(
        "k3_nats",
        Group.POLICY,
        "mean of exp(L) - 1 - L: estimated KL from the policy that took the step (exp(L) is at most e^20"
        " here and in the next three)",
        "nats",
        "down",
    ),
    Metric("chi2", Group.POLICY, "mean of exp(2 L) - 1: chi-square divergence of single steps", better="down"),
    Metric("chi2/sample", Group.POLICY, "the same of whole samples, with L summed over their steps", better="down"),
    Metric(
        "perplexity_ratio",
        Group.POLICY,
        "mean over samples of exp(-mean L); above 1 the trainer's policy finds the samples less likely",
    ),
    Metric(
        "drift_clipped",
        Group.POLICY,
        "share of rows that the clip range or a mask takes before the update; in mode `bypass`, or"
        " `auto`, which leaves bypass if the median of 5 updates exceeds 0.2",
        "fraction",
        "down",
    ),
    Metric(
        "kappa_nats",
        Group.POLICY,
        "D kappa: the drift as an exact KL; with `algorithm.correction.kappa_nats`, or GRPO-Guard and"
        " Flow-DPPO in mode `bypass`",
        "nats",
        "down",
    ),
    Metric(
        "engine_mismatch_nats",
        Group.POLICY,
        "largest |L| of rows of staleness 0, where engine and trainer hold the same weights",
        "nats",
        "down",
    ),
    Metric(
        "engine_mismatch",
        Group.POLICY,
        "the same in nats per latent element, or the mean |L| of tokens; the first update fails above"
        " `trainer.max_mismatch`",
        "nats",
        "down",
    ),
    Metric("engine_mismatch_nats/mean", Group.POLICY, "mean L of these rows; rounding makes it negative", "nats"),
    Metric("engine_mismatch_nats/variance", Group.POLICY, "variance of L of these rows", "nats²", "down"),
    Metric(
        "engine_mismatch_velocity",
        Group.POLICY,
        "relative rms error of the velocity that these L imply, at any resolution",
        "fraction",
        "down",
    ),
    Metric(
        "engine_mismatch_honest",
        Group.POLICY,
        "the largest such error that rounding in `model.dtype` explains",
        "fraction",
    ),
    Metric(
        "engine_mismatch_clipped",
        Group.POLICY,
        "share of these rows that the clip range or a mask takes",
        "fraction",
        "down",
    ),
    Metric("fresh_fraction", Group.POLICY, "share of rows of staleness 0", "fraction"),
    Metric("proximal_ratio", Group.POLICY, "1 once mode `auto` takes ratios to the trainer's own policy"),
    Metric("weight/mean", Group.POLICY, "importance weights, if `algorithm.correction` has weights or masks"),
    Metric("weight/max", Group.POLICY, "the largest of them"),
    Metric("weight/variance", Group.POLICY, "their variance", better="down"),
    Metric("gamma", Group.POLICY, "exponent of tempered importance weights, mean over rows"),
    Metric("masked", Group.POLICY, "share of rows that any rule masked", "fraction"),
    Metric("masked/<rule>", Group.POLICY, "share that this rule masked", "fraction"),
    Metric(
        "statistic/<rule>/mean",
        Group.POLICY,
        "the value that the rule bounds: `kappa_nats` D kappa, `m2` L², `k1` exp(|L|), `k2` L² / 2, `k3`"
        " exp(L) - 1 - L, `band` the weight",
    ),
    Metric("statistic/<rule>/max", Group.POLICY, "the largest, at most 1e12"),
    Metric(
        "log_prob/<medium>",
        Group.POLICY,
        "with several media (LTX-2): the log-prob of one, per latent element",
    ),
    Metric("log_ratio_nats/<medium>/mean", Group.POLICY, "its log-ratio; the media's add up to L", "nats"),
    Metric("log_ratio_nats/<medium>/absmax", Group.POLICY, "the largest absolute one", "nats", "down"),
)
_STEPS = tuple(
    Metric(f"{name}/step_{STEP}", Group.STEPS, f"{text} of that denoising step alone")
    for name, text in {
        "log_ratio_nats/variance": "variance of the log-ratios in nats",
        "engine_mismatch_nats/mean": "mean L of rows of staleness 0",
        "engine_mismatch_nats/variance": "variance of L of rows of staleness 0",
        "ess": "effective sample size",
        "kappa_nats": "D kappa in nats",
        "weight/mean": "mean importance weight",
        "gamma": "exponent of tempered importance weights (`tempering: step`)",
        "masked": "share of masked rows",
    }.items()
)
_SCORERS = (
    Metric("scorer/<scorer>/calls", Group.SCORERS, "calls of the scorer since the last update"),
    Metric("scorer/<scorer>/samples", Group.SCORERS, "samples in them", "samples"),
    Metric("scorer/<scorer>/failed", Group.SCORERS, "answers without a score", "samples", "down"),
    Metric("scorer/<scorer>/cached", Group.SCORERS, "answers from the cache", "samples"),
    Metric("scorer/<scorer>/tokens", Group.SCORERS, "tokens that a judge read and wrote", "tokens"),
    Metric("scorer/<scorer>/in_flight", Group.SCORERS, "samples that waited for its answer, on average", "samples"),
    Metric("scorer/<scorer>/queued", Group.SCORERS, "of these, samples that waited for a call", "samples"),
    Metric(
        "scorer/<scorer>/answer_s/<quantile>",
        Group.SCORERS,
        "from request to answer, per sample: `p50`, `p95`, `p99`",
        "s",
        "down",
    ),
    Metric("scorer/<scorer>/call_s/<quantile>", Group.SCORERS, "the same of calls", "s", "down"),
)
_THROUGHPUT = (
    Metric("update", Group.THROUGHPUT, "number of the update, from 1; also the version it made"),
    Metric("images", Group.THROUGHPUT, "training images generated so far", "images"),
    Metric("images_per_s", Group.THROUGHPUT, "training images per second, over 30 seconds", "images/s", "up"),
    Metric(
        "tokens_per_s",
        Group.THROUGHPUT,
        "generated answers times the mean length of trained ones, over 30 seconds",
        "tokens/s",
        "up",
    ),
    Metric("answer_tokens/median", Group.THROUGHPUT, "of the update's answers", "tokens"),
    Metric("answer_tokens/p95", Group.THROUGHPUT, "of the update's answers", "tokens"),
    Metric("answer_versions", Group.THROUGHPUT, "versions inside an answer, mean"),
    Metric("update_s", Group.THROUGHPUT, "duration of the update, waiting included", "s", "down"),
    Metric("wall_s", Group.THROUGHPUT, "as in the summary, so far", "s"),
    Metric("encoder/calls", Group.THROUGHPUT, "prompts that engines encoded since the last update"),
    Metric(
        "encoder/hits",
        Group.THROUGHPUT,
        "share of samples (or calls) whose prompt was in `rollout.conditioning_cache`",
        "fraction",
        "up",
    ),
    Metric(
        "prefix/shared",
        Group.THROUGHPUT,
        "share of training denoising steps that another sample took (`rollout.share_prefix`)",
        "fraction",
        "up",
    ),
    Metric("score_cache/hits", Group.THROUGHPUT, "answers from `reward.cache` since the last update", "samples"),
    Metric("tflops/trainer", Group.THROUGHPUT, "model TFLOP/s of a trainer rank while it computes", "TFLOP/s", "up"),
    Metric(
        "mfu/trainer",
        Group.THROUGHPUT,
        "the same as a share of the device's peak (`trainer.peak_tflops`, or a known accelerator's in bfloat16)",
        "fraction",
        "up",
    ),
    Metric(
        "mfu/overall",
        Group.THROUGHPUT,
        "the same over the whole time, waits included",
        "fraction",
        "up",
    ),
    Metric(
        "device/<n>/memory_bytes",
        Group.THROUGHPUT,
        "memory of the run's accelerator n that all processes use, as last sampled; absent without accelerators",
        "bytes",
    ),
    Metric(
        "device/<n>/utilisation",
        Group.THROUGHPUT,
        "busy share of the last 30 seconds of accelerator n, as its driver reports it",
        "fraction",
        "up",
    ),
)
_WAITING = (
    Metric(
        "stage_s/<stage>",
        Group.WAITING,
        "time since the last update in `generate`, `score`, `proximal`, `train`, `step`, `export`,"
        " `wait` (for groups) and `publish`; concurrent work of a worker counts once",
        "s",
    ),
    Metric("busy/<role>", Group.WAITING, "share of the last 30 seconds in which the role was busy", "fraction", "up"),
    Metric(
        "admission/lead_s",
        Group.WAITING,
        "time from a group's admission to its last score, without waits for older groups; median of recent updates",
        "s",
    ),
    Metric("admission/work_s", Group.WAITING, "the trainer's work on an update, without waits for groups", "s"),
    Metric(
        "admission/reserve_s",
        Group.WAITING,
        "how much earlier than the lead groups are admitted (`staleness.reserve`); 0 if none is withheld",
        "s",
    ),
    Metric(
        "admission/starved_s",
        Group.WAITING,
        "the trainer's waits, in the update before, while a group was withheld and no other stage was busy",
        "s",
        "down",
    ),
    Metric("buffers/trajectories", Group.WAITING, "slots reserved in the trajectory buffer", "slots"),
    Metric("buffers/replay", Group.WAITING, "slots reserved in the replay buffer", "slots"),
    Metric(
        "buffers/bytes",
        Group.WAITING,
        "bytes that live samples hold or are expected to hold (`buffer.max_bytes`)",
        "bytes",
    ),
    Metric("buffers/bytes_held/max", Group.WAITING, "most bytes held at a time since the update before", "bytes"),
)

METRICS: tuple[Metric, ...] = (
    *_GOAL,
    *_PARTS,
    *_LEARNING,
    *_POLICY,
    *_STEPS,
    *_SCORERS,
    *_THROUGHPUT,
    *_WAITING,
)

"""Implements the objectives on the tokens of answers: PPO's clip per token or per answer, or clipped weights.

All numbers per token are float64, in nats. `algorithm.answers.mean` selects the average over tokens. The output has a
loss per answer, and the trainer averages over answers:

| mean     | loss of an answer of T tokens                                                | source          |
|----------|------------------------------------------------------------------------------|-----------------|
| sequence | the mean over its tokens                                                     | GRPO, GSPO      |
| token    | the sum over its tokens; the trainer divides by tokens instead of by answers | DAPO, CISPO     |
| constant | the sum, divided by the largest number of tokens that an answer can have     | Dr.GRPO         |

| objective   | paper            | its own part                                                            |
|-------------|------------------|-------------------------------------------------------------------------|
| token_grpo  | arXiv 2402.03300 | PPO's clipped surrogate per token; with mean "token" and a pair as      |
|             |                  | clip_range DAPO (2503.14476); with mean "constant" Dr.GRPO (2503.20783) |
| token_gspo  | arXiv 2507.18071 | one ratio per answer, the geometric mean over its tokens                |
| token_cispo | arXiv 2506.13585 | the log-prob times a ratio that is bounded above and has no gradient    |
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.algorithms.objectives.base import ObjectiveOutput, TokenInputs
from omni_async.algorithms.objectives.transition import Metrics, clipped_surrogate, ends_of
from omni_async.config.algorithm import Algorithm

_CLIP_RANGE = 0.2  # PPO, GRPO, DAPO's lower end
_CLIP_RANGE_OF_ANSWERS = (3e-4, 4e-4)  # GSPO


def token_grpo(inputs: TokenInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per token w max(-A r, -A clip(r, 1 - low, 1 + high)) + kl_coef KL, with r = exp(log_prob - old_log_prob).

    clip_range is (low, high), or one number for both; 0.2 if the recipe has none. dual_clip c bounds the loss at c |A|
    for A < 0. w is the weight, 1 without a correction. KL: `reference_kl`. Raises ValueError for kl_coef > 0 without
    ref_log_prob.

    Metrics, means over an answer's tokens: ratio_deviation |r - 1|; clipped_low, clipped_high: the shares of tokens
    whose r is outside; with dual_clip dual_clipped; approx_kl (log r)^2 / 2; with ref_log_prob kl_ref."""
    log_ratio = _log_ratios(inputs)
    loss, metrics = clipped_surrogate(
        _advantages(inputs), algorithm, log_ratio, log_ratio.detach(), log_ratio.detach(), _CLIP_RANGE
    )
    return _output(inputs, algorithm, loss, metrics)


def token_gspo(inputs: TokenInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per token w max(-A s, -A clip(s, 1 - low, 1 + high)) + kl_coef KL, with s = exp(mean of log r).

    The mean is over the answer's tokens. They share s, which passes the gradient to all of them. r, w, KL and errors
    are as in `token_grpo`; clip_range is (3e-4, 4e-4) if the recipe has none. With correction.steps "kept" the mean is
    over tokens of weight > 0, which VeRL's rejection masks leave; s = 1 without such tokens.

    Metrics: as in `token_grpo`, with ratio_deviation and clipped_* of s."""
    log_ratio, lengths = _log_ratios(inputs), inputs.lengths.to(torch.float64)
    if algorithm.correction.steps == "kept" and inputs.weight is not None:
        kept = inputs.weight > 0
        log_ratio = torch.where(kept, log_ratio, 0.0)
        lengths = _sum_by_answer(kept.to(torch.float64), inputs).clamp(min=1)
    mean = (_sum_by_answer(log_ratio, inputs) / lengths).repeat_interleave(inputs.lengths)
    loss, metrics = clipped_surrogate(
        _advantages(inputs), algorithm, mean, mean.detach(), mean.detach(), _CLIP_RANGE_OF_ANSWERS
    )
    return _output(inputs, algorithm, loss, metrics)


def token_cispo(inputs: TokenInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per token -w min(r, 1 + high) A log_prob + kl_coef KL; r is data, so every token keeps its gradient.

    high is clip_range; 0.2 if the recipe has none. r, w, KL, errors and metrics are as in `token_grpo`; clipped_low is
    0, because r is not bounded below."""
    ratio = _log_ratios(inputs).detach().exp()
    high = 1 + ends_of(_CLIP_RANGE if algorithm.clip_range is None else algorithm.clip_range)[1]
    loss = -ratio.clamp(max=high) * _advantages(inputs) * inputs.log_prob.to(torch.float64)
    metrics = {
        "ratio_deviation": (ratio - 1).abs(),
        "clipped_low": torch.zeros_like(ratio),
        "clipped_high": (ratio > high).to(torch.float64),
    }
    return _output(inputs, algorithm, loss, metrics)


def reference_kl(inputs: TokenInputs, ref_log_prob: Tensor) -> Tensor:
    """Return (T,) float64 with gradient: k3 = exp(d) - 1 - d >= 0, with d = ref_log_prob - log_prob.

    Its mean over tokens that the policy in training drew is the KL to the reference (J. Schulman, "Approximating KL
    divergence"; GRPO, arXiv 2402.03300, eq. 4)."""
    gap = ref_log_prob.detach().to(torch.float64) - inputs.log_prob.to(torch.float64)
    return gap.expm1() - gap


def _output(inputs: TokenInputs, algorithm: Algorithm, policy_loss: Tensor, metrics: Metrics) -> ObjectiveOutput:
    """Average over tokens: weight policy_loss + kl_coef KL (T,) to losses (N,) in log_prob's dtype."""
    loss = policy_loss if inputs.weight is None else inputs.weight.detach().to(torch.float64) * policy_loss
    metrics = {**metrics, "approx_kl": 0.5 * _log_ratios(inputs).square()}
    if inputs.ref_log_prob is not None:
        metrics["kl_ref"] = reference_kl(inputs, inputs.ref_log_prob)
        loss = loss + algorithm.kl_coef * metrics["kl_ref"] if algorithm.kl_coef > 0 else loss
    elif algorithm.kl_coef > 0:
        raise ValueError(f"algorithm.kl_coef is {algorithm.kl_coef} but there is no ref_log_prob to compute the KL to")
    dtype, lengths = inputs.log_prob.dtype, inputs.lengths.to(torch.float64)
    losses = _sum_by_answer(loss, inputs)
    match algorithm.answers.mean:
        case "sequence":
            losses = losses / lengths
        case "constant":
            losses = losses / inputs.most_tokens
        case "token":  # the trainer divides by the tokens of the optimizer step
            pass
    means = _sum_by_answer(torch.stack([*metrics.values()]).detach(), inputs) / lengths
    return ObjectiveOutput(losses.to(dtype), dict(zip(metrics, means.to(dtype), strict=True)))


def _log_ratios(inputs: TokenInputs) -> Tensor:
    return inputs.log_prob.to(torch.float64) - inputs.old_log_prob.detach().to(torch.float64)


def _advantages(inputs: TokenInputs) -> Tensor:
    """Return (T,) float64, the advantage of each token's answer."""
    return inputs.advantage.detach().to(torch.float64).repeat_interleave(inputs.lengths)


def _sum_by_answer(values: Tensor, inputs: TokenInputs) -> Tensor:
    """Return (..., N), the sums over each answer of values (..., T), whatever the other answers are."""
    return torch.stack([part.sum(dim=-1) for part in values.split(inputs.lengths.tolist(), dim=-1)], dim=-1)

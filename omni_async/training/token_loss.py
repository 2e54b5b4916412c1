"""Computes losses of objectives on tokens: one row is one answer.

`token_rows` packs answers. The denominator of a token's ratio and its correction are those of `transition_loss`, for a
token in place of a denoising step. A token's log-prob is exact, in nats, so a sample has one element.

The engine averages the losses over answers. `gradient_normaliser` turns this into the mean of `algorithm.answers.mean`
over the answers that count: those that `algorithm.answers.overlong` leaves in the loss, and their unmasked tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from omni_async.algorithms.correction import Corrected, Drift, correct, padded
from omni_async.algorithms.objectives.base import TokenInputs
from omni_async.algorithms.registry import Objective
from omni_async.algorithms.token_mean import counted
from omni_async.config.schema import Config
from omni_async.plugins.families import SamplingSpec
from omni_async.training import TrainingError
from omni_async.training.device import send
from omni_async.training.groups import GroupBatch
from omni_async.training.mismatch import EXCLUDED
from omni_async.training.ratio_loss import RatioLoss
from omni_async.training.token_rows import Prompts, TokenRows, check_answers, token_batches
from omni_async.types import SampleDrift

_AnswerKey = tuple[int, int]  # group, sample


class TokenLoss(RatioLoss):
    """The `RowLoss` of token objectives. `omni_async.training.engine` documents the order of calls."""

    def __init__(self, config: Config, objective: Objective, *parts: Any) -> None:
        super().__init__(config, objective, *parts)
        self._row_tokens = config.trainer.micro_batch_tokens
        self._specs = config.rollout.specs
        self._prompts = Prompts(self._policy)
        self._reads_reference = "reference" in objective.auxiliary(config.algorithm)
        self._proximal: dict[_AnswerKey, Tensor] = {}  # log-probs (T,) float64 on the CPU

    def batches(self, group: GroupBatch) -> Iterator[tuple[TokenRows, bool]]:
        if group.spec not in self._specs:
            raise ValueError(f"the group was drawn by {group.spec}, which is not one of the recipe's")
        prompts = self._prompts.of(group)
        stop_tokens = self._policy.stop_tokens
        check_answers(group, prompts, self._fields, stop_tokens)
        yield from token_batches(group, prompts, self._row_tokens, stop_tokens, self._model.device)

    def losses(self, group: GroupBatch, rows: TokenRows, counts: bool) -> Tensor:
        reference = None
        if self._reads_reference:
            temperature = _temperature(group.spec)
            reference = self._model.auxiliary_log_probs("reference", rows.packed, temperature).double()
        value = self._log_probs(group, rows)
        mode = self._mode(group)
        recalled = self._recalled(group, rows)
        proximal = value.detach() if recalled is None else recalled
        nats = self._log_ratio(rows, _per_token(rows), proximal)
        weight, corrected = self._weights(rows, nats)
        output = self._computed(
            TokenInputs(
                log_prob=value,
                old_log_prob=self._old(mode, rows, value.detach(), proximal),
                advantage=rows.advantage,
                lengths=rows.lengths,
                most_tokens=_most(group.spec),
                weight=weight,
                ref_log_prob=reference,
            )
        )
        masks = self._algorithm.answers.overlong == "mask"
        trained = ~rows.overlong if masks else torch.ones_like(rows.overlong)
        loss = torch.where(trained, output.loss, 0.0)
        if counts:
            self._normaliser[0] += len(rows.lengths)
            most = torch.full_like(rows.lengths, _most(group.spec))
            settings = self._algorithm.answers, self._correction
            self._normaliser[1] += counted(*settings, rows.lengths, most, corrected, trained)[1]
            self._record(group, rows, value.detach(), nats)
            if corrected is not None:
                self._record_corrected(corrected)
            if weight is not None:
                self._record_weights(weight)
            if self._first_step:  # in later steps of an update the policy has moved on purpose
                outside = _outside(rows, output.metrics, weight)
                self._record_mismatch(rows, proximal, outside)
                if mode == "bypass":
                    self._metrics.record("drift_clipped", outside)
            self._metrics.record_loss(loss, rows.advantage, output.metrics)
        return loss

    @torch.no_grad()
    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        found: dict[int, SampleDrift] = {}
        for rows, counts in self.batches(group):
            value = self._log_probs(group, rows)
            if not counts:
                continue
            lengths = rows.lengths.tolist()
            nats = self._log_ratio(rows, _per_token(rows), value).cpu().split(lengths)
            for sample, own, its in zip(rows.samples, value.cpu().split(lengths), nats, strict=True):
                self._proximal[group.sample_ids[sample]] = own
                found[sample] = SampleDrift(array("d", its.numpy().tobytes()), None, 1, range(len(its)))
        return [found[sample] for sample in sorted(found)]

    def end_update(self, progress: float) -> None:
        super().end_update(progress)
        self._proximal.clear()
        self._prompts.clear()

    def _log_probs(self, group: GroupBatch, rows: TokenRows) -> Tensor:
        """Return the log-probs (T,) float64 of the policy in training."""
        value = self._model.log_probs(rows.packed, _temperature(group.spec))
        if value.shape != rows.packed.targets.shape:
            raise TrainingError(
                f"{type(self._policy).__name__}.log_probs returned shape {tuple(value.shape)} for"
                f" {len(rows.packed.targets)} tokens"
            )
        return value.double()

    def _recalled(self, group: GroupBatch, rows: TokenRows) -> Tensor | None:
        """Return these tokens' log-probs (T,) of the proximal pass; None if there was no pass."""
        keys = [group.sample_ids[sample] for sample in rows.samples]
        if keys[0] not in self._proximal:
            return None
        return send(torch.cat([self._proximal[key] for key in keys]), rows.lengths.device)

    def _old(self, mode: str, rows: TokenRows, current: Tensor, proximal: Tensor) -> Tensor:
        """Return the log-probs (T,) of the ratio's denominator in a mode of `algorithm.correction`."""
        if mode in ("decoupled", "none"):
            return proximal
        return rows.behaviour_log_prob if mode == "bypass" else self._interpolated(rows, _per_token(rows), current)

    def _weights(self, rows: TokenRows, nats: Tensor) -> tuple[Tensor | None, Corrected | None]:
        """Return the weights (T,), and the correction that they are of if it needs no other answers."""
        if rows.weight is not None or (self._correction.weights == "none" and not self._correction.masks):
            return rows.weight, None
        log_ratio, valid = padded(nats, rows.lengths)
        corrected = correct(Drift(log_ratio, valid=valid), self._correction, 1)
        return corrected.weight[valid], corrected

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def _record(self, group: GroupBatch, rows: TokenRows, value: Tensor, nats: Tensor) -> None:
        record, samples = self._metrics.record, [group.sample_ids[sample] for sample in rows.samples]
        of_tokens = [name for name, n in zip(samples, rows.lengths.tolist(), strict=True) for _ in range(n)]
        self._record_ratio(nats, of_tokens, rows.staleness)
        record("answer_tokens/mean", rows.lengths.double())
        record("answer_tokens/max", rows.lengths.double(), "max")
        record("overlong", rows.overlong.double())
        record("entropy", -value)

    def _record_mismatch(self, rows: TokenRows, proximal: Tensor, outside: Tensor) -> None:
        """Record the tokens of answers that the trainer's version drew alone.

        After a swap within an answer, engines may keep keys and values of the old weights on purpose."""
        self._metrics.record("fresh_fraction", rows.fresh.double())
        nats = (proximal - rows.behaviour_log_prob)[rows.fresh.repeat_interleave(rows.lengths)]
        if not len(nats):
            return
        self._metrics.record("engine_mismatch", nats.abs())
        self._metrics.record("engine_mismatch_nats", nats, "absmax")
        self._metrics.record("engine_mismatch_nats/mean", nats)
        self._metrics.record("engine_mismatch_nats/variance", nats, "variance")
        self._metrics.record("engine_mismatch_clipped", outside[rows.fresh])


def _outside(rows: TokenRows, metrics: Mapping[str, Tensor], weight: Tensor | None) -> Tensor:
    """Return the share (N,) float64 of each answer's tokens that the clip range or the correction excludes."""
    found = torch.zeros_like(rows.advantage, dtype=torch.float64)
    for name in EXCLUDED:
        if name in metrics:
            found = found + metrics[name]
    if weight is not None:
        masked = (weight == 0).double().split(rows.lengths.tolist())
        found = found + torch.stack([one.mean() for one in masked])
    return found.clamp(max=1.0)


def _per_token(rows: TokenRows) -> Tensor:
    """Return the nats per unit of log-prob (T,): a log-prob of a token is in nats."""
    return torch.ones_like(rows.behaviour_log_prob)


def _temperature(spec: Any) -> float:
    found: float = spec.temperature
    return found


def _most(spec: SamplingSpec) -> int:
    assert spec.most_tokens is not None, "check_answers refuses such a spec"
    return spec.most_tokens

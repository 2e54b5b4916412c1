"""Defines the common base of losses whose rows have an importance ratio to the policy that generated them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from omni_async.algorithms.correction import Corrected, chi2, interpolated_log_prob, k3, perplexity_ratio
from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import Objective
from omni_async.config.algorithm import Correction
from omni_async.config.schema import Config
from omni_async.training.groups import GroupBatch
from omni_async.training.row_loss import ComputedLoss
from omni_async.training.token_rows import TokenRows
from omni_async.training.transition_rows import TransitionRows


class RatioLoss(ComputedLoss):
    """A `RowLoss` whose ratio is corrected as in `algorithm.correction`. A subclass stores proximal log-probs."""

    def __init__(self, config: Config, objective: Objective, *parts: Any) -> None:
        super().__init__(config, objective, *parts)
        # Without a ratio there is nothing to correct, whatever mode `auto` starts with.
        self._correction = config.correction if find_kind(objective.kind).ratio else Correction(mode="none")
        self._first_step = True
        self._normaliser = [0.0, 0.0]

    def gradient_normaliser(self) -> tuple[float, float]:
        sums, self._normaliser = self._normaliser, [0.0, 0.0]
        return sums[0], sums[1]

    def end_step(self) -> None:
        self._first_step = False

    def end_update(self, progress: float) -> None:
        self._first_step = True

    def _mode(self, group: GroupBatch) -> str:
        """Return the mode of `algorithm.correction` that selects the denominator of the ratio."""
        return "decoupled" if group.proximal_ratio else self._correction.mode

    def _interpolated(self, rows: TransitionRows | TokenRows, nats: Tensor, log_prob: Tensor) -> Tensor:
        """Return log-probs (R,) between the recorded ones and `log_prob` (R,). `nats` (R,): per unit of log-prob."""
        recorded, interpolation = rows.behaviour_log_prob, self._correction.interpolation
        return interpolated_log_prob(recorded, log_prob, rows.staleness, nats, interpolation)

    def _log_ratio(self, rows: TransitionRows | TokenRows, nats: Tensor, proximal: Tensor) -> Tensor:
        """Return the log-ratios (R,) float64, in nats, from the behaviour to the proximal policy."""
        value = self._interpolated(rows, nats, proximal) if self._correction.mode == "interpolated" else proximal
        return nats * (value - rows.behaviour_log_prob)

    # ---- metrics -----------------------------------------------------------------------------------------------------

    def _record_ratio(self, nats: Tensor, samples: Sequence[Hashable], staleness: Tensor) -> None:
        """Record log-ratios (R,) from the behaviour to the proximal policy. `samples`: the sample of each row."""
        record, by_sample = self._metrics.record, self._metrics.record_by_sample
        record("log_ratio_nats/mean", nats)
        record("log_ratio_nats/absmax", nats, "absmax")
        record("log_ratio_nats/variance", nats, "variance")
        record("ess", nats, "ess")
        record("k3_nats", k3(nats))
        record("chi2", chi2(nats))
        by_sample("chi2/sample", nats, samples, lambda means, rows: chi2(means * rows))
        by_sample("perplexity_ratio", nats, samples, lambda means, _: perplexity_ratio(means))
        self._record_staleness(staleness)

    def _record_corrected(self, corrected: Corrected) -> None:
        for name, values in corrected.metrics().items():
            self._metrics.record(name, values, "max" if name.endswith("/max") else "mean")

    def _record_weights(self, weight: Tensor) -> None:
        self._metrics.record("weight/mean", weight)
        self._metrics.record("weight/max", weight, "max")
        self._metrics.record("weight/variance", weight, "variance")
        self._metrics.record("masked", (weight == 0).double())

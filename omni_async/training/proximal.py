"""Evaluates the proximal policy of an update, the trainer's weights at its start, on the rows that are trained.

With one optimizer step per update it is the policy in training, and the same forward pass evaluates it. Otherwise, and
where a correction looks at the whole update, its log-probs are recomputed in a separate pass when a group arrives, and
kept here until the update is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.sde.transitions import Transition
from omni_async.training.transition_rows import TransitionRows
from omni_async.types import SampleDrift


@dataclass(frozen=True)
class Proximal:
    """R rows under the proximal policy. log_prob (R,); mean (R, *shape) where it was kept; kappa (R,) float64.

    D kappa in nats, the exact KL of each step from the policy that took it, where that one's means are known."""

    log_prob: Tensor
    mean: Tensor | None
    kappa: Tensor | None


def under_current(rows: TransitionRows, step: Transition, log_prob: Tensor) -> Proximal:
    """Take the policy in training as the proximal one. Detached."""
    kappa = None
    if rows.behaviour_mean is not None:
        squares = (step.mean.detach() - rows.behaviour_mean).square().flatten(1).mean(dim=1, dtype=torch.float64)
        kappa = rows.num_elements * squares / (2 * step.scale.double().square())
    return Proximal(log_prob.detach(), step.mean.detach(), kappa)


class ProximalPasses:
    """The results of proximal passes over this rank's samples, by group and row id; on the CPU."""

    def __init__(self, keep_means: bool) -> None:
        self._keep_means = keep_means
        self._rows: dict[int, dict[tuple[int, int], Proximal]] = {}

    def remember(self, group: int, row_ids: Sequence[tuple[int, int]], found: Proximal) -> None:
        rows = self._rows.setdefault(group, {})
        for i, row_id in enumerate(row_ids):
            mean = found.mean[i].cpu() if found.mean is not None and self._keep_means else None
            kappa = None if found.kappa is None else found.kappa[i].cpu()
            rows[row_id] = Proximal(found.log_prob[i].cpu(), mean, kappa)

    def recall(self, group: int, row_ids: Sequence[tuple[int, int]], device: torch.device) -> Proximal | None:
        """Return the rows `row_ids`, or None if the group had no pass."""
        if group not in self._rows:
            return None
        found = [self._rows[group][row_id] for row_id in row_ids]
        means, kappas = [p.mean for p in found if p.mean is not None], [p.kappa for p in found if p.kappa is not None]
        return Proximal(
            torch.stack([p.log_prob for p in found]).to(device),
            torch.stack(means).to(device) if means else None,
            torch.stack(kappas).to(device) if kappas else None,
        )

    def clear(self) -> None:
        self._rows.clear()


def sample_drifts(
    row_ids: Sequence[tuple[int, int]], log_ratio: Tensor, kappa: Tensor | None, num_elements: int
) -> list[SampleDrift]:
    """Collect rows (R,) back into samples, in the order of their ids, whatever the order of the rows."""
    rows: dict[int, list[int]] = {}
    for i in sorted(range(len(row_ids)), key=row_ids.__getitem__):
        rows.setdefault(row_ids[i][0], []).append(i)
    return [
        SampleDrift(tuple(log_ratio[own].tolist()), None if kappa is None else tuple(kappa[own].tolist()), num_elements)
        for own in rows.values()
    ]

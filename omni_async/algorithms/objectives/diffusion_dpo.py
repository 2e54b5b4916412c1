"""Implements Diffusion-DPO (arXiv 2311.12908) for flow matching.

Of a pair, the winner's error shall fall below the reference's by more than the loser's does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from omni_async.algorithms.forward_process import mean_square, target
from omni_async.algorithms.objectives.base import ForwardInputs, ObjectiveOutput
from omni_async.config.algorithm import Algorithm


def diffusion_dpo(inputs: ForwardInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute the loss of pairs: rows alternate winner, loser.

    Both rows of a pair have the same noise and sigma, and carry the pair's loss.

    With e = <(v - (noise - final))^2>, e_ref the same of ref_velocity, d = (e - e_ref) of the winner minus (e - e_ref)
    of the loser and b = dpo.beta / 2 (dpo.beta if not dpo.halved): `sigmoid` -log sigmoid(-b d); `hinge` max(1 + b d,
    0); `ipo` (d + 1 / (2 b))^2. The advantage is not used.

    ValueError without ref_velocity, for an odd number of rows, and where noise or sigma differ within a pair.

    Metrics, the pair's in both rows: margin -b d, the implicit reward of the winner minus the loser's; accuracy, 1
    where d < 0; winner_error, loser_error: e."""
    if inputs.ref_velocity is None:
        raise ValueError("diffusion_dpo needs ref_velocity: it compares with the reference policy")
    _check_pairs(inputs)
    aim = target(inputs.final.double(), inputs.noise.double())
    error = mean_square(inputs.velocity, aim)
    gain = error - mean_square(inputs.ref_velocity, aim).detach()
    difference = gain[0::2] - gain[1::2]
    settings = algorithm.dpo
    strength = settings.beta / 2 if settings.halved else settings.beta
    margin = -strength * difference
    match settings.loss:
        case "sigmoid":
            loss = -logsigmoid(margin)
        case "hinge":
            loss = relu(1 - margin)
        case "ipo":
            loss = (difference + 1 / (2 * strength)).square()

    metrics = {
        "margin": margin.detach(),
        "accuracy": (difference.detach() < 0).double(),
        "winner_error": error.detach()[0::2],
        "loser_error": error.detach()[1::2],
    }
    dtype = torch.promote_types(inputs.velocity.dtype, torch.float32)
    return ObjectiveOutput(_both(loss).to(dtype), {name: _both(value).to(dtype) for name, value in metrics.items()})


def _both(per_pair: Tensor) -> Tensor:
    """Repeat (R / 2,) per pair to (R,)."""
    return per_pair.repeat_interleave(2)


def _check_pairs(inputs: ForwardInputs) -> None:
    rows = len(inputs.sigma)
    if rows % 2:
        raise ValueError(f"diffusion_dpo needs rows that alternate winner, loser; got an odd number of rows, {rows}")
    for name, value in (("noise", inputs.noise), ("sigma", inputs.sigma)):
        if not torch.equal(value[0::2], value[1::2]):
            differs = (value[0::2] != value[1::2]).reshape(rows // 2, -1).any(dim=1)
            pair = int(differs.nonzero()[0])
            raise ValueError(
                f"{name} must be the same for winner and loser, but differs in pair {pair} (rows {2 * pair},"
                f" {2 * pair + 1})"
            )

"""Computes how slowly averaged copies of the policy follow it: copy <- d copy + (1 - d) policy.

Coefficients that change over a run are here, too.

Plain numbers, no torch.
"""

from __future__ import annotations

from typing import Literal


def nft_decay(kind: Literal["none", "slow", "late"], update: int) -> float:
    """Return d of DiffusionNFT's old policy once `update` updates are done (1 after the first).

    The three published schedules (arXiv 2509.16117, decay types 0, 1, 2 of its code): `none` 0, the old policy is the
    current one; `slow` min(.001 u, .5); `late` 0 before u = 75, then min(.0075 (u - 75), .999)."""
    if update < 0:
        raise ValueError(f"update must be >= 0, got {update}")
    match kind:
        case "none":
            return 0.0
        case "slow":
            return min(0.001 * update, 0.5)
        case "late":
            return min(0.0075 * max(update - 75, 0), 0.999)
    raise ValueError(f"kind must be 'none', 'slow' or 'late', got {kind!r}")


def ema_decay(step: int, decay: float, warmup: Literal["ratio", "linear"] = "ratio") -> float:
    """Return d of the moving average at optimizer step `step` (from 0).

    min((1 + step) / (10 + step), decay), as flow_grpo warms it up, or min(.001 step, decay), as AWM does."""
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}")
    return min((1 + step) / (10 + step) if warmup == "ratio" else 0.001 * step, decay)


def ema_due(step: int, every: int) -> bool:
    """Return whether the moving average is updated after optimizer step `step` (from 0).

    It is where the step ends an interval of `every` steps."""
    if every < 1:
        raise ValueError(f"every must be >= 1, got {every}")
    return (step + 1) % every == 0


def linear(start: float, end: float, progress: float) -> float:
    """Interpolate from `start` at progress 0 to `end` at progress 1, exactly so at both ends."""
    if not 0 <= progress <= 1:
        raise ValueError(f"progress must be in [0, 1], got {progress}")
    return (1 - progress) * start + progress * end

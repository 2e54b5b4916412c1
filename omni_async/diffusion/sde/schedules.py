"""Computes sigma schedules: float32 tensors (N + 1,) on the CPU, decreasing from at most 1, with the final 0 appended.

Rollout and trainer must use exactly the same numbers as the model's own scheduler. So the arithmetic below keeps the
dtypes and the order of operations of diffusers' FlowMatchEulerDiscreteScheduler (numpy float32, Python floats as weak
scalars). The tests compare bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Sigmas = NDArray[Any]

_TRAIN_TIMESTEPS = 1000
OTHER_SCHEDULES = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")


def linear(num_inference_steps: int) -> Tensor:
    """Return 1, 1 - 1/N, ..., 1/N, 0."""
    return _append_zero(_linspace(num_inference_steps))


def static_shift(shift: float, num_inference_steps: int) -> Tensor:
    """Return sigma = shift t / (1 + (shift - 1) t) of diffusers' `set_timesteps(N)` (SD3, Wan2.2).

    N equally spaced t from 1 to the already shifted 1/1000, shifted again, and the final 0."""
    if not shift > 0:
        raise ValueError(f"shift must be > 0, got {shift}")
    _check_steps(num_inference_steps)
    ends = _shift_static(np.array([_TRAIN_TIMESTEPS, 1], dtype=np.float32) / _TRAIN_TIMESTEPS, shift)
    times = np.linspace(float(ends[0]) * _TRAIN_TIMESTEPS, float(ends[1]) * _TRAIN_TIMESTEPS, num_inference_steps)
    return _append_zero(_shift_static(times / _TRAIN_TIMESTEPS, shift))


def resolution_mu(image_seq_len: int, scheduler_config: Mapping[str, Any]) -> float:
    """Return the shift exponent of an image of `image_seq_len` latent tokens.

    Linear between (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift). Absent keys mean 256, 0.5, 4096,
    1.15, as in diffusers' Qwen-Image pipeline."""
    if image_seq_len < 1:
        raise ValueError(f"image_seq_len must be >= 1, got {image_seq_len}")
    base_len = _number(scheduler_config, "base_image_seq_len", 256)
    max_len = _number(scheduler_config, "max_image_seq_len", 4096)
    base_shift, max_shift = _number(scheduler_config, "base_shift", 0.5), _number(scheduler_config, "max_shift", 1.15)
    if base_len == max_len:
        raise ValueError(f"scheduler config: base_image_seq_len and max_image_seq_len must differ, both are {base_len}")
    slope = (max_shift - base_shift) / (max_len - base_len)
    return image_seq_len * slope + (base_shift - slope * base_len)


def scheduler_sigmas(
    num_inference_steps: int, image_seq_len: int, scheduler_config: Mapping[str, Any], *, torch_spacing: bool = False
) -> Tensor:
    """Return bit for bit the sigmas of a FlowMatchEulerDiscreteScheduler with this configuration.

    They are the sigmas in a diffusers pipeline (Qwen-Image, FLUX, Z-Image, ...), which passes 1, ..., 1/N and the shift
    of `image_seq_len` latent tokens to the scheduler.

    Args:
        num_inference_steps: N.
        image_seq_len: as in `resolution_mu`.
        scheduler_config: `scheduler/scheduler_config.json`; absent keys have diffusers' defaults (no dynamic shifting,
            shift 1, no terminal).
        torch_spacing: the pipeline spaces its sigmas with torch, in float32, and not with numpy (Z-Image).

    Raises:
        ValueError: an argument or option is out of range, or an option changes the schedule in a way not implemented
            here (Karras, exponential, beta, inverted)."""
    refuse_options(scheduler_config, *OTHER_SCHEDULES)
    mu = resolution_mu(image_seq_len, scheduler_config)
    sigmas = _linspace(num_inference_steps)
    if torch_spacing:
        sigmas = torch.linspace(1.0, 1 / num_inference_steps, num_inference_steps, dtype=torch.float32).numpy()
    if scheduler_config.get("use_dynamic_shifting", False):
        sigmas = _shift_dynamic(sigmas, mu, scheduler_config.get("time_shift_type", "exponential"))
    else:
        sigmas = _shift_static(sigmas, _number(scheduler_config, "shift", 1.0))
    if terminal := scheduler_config.get("shift_terminal"):
        sigmas = _stretch(sigmas, terminal)
    return _append_zero(sigmas)


def refuse_options(scheduler_config: Mapping[str, Any], *options: str) -> None:
    """Raise ValueError for an enabled option that changes the schedule in a way not implemented here."""
    for key in options:
        if scheduler_config.get(key):
            raise ValueError(f"scheduler config: {key}={scheduler_config[key]!r} is not supported")


def _check_steps(num_inference_steps: int) -> None:
    if num_inference_steps < 1:
        raise ValueError(f"num_inference_steps must be >= 1, got {num_inference_steps}")


def _linspace(num_inference_steps: int) -> Sigmas:
    _check_steps(num_inference_steps)
    return np.linspace(1.0, 1 / num_inference_steps, num_inference_steps).astype(np.float32)


def _shift_static(t: Sigmas, shift: float) -> Sigmas:
    return shift * t / (1 + (shift - 1) * t)


def _shift_dynamic(t: Sigmas, mu: float, time_shift_type: str) -> Sigmas:
    """Return m / (m + 1/t - 1) with m = e^mu (`exponential`) or mu (`linear`); see `resolution_mu`."""
    if time_shift_type not in ("exponential", "linear"):
        raise ValueError(f"time_shift_type must be 'exponential' or 'linear', got {time_shift_type!r}")
    factor = math.exp(mu) if time_shift_type == "exponential" else mu
    return factor / (factor + (1 / t - 1))


def _stretch(sigmas: Sigmas, terminal: float) -> Sigmas:
    """Stretch sigmas (N,) away from 1 so that the last is `terminal`; needs a last sigma < 1."""
    if not 0 < terminal < 1:
        raise ValueError(f"the terminal sigma must be in (0, 1), got {terminal}")
    remaining = 1 - sigmas
    if remaining[-1] == 0:
        raise ValueError(
            f"a schedule of {len(sigmas)} step(s) whose last sigma is 1 cannot be stretched to {terminal}; use more"
            " steps"
        )
    return 1 - remaining / (remaining[-1] / (1 - terminal))


def _append_zero(sigmas: Sigmas) -> Tensor:
    return torch.cat([torch.from_numpy(sigmas).to(torch.float32), torch.zeros(1)])


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"scheduler config: {key} must be a number, got {value!r}")
    return value

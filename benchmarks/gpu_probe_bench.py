"""Holds the measuring tools of every probe section: the device, a random Qwen-Image and its inputs, and a clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import omni_async  # noqa: F401  # before diffusers: see omni_async.compat

# isort: split
import torch
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.gpu_probe_run import Report, Settings, first_line
from benchmarks.stage_profile_measure import lap
from benchmarks.stage_profile_model import PUBLISHED, RandomQwenImage, tiny_architecture
from omni_async.training.device import rank_device
from omni_async.training.flops import peak_tflops

# The recipe's schedule, and the text lengths of stage_profile.
STEPS, PROMPT_TOKENS, NEGATIVE_TOKENS = 10, 64, 6


class Bench:
    """The tools of a section. `report` receives each of its readings.

    device: the current device. accelerated: whether it is not a CPU. rows: the batch sizes of a denoising step. spec:
    the recipe's resolution and guidance. sigmas (11,): the recipe's schedule."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings = settings
        self.device = rank_device(0) if settings.device is None else torch.device(settings.device)
        self.accelerated = self.device.type != "cpu"
        self.small = settings.small
        self.rows = (2, 1) if settings.small else (16, 4, 1)
        self.spec = self.guided_by(4.0)
        architecture = tiny_architecture() if settings.small else PUBLISHED
        sized = replace(architecture, transformer=architecture.transformer | {"num_layers": settings.layers})
        self.policy = RandomQwenImage(
            sized, self.device, prompt_tokens=PROMPT_TOKENS, negative_tokens=NEGATIVE_TOKENS, seed=0
        )
        self.sigmas = self.policy.sigmas(STEPS, self.spec)
        self._report = report
        self._generator = torch.Generator().manual_seed(0)

    def load_denoiser(self) -> dict[str, nn.Module]:
        """Return the components in bfloat16, all frozen."""
        components = dict(self.policy.load_components(torch.bfloat16))
        for component in components.values():
            component.requires_grad_(False)
        return components

    def guided_by(self, scale: float) -> QwenImageSampling:
        side = 32 if self.small else 512
        return QwenImageSampling(height=side, width=side, true_cfg_scale=scale)

    def note(self, name: str, **values: Any) -> None:
        """Report a reading of numbers and texts. A None does not appear in its line."""
        self._report({"name": name, **values})

    @contextmanager
    def arm(self, name: str) -> Iterator[None]:
        """Report a failed block, or one out of memory, as a reading; the section continues."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.note(name, failed="out of memory")
            gc.collect()
        except Exception as error:  # noqa: BLE001 - a compiler's or a kernel's, of any type: it is a reading
            self.note(name, failed=f"{type(error).__name__}: {first_line(error)}")
        if self.accelerated:
            torch.accelerator.empty_cache()

    def time(self, work: Callable[[], object], repeats: int = 3) -> tuple[float, float | None]:
        """Return the median seconds of `repeats` calls after a warm-up, and the most GiB the device held in them."""
        work()
        laps = [self.once(work) for _ in range(repeats)]
        return median(seconds for seconds, _ in laps), max((gib for _, gib in laps if gib is not None), default=None)

    def once(self, work: Callable[[], object]) -> tuple[float, float | None]:
        """Return the seconds of one call, and the most GiB the device held in it."""
        with lap(self.device) as taken:
            work()
        return taken.seconds, None if taken.peak_bytes is None else taken.peak_bytes / 2**30

    def rates(self, flops: float, seconds: float) -> dict[str, float | None]:
        """Return TFLOP/s, and the share of the card's bfloat16 peak; None for an unknown card."""
        tflops, peak = flops / seconds / 1e12, peak_tflops(self.device, torch.bfloat16)
        return {"tflops": tflops, "mfu": None if peak is None else tflops / peak}

    def synchronize(self) -> None:
        if self.accelerated:
            torch.accelerator.synchronize(self.device)

    def noise(self, *shape: int) -> Tensor:
        """Return standard normal float32 on the device; the same sequence on every device."""
        return torch.randn(shape, generator=self._generator).to(self.device)

    def latents(self, rows: int) -> Tensor:
        """Return noise (rows, T, C) of the spec, float32, on the device."""
        return self.noise(rows, *self.policy.latent_shape(self.spec))

    def conditioning(self, rows: int) -> TensorDict:
        """Return random prompts of the usual length, bfloat16, and masks without padding, on the device."""
        tensors = {}
        for branch, count in (("prompt", PROMPT_TOKENS), ("negative_prompt", NEGATIVE_TOKENS)):
            tensors[f"{branch}_embeds"] = self.noise(rows, count, self.policy.text_width).bfloat16()
            tensors[f"{branch}_mask"] = torch.ones(rows, count, dtype=torch.bool, device=self.device)
        return TensorDict(tensors, batch_size=[rows])

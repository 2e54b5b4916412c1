"""Trains on a lone rank: modules as they are, under autocast where `model.dtype` is not float32."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from omni_async.training.model import ModuleBackend


class PlainBackend(ModuleBackend):
    """The `TrainBackend` of a lone rank."""

    def computing(self) -> AbstractContextManager[object]:
        if self.dtype != torch.float32:
            return torch.autocast(self.device.type, dtype=self.dtype)
        return super().computing()

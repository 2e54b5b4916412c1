"""Sets one CPU thread, and makes a configuration for the tiny policy that a test changes by keyword."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from omni_async.config import with_spec
from omni_async.config.schema import Config


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """Returns `make_config(**{"trainer.micro_batch_size": 3})`: dotted keys over small defaults."""

    def make(**changes: Any) -> Config:
        raw: dict[str, Any] = {
            "model": {"pipeline": "qwen_image", "path": "0"},
            "data": {"prompts": "prompts.txt"},
            "rollout": {"group_size": 4, "sampling": {"height": 32, "width": 48}, "num_inference_steps": 5},
            "reward": {"scorers": [{"name": "ocr"}]},
            "algorithm": {"clip_range": 0.2, "correction": {"mode": "bypass"}},
            "trainer": {"optimizer": {"lr": 1e-2, "max_grad_norm": None}},
        }
        for key, value in changes.items():
            *path, last = key.split(".")
            section = raw
            for part in path:
                section = section.setdefault(part, {})
            section[last] = value
        return with_spec(msgspec.convert(raw, Config))

    return make

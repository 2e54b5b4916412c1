"""Tests what a rank sets up on its accelerator."""

from __future__ import annotations

import pytest
import torch

from omni_async.training.device import rank_device


@pytest.fixture
def settings(monkeypatch) -> list[str]:
    """Pretends two accelerators; returns what the allocator is set to."""
    found: list[str] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: found.append(f"device {index}"))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_a_rank_lets_segments_grow_before_it_takes_its_device(settings):
    assert rank_device(3) == torch.device("meta", 1)
    assert settings == ["expandable_segments:True", "device 1"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_environments_settings_of_the_allocator_stay(settings, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    rank_device(0)
    assert settings == ["device 0"]


def test_on_the_cpu_the_allocator_stays_as_it_is(settings, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert rank_device(0) == torch.device("cpu")
    assert settings == []

"""Tests the shim for mixed builds of torch and torchvision, and that it does nothing elsewhere."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError

import pytest

from omni_async import compat


@pytest.mark.parametrize(
    ("torch", "torchvision", "mixed"),
    [
        (None, None, False),
        ("2.13.0+cpu", None, False),
        (None, "0.28.0", False),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0+cu130", "0.28.0+cu130", False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cu130", True),
    ],
)
def test_only_mixed_builds_get_the_finder(monkeypatch, torch, torchvision, mixed):
    def installed(package: str) -> str:
        found = {"torch": torch, "torchvision": torchvision}.get(package)
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(compat._TolerantPathFinder, "torchvision_pending", False)
    monkeypatch.setattr(compat, "version", installed)
    compat.tolerate_cuda_builds_beside_cpu_torch()
    compat.tolerate_cuda_builds_beside_cpu_torch()
    assert sys.meta_path == [compat._TolerantPathFinder if mixed else PathFinder]
    assert mixed or not compat._TolerantPathFinder.torchvision_pending
    find = compat._TolerantPathFinder.find_spec
    assert [find(name) for name in ("torchaudio", "torchcodec", "no_such_package")] == [None] * 3
    found, ordinary = find("msgspec"), PathFinder.find_spec("msgspec")
    assert found is not None and ordinary is not None and found.origin == ordinary.origin

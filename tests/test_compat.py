"""Tests the shim for mixed builds: it makes imports work where something is mixed, and does nothing elsewhere."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version

import pytest

from omni_async import compat


@pytest.fixture
def finders(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Sets `sys.meta_path` as Python starts with it, for the test alone."""
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(compat._TolerantPathFinder, "torchvision_pending", False)
    return sys.meta_path


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def installed(package: str) -> str:
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(compat, "version", installed)


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"torch": "2.13.0+cpu"},
        {"torchvision": "0.28.0"},
        {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"},
        {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"},
        {"torch": "2.13.0", "torchvision": "0.28.0"},
    ],
)
def test_builds_that_match_or_are_absent_are_left_alone(monkeypatch, finders, versions):
    install(monkeypatch, **versions)
    compat.tolerate_cuda_builds_beside_cpu_torch()
    assert finders == [PathFinder]
    assert not compat._TolerantPathFinder.torchvision_pending


@pytest.mark.parametrize("torchvision", ["0.28.0", "0.28.0+cu130"])
def test_a_cuda_torchvision_beside_a_cpu_torch_gets_the_tolerant_finder_once(monkeypatch, finders, torchvision):
    install(monkeypatch, torch="2.13.0+cpu", torchvision=torchvision)
    compat.tolerate_cuda_builds_beside_cpu_torch()
    compat.tolerate_cuda_builds_beside_cpu_torch()
    assert finders == [compat._TolerantPathFinder]
    find = compat._TolerantPathFinder.find_spec
    assert [find(name) for name in ("torchaudio", "torchcodec", "no_such_package")] == [None] * 3
    found, ordinary = find("msgspec"), PathFinder.find_spec("msgspec")
    assert found is not None and ordinary is not None and found.origin == ordinary.origin


@pytest.mark.slow
def test_torchvision_and_diffusers_can_be_imported_here():
    program = (
        "import omni_async, torch, torchvision, diffusers\n"
        "from diffusers import QwenImagePipeline\n"
        "from torchvision.transforms import functional\n"
        "print(torch.__version__, torchvision.__version__, QwenImagePipeline.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    torch, torchvision, pipeline = done.stdout.split()
    assert torch == version("torch")
    assert torchvision.startswith(version("torchvision"))  # PyPI's build keeps its +cu130 to itself
    assert pipeline == "QwenImagePipeline"

"""Makes a CUDA build of torchvision, torchaudio or torchcodec harmless next to a CPU build of torch.

Registries carry one build of these packages, the CUDA one. Next to a CPU torch, torchvision dies on import because its
C++ library cannot register `torchvision::nms`; transformers, diffusers and vllm_omni then fail too. torchaudio and
torchcodec raise OSError wherever a library probes for them. The Python parts that omni_async needs work once the two
operator schemas exist and the other two packages look absent.

Nothing happens with a CUDA torch, or if the builds match. Nothing is written into site-packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

_UNLOADABLE = ("torchaudio", "torchcodec")
_PREPARED = Path(__file__).parent / "prepared"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _define_torchvision_schemas() -> None:
    import torch

    # The fragment must outlive the import, so the module that it serves keeps it.
    fragment: Any = torch.library.Library("torchvision", "FRAGMENT")
    fragment.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    fragment.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.omni_async_torchvision_fragment = fragment  # type: ignore[attr-defined]


class _TolerantPathFinder(PathFinder):
    """The path finder of a mixed installation.

    Unloadable packages look absent to it, and torchvision finds its schemas defined."""

    torchvision_pending = False

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _UNLOADABLE:
            return None
        if fullname == "torchvision.extension" and cls.torchvision_pending:
            cls.torchvision_pending = False
            _define_torchvision_schemas()
        return super().find_spec(fullname, path, target)


def is_mixed() -> bool:
    """Return whether this installation has a CUDA build of torchvision next to a CPU build of torch."""
    torchvision = _installed("torchvision")
    return "+cpu" in _installed("torch") and bool(torchvision) and "+cpu" not in torchvision


def child_environment() -> dict[str, str]:
    """Return variables with which Python processes that import nothing of ours tolerate a mixed installation."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(_PREPARED), *sys.path]))} if is_mixed() else {}


def tolerate_cuda_builds_beside_cpu_torch() -> None:
    """Replace the ordinary path finder in `sys.meta_path` if this installation is mixed.

    Calling it again changes nothing."""
    if is_mixed() and PathFinder in sys.meta_path:
        _TolerantPathFinder.torchvision_pending = True
        sys.meta_path[sys.meta_path.index(PathFinder)] = _TolerantPathFinder

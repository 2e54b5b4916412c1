"""omni_async: fully asynchronous RL post-training of diffusion, flow-matching and omni models.

The modules here are shared by packages: `types`, `media`, `store`, `worker`, `accelerator`, `compat`; `cli` is the
command line and `api` the Python API, whose names can be imported from here. Importing omni_async imports neither torch
nor Ray. It only prepares this process for a mixed install (see `compat`), so that every Ray worker and engine child
that imports omni_async is prepared too.
"""

from importlib import import_module
from typing import Any

from omni_async.compat import tolerate_cuda_builds_beside_cpu_torch

__version__ = "0.1.0"

# Name -> its module, which is imported when the name is used.
_API = {
    **dict.fromkeys(("train", "simulate", "score", "load_run", "Run", "RunFailed"), "omni_async.api"),
    "ConfigError": "omni_async.config",
    "Score": "omni_async.types",
}


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})


tolerate_cuda_builds_beside_cpu_torch()

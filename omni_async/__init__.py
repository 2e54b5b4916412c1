"""omni_async: fully asynchronous RL post-training of diffusion and flow-matching generators.

The modules here are shared by packages: `types`, `media`, `store`, `worker`, `accelerator`, `compat`; `cli` is the
command line. Importing omni_async imports neither torch nor Ray. It only prepares this process for a mixed install (see
`compat`), so that every Ray worker and engine child that imports omni_async is prepared too.
"""

from omni_async.compat import tolerate_cuda_builds_beside_cpu_torch

__version__ = "0.1.0"

tolerate_cuda_builds_beside_cpu_torch()

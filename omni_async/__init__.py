"""omni_async: fully asynchronous RL post-training of diffusion and flow-matching generators.

Beside `cli`, the command line, the modules here are what packages share: `types`, `media`, `families`, `policy`,
`store`, `worker`, `role_table`. Importing omni_async imports neither torch nor Ray: it only prepares this process for a
mixed install (see `compat`), so that every Ray worker and engine child that imports us gets that too.
"""

from omni_async.compat import tolerate_cuda_builds_beside_cpu_torch

__version__ = "0.1.0"

tolerate_cuda_builds_beside_cpu_torch()

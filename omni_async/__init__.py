"""omni_async: fully asynchronous RL post-training of diffusion and flow-matching generators.

Importing the package imports neither torch nor Ray. It only prepares the import system of this process for a mixed
install (see `omni_async.compat`), so that every Ray worker and engine child that imports us gets that too.
"""

from omni_async.compat import tolerate_cuda_builds_beside_cpu_torch

__version__ = "0.1.0"

tolerate_cuda_builds_beside_cpu_torch()

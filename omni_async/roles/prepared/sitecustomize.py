"""Prepares every Python process of a vLLM server for a mixed installation, see `omni_async.compat`.

vLLM starts processes that import nothing of ours. This folder is on their path where that matters, and nowhere else:
only there it takes the place of another `sitecustomize`."""

import omni_async  # noqa: F401 (importing it is what prepares)

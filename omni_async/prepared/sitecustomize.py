"""Prepares every Python process of a vLLM server for a mixed installation, see `omni_async.compat`.

vLLM starts processes that import nothing of ours. Only their Python path contains this folder, because there it
replaces any other `sitecustomize`."""

import omni_async  # noqa: F401 (importing it is what prepares)

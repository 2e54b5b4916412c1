"""Keeps transformers and diffusers from importing packages that are optional for them and that no role uses.

Both look once per process for packages such as scikit-learn, and import those they find: seconds of CPU time and
150 MB in every process that loads a model. `look_without_unused` makes them look while these packages are hidden.
Afterwards any other code imports the packages as usual. Both also list the files of all installed packages; one list
serves both.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from omni_async.plugins.hidden import hidden

# transformers uses them for assisted generation and losses of detectors, diffusers for beta schedules. peft and gguf
# stay visible: another package's family may load adapters or GGUF files through diffusers.
_UNUSED = ("scipy", "sklearn")


def look_without_unused() -> None:
    """Let transformers and diffusers look for optional packages, and find none that is unused.

    Call it in a worker's process, before anything else imports them or starts a thread. A package that is imported
    already stays visible."""
    with _one_list_of_packages(), hidden(_UNUSED):
        import diffusers.utils  # noqa: F401 (it looks on import)
        from transformers.utils import import_utils

        for package in _UNUSED:
            getattr(import_utils, f"is_{package}_available")()  # looks once, and keeps the answer


@contextmanager
def _one_list_of_packages() -> Iterator[None]:
    listed = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = cache(listed)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = listed

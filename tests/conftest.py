"""Before any test file imports diffusers: the package prepares the import system for a mixed install (`omni_async.compat`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import omni_async  # noqa: F401


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch in one thread, where a test file has imported it: small tensors gain nothing from more, and there are only two cores."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

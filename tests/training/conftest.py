"""Leaves no process group behind."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

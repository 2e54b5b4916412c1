"""Makes small weights of several kinds, packed."""

import pytest
import torch

from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket
from tests.support.packing import pack

Packed = tuple[WeightManifest, list[Bucket]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Makes tensors of five dtypes; the last is larger than a bucket, one is empty, one has no shape."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "flags": torch.tensor([True, False, True]),
        "blocks.0.bias": torch.randn(5, generator=generator).bfloat16(),
        "blocks.0.weight": torch.randn(8, 5, generator=generator),
        "scale": torch.tensor(3.0 + seed),
        "empty": torch.empty(0, 4),
        "steps": torch.arange(40, dtype=torch.int64),
    }


def make_packed(version: int = 3, seed: int = 0) -> Packed:
    return pack(some_tensors(seed).items(), version=version, payload="full", bucket_bytes=256)


@pytest.fixture
def packed() -> Packed:
    return make_packed()

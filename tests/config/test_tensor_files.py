"""Tests that a header of any content is read within bounds, or refused in one line."""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from omni_async.config.tensor_files import read_header


def file_of(header: bytes, more: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + more


def test_a_file_of_the_format_is_described() -> None:
    content = save({"a": np.zeros((2, 3), np.float32)}, {"version": "7"})
    header = read_header(io.BytesIO(content), len(content))
    assert header.metadata == {"version": "7"} and header.end == len(content)
    assert (header.tensors["a"].dtype, header.tensors["a"].shape) == ("F32", (2, 3))


def entry(**changes: Any) -> bytes:
    return json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} | changes}).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff" * 8, struct.pack("<Q", 2**63) + b"{}", file_of(b"{")[:-1]),
        *map(file_of, (b"[" * 100_000, b"[]", b"\xff\xfe", b'{"a": 1}', b'{"__metadata__": {"a": {}}}')),
        *(file_of(entry(shape=shape)) for shape in ([-1], [1] * 65, [10**400], [1e300])),
        *(file_of(entry(data_offsets=offsets)) for offsets in ([-8, 1], [0, 2**64], [True, 1])),
    ],
)
def test_any_other_file_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="is not a safetensors file") as refused:
        read_header(io.BytesIO(content), len(content))
    assert len(str(refused.value)) < 300


def test_a_header_of_many_values_takes_little_memory() -> None:
    content = file_of(b'{"a": [' + b"{}," * 1_000_000 + b"{}]}")
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 2000000 values"):
            read_header(io.BytesIO(content), len(content))
        assert tracemalloc.get_traced_memory()[1] < 2 * len(content)
    finally:
        tracemalloc.stop()


def test_a_header_without_an_end_is_not_read() -> None:
    class Sparse(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert size == 8
            return struct.pack("<Q", 2**26)

    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_header(Sparse(), 2**40)

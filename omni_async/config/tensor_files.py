"""Reads the headers of safetensors files from any source within bounds. Imports no torch.

The format: a little-endian u64 with the length of a JSON header, the header, and the tensors' bytes without gaps.
"""

from __future__ import annotations

from typing import Annotated, BinaryIO, NamedTuple

import msgspec

from omni_async.config.decoding import decode_json

LENGTH_BYTES = 8
_LARGEST = 2**25  # bytes of a header
_MOST = 2_000_000  # values in a header: a tensor has about eight
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor's entry. `data_offsets`: its begin and end, relative to the header's end."""

    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Size, _Size]


class Header(NamedTuple):
    """A file's content without the tensors' bytes, which range from `begin` to `end`."""

    metadata: dict[str, str]
    tensors: dict[str, StoredTensor]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + max((one.data_offsets[1] for one in self.tensors.values()), default=0)


def read_header(file: BinaryIO, size: int) -> Header:
    """Read the header of a file of `size` bytes, from the file's current position.

    Raises ValueError, whose text continues a sentence that begins with the file's name, if the file is cut off, its
    header is too large, or its format differs."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    begin = LENGTH_BYTES + length
    if not 0 < length <= _LARGEST or begin > size:
        raise ValueError("is not a safetensors file, or is truncated")
    try:
        raw = decode_json(file.read(length), dict[str, msgspec.Raw], _MOST)
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        tensors = {name: msgspec.json.decode(one, type=StoredTensor) for name, one in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"is not a safetensors file: {error}") from None
    return Header(metadata, tensors, begin)

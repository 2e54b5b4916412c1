"""Defines the messages about a published version of the weights."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Piece(msgspec.Struct, frozen=True):
    """A part of a tensor: `nbytes` bytes at `offset` of bucket number `bucket`."""

    bucket: int
    offset: int
    nbytes: int


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor: the concatenated bytes of `pieces`.

    It has several pieces if trainer ranks each hold rows of it, and none if it is empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class WeightManifest(msgspec.Struct, frozen=True):
    """The table of contents of one published version; `digest` is over names, dtypes, shapes and every byte."""

    version: int
    payload: Literal["full", "lora"]
    digest: str
    tensors: tuple[TensorSpec, ...]
    lora: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class WeightReport(msgspec.Struct, frozen=True):
    """An engine's answer after a start or a swap: the version and digest that it holds now.

    `uses` names the kernels that the engine chose when it started; empty if it has no choice."""

    engine: str
    version: int
    digest: str
    staged_s: float = 0.0
    swap_s: float = 0.0
    uses: str = ""

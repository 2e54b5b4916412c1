"""Tests that weights survive packing to the bit, and nothing damaged passes for whole."""

import re
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights import buckets
from omni_async.weights import digest as digest_module
from omni_async.weights.buckets import BucketSet, dtype_name, dtype_of, unpack
from omni_async.weights.digest import WeightError, combine, digest, item_bytes, tensor_pieces, verify
from omni_async.weights.snapshot import Snapshot
from tests.weights.conftest import DTYPES, some_tensors


def test_buckets_keep_their_size_and_a_large_tensor_gets_its_own(packed):
    manifest, buckets = packed
    [large] = manifest.tensors[-1].pieces
    assert [len(b) <= 256 or i == large.bucket for i, b in enumerate(buckets)] == [True] * len(buckets)
    assert (large.offset, large.nbytes) == (0, len(buckets[large.bucket])) == (0, 320)


@pytest.mark.filterwarnings("error")
def test_reading_is_without_copy_even_from_read_only_memory(packed):
    manifest, buckets = packed
    frozen = [np.frombuffer(bucket.tobytes(), np.uint8) for bucket in buckets]
    assert not frozen[0].flags.writeable
    read = dict(unpack(manifest, frozen))
    [piece] = manifest.tensors[2].pieces
    address = frozen[piece.bucket].__array_interface__["data"][0] + piece.offset
    assert read["blocks.0.weight"].data_ptr() == address
    del frozen
    assert torch.equal(read["steps"], torch.arange(40))


def test_a_piece_that_ends_within_an_element_is_found():
    pieces = (Piece(0, 0, 10), Piece(0, 10, 14))
    manifest = WeightManifest(3, "full", "", (TensorSpec("w", "float32", (6,), pieces),))
    with pytest.raises(WeightError, match="version 3: a piece of 'w' ends within an element of float32"):
        list(unpack(manifest, [np.zeros(24, np.uint8)]))


def test_flipped_bytes_and_truncated_or_missing_buckets_are_found(packed):
    manifest, buckets = packed
    with pytest.raises(WeightError, match="tensor 'steps' ends at byte 320 of bucket 2, which has 312 bytes"):
        verify(manifest, [*buckets[:2], buckets[2][:-8]])
    with pytest.raises(WeightError, match="which has 0 bytes"):
        list(unpack(manifest, buckets[:1]))
    buckets[0][1] ^= 1
    found = digest(manifest.tensors, buckets)
    with pytest.raises(WeightError, match=rf"version 3: expected digest {manifest.digest}, got {found}"):
        verify(manifest, buckets)


def test_a_digest_is_the_same_in_any_number_of_threads(packed, monkeypatch):
    manifest, buckets = packed
    named = [(s.name, s.dtype, s.shape, tensor_pieces(s, buckets)) for s in manifest.tensors]
    assert {combine(named, threads=threads) for threads in (1, 2, 5)} == {manifest.digest}
    asked = list[int]()
    monkeypatch.setattr(digest_module, "combine", lambda tensors, threads: asked.append(threads) or combine(tensors))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for worth in (1, 2**60):
        monkeypatch.setattr(digest_module, "_WORTH_THREADS", worth)
        verify(manifest, buckets)
    assert asked == [3, 1]


def test_a_name_appears_once_and_a_bucket_holds_at_least_a_byte():
    with pytest.raises(ValueError, match="'a' appears twice"):
        BucketSet(64).fill([("a", torch.ones(1)), ("a", torch.ones(1))])
    with pytest.raises(ValueError, match="bucket_bytes: expected >= 1, got 0"):
        BucketSet(0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_has_its_item_size(dtype):
    assert item_bytes(dtype_name(dtype)) == dtype.itemsize
    assert dtype_of(dtype_name(dtype)) is dtype


def contents(packed: BucketSet) -> dict[str, torch.Tensor]:
    snapshot = Snapshot(1, "full", packed.specs, packed.buckets)
    return {name: tensor.clone() for name, tensor in unpack(snapshot.manifest(), snapshot.buckets)}


def test_the_next_version_is_copied_over_the_last_one_in_memory_that_was_asked_for_once_and_the_copy_converts():
    asked: list[int] = []
    packed = BucketSet(256, lambda nbytes: asked.append(nbytes) or np.zeros(nbytes, np.uint8))
    for seed in (0, 1):
        packed.fill(some_tensors(seed).items())
        assert all(torch.equal(got, some_tensors(seed)[name]) for name, got in contents(packed).items())
    assert asked == [256, 256, 320]
    converted = BucketSet(256)
    converted.fill(some_tensors().items(), torch.bfloat16)
    assert all(torch.equal(got, some_tensors()[name].bfloat16()) for name, got in contents(converted).items())


def test_gathered_tensors_are_let_go_batch_by_batch(monkeypatch):
    monkeypatch.setattr(buckets, "_BATCH_BYTES", 1000)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(20):
            tensor = torch.full((100,), float(number))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            yield f"t{number}", tensor
            del tensor

    packed = BucketSet(4096)
    packed.fill(gathered())
    assert most <= 4  # of 400 bytes each: three fill a batch, and one more has been made
    values = [tensor.unique().tolist() for tensor in contents(packed).values()]
    assert values == [[float(number)] for number in range(20)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other": torch.ones(5)}, "tensor 1 of the weights: expected 'b' (2, 2), got 'other' (5,)"),
        ({"b": torch.ones(4)}, "tensor 1 of the weights: expected 'b' (2, 2), got 'b' (4,)"),
        ({}, "the weights had 2 tensors, and have 1"),
        ({"b": torch.ones(2, 2), "c": torch.ones(1)}, "tensor 2 of the weights: expected 'absent' (0,), got 'c' (1,)"),
    ],
)
def test_versions_are_of_the_same_tensors(change, message):
    packed, first = BucketSet(64), {"a": torch.ones(3)}
    packed.fill({**first, "b": torch.ones(2, 2)}.items())
    with pytest.raises(ValueError, match=re.escape(message)):
        packed.fill({**first, **change}.items())

"""Tests merged adapters, and that rows which ranks copy out apart are the whole tensors when joined, to the bit."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from omni_async.training.engine import copy_out
from omni_async.types import WeightManifest
from omni_async.weights.buckets import ALIGNMENT, BucketSet, digest_tensors, unpack
from omni_async.weights.digest import WeightError, verify
from omni_async.weights.lora import merged_weights
from omni_async.weights.shards import own_rows, whole
from omni_async.weights.snapshot import SharedRows, Snapshot
from tests.training.training_world import join, on_ranks
from tests.weights.conftest import DTYPES


def copied(tensors: dict[str, Tensor], ranks: int, bucket_bytes: int) -> list[SharedRows]:
    """Has every rank copy its rows of `tensors`, as FSDP2 deals them; rank 0 has all of what has no rows."""
    found = []
    for rank in range(ranks):
        buckets = BucketSet(bucket_bytes)
        rows = []
        for name, tensor in tensors.items():
            chunks = tensor.chunk(ranks) if tensor.dim() else [tensor]
            rows.append((name, chunks[rank] if rank < len(chunks) else tensor.reshape(-1)[:0]))
        buckets.fill(rows, whole=tensors)
        found.append(SharedRows(buckets.specs, buckets.buckets))
    return found


def joined(found: Sequence[SharedRows]) -> Snapshot:
    return asyncio.run(join(Snapshot(3, "full", found[0].tensors, found[0].references), found[1:]))


@st.composite
def tensor_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    tensors = {}
    for i in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        seed = draw(st.integers(0, 1000))
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)
        tensors[f"t{i}"] = tensor.T if len(shape) == 2 and draw(st.booleans()) else tensor
    return tensors


@settings(max_examples=80, deadline=None)
@given(tensors=tensor_dicts(), ranks=st.integers(1, 5), bucket_bytes=st.integers(1, 400))
def test_rows_of_any_number_of_ranks_are_the_tensors_they_were_cut_from(tensors, ranks, bucket_bytes):
    snapshot = joined(copied(tensors, ranks, bucket_bytes))
    manifest = snapshot.manifest()
    assert manifest.digest == digest_tensors(tensors.items()) == digest_tensors(reversed(tensors.items()))
    assert manifest.nbytes == snapshot.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert all(piece.offset % ALIGNMENT == 0 for spec in manifest.tensors for piece in spec.pieces)
    verify(manifest, snapshot.buckets)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest)
    received = dict(unpack(sent, snapshot.buckets))
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(received[name], tensor)


def test_rows_in_another_order_or_of_other_tensors_or_missing_are_found():
    first, second, third = copied({"a": torch.arange(12.0).view(6, 2), "b": torch.arange(5.0)}, 3, 64)
    whole = joined([first, second, third])
    assert joined([first, third, second]).manifest().digest != whole.manifest().digest
    unknown = [reference is None for reference in whole.references]  # a bucket of another rank is known, not rank 0's
    assert len(unknown) == len(whole.buckets) and unknown == sorted(unknown, reverse=True)
    assert sum(unknown) == len(first.references)
    with pytest.raises(WeightError, match=r"'a' of shape \(6, 2\) and dtype float32 cannot take 32 bytes"):
        joined([first, second]).manifest()
    with pytest.raises(WeightError, match="version 3: rank 1 copied other tensors out than rank 0"):
        joined([first, *copied({"b": torch.ones(4)}, 1, 64)])


def test_merging_adds_the_scaled_product_in_float32_and_leaves_the_rest():
    base = {"q.weight": torch.randn(6, 4).bfloat16(), "q.bias": torch.randn(6), "k.weight": torch.randn(6, 4)}
    adapters = {"q.lora_A.weight": torch.randn(2, 4), "q.lora_B.weight": torch.randn(6, 2)}
    merged = dict(merged_weights(base, adapters, scale=0.5))
    expected = (base["q.weight"].float() + 0.5 * adapters["q.lora_B.weight"] @ adapters["q.lora_A.weight"]).bfloat16()
    assert list(merged) == list(base)
    assert torch.equal(merged["q.weight"], expected)
    assert torch.equal(merged["k.weight"], base["k.weight"])


def test_an_adapter_that_fits_nothing_is_an_error():
    half = {"q.lora_A.weight": torch.ones(1, 1)}
    whole = {**half, "q.lora_B.weight": torch.ones(1, 1)}
    with pytest.raises(ValueError, match=r"lacks 'q\.lora_B\.weight'"):
        list(merged_weights({"q.weight": torch.ones(1, 1)}, half, 1.0))
    with pytest.raises(ValueError, match=r"does not have: q\.weight"):
        list(merged_weights({"k.weight": torch.ones(1, 1)}, whole, 1.0))


class Adapted(nn.Module):
    """A module with a weight that has adapters, one that has none, and fewer rows than ranks in its last."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {"weight": (37, 21), "lora_A": (4, 21), "lora_B": (37, 4), "bias": (37,), "scale": (3,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))


SCALE = 1.7


def parts(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the module's own weights and its adapters, by the names they are published under."""
    named = dict(module.named_parameters())
    adapters = {f"m.lora_{half}.weight": named.pop(f"lora_{half}") for half in "AB"}
    return {f"m.{name}": tensor for name, tensor in named.items()}, adapters


LAYOUTS = {"sharded": (4,), "replicated": (2, 2)}
WORLD = 4


def work(rank: int) -> dict[str, SharedRows]:
    found = {}
    for layout, shape in LAYOUTS.items():
        module = Adapted()
        fully_shard(module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]))
        base, adapters = parts(module)
        assert all(isinstance(tensor, DTensor) for tensor in base.values())
        if rank >= shape[-1]:  # the adapters are gathered without the ranks of further copies
            continue
        merging = (base, adapters, SCALE)
        jobs = {"float32": merging, "bfloat16": merging, "adapters": (adapters, {}, 1.0)}
        for what, weights in jobs.items():
            buckets = BucketSet(256)
            copy_out(buckets, *weights, getattr(torch, what, None), rank)
            found[f"{layout} {what}"] = SharedRows(buckets.specs, buckets.buckets)
    by_columns = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (WORLD,)), [Shard(1)])
    with pytest.raises(ValueError, match="only rows"):
        own_rows(by_columns, rank)
    return found


@pytest.mark.thorough
def test_what_ranks_copy_out_is_what_one_rank_merges_to_the_bit():
    ranks = on_ranks(WORLD, work)
    base, adapters = parts(Adapted())
    with torch.no_grad():
        merged = dict(merged_weights(base, adapters, SCALE))
    expected = {
        name: {key: t.to(getattr(torch, name)) for key, t in merged.items()} for name in ("float32", "bfloat16")
    }
    for layout, (*_, holders) in LAYOUTS.items():
        for what, tensors in {**expected, "adapters": adapters}.items():
            found = [rank.get(f"{layout} {what}") for rank in ranks]
            assert [rows is not None for rows in found] == [number < holders for number in range(WORLD)]
            assert joined(found[:holders]).manifest().digest == digest_tensors(tensors.items()), (layout, what)
            sizes = [sum(map(len, rows.references)) for rows in found[:holders]]
            assert max(sizes) < 1.2 * sum(sizes) / holders + 3 * 64, "every rank has its rows alone"


def test_what_is_on_one_rank_is_whole_and_shares_its_memory():
    tensor = torch.arange(6.0).view(3, 2)
    assert own_rows(tensor, 0).data_ptr() == whole(tensor).data_ptr() == tensor.data_ptr()
    assert own_rows(tensor, 1).shape == (0, 2)
    assert own_rows(torch.tensor(1.0), 1).numel() == 0

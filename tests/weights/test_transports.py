"""Tests versions as files: whole or refused, readable by others, no more of them than needed; and through the store."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omni_async.store import LocalStore
from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights.buckets import unpack
from omni_async.weights.digest import Bucket, WeightError, verify
from omni_async.weights.transport.base import TransportError, receive, sending
from omni_async.weights.transport.disk import DiskReceiver, DiskSender, VersionFile, read_version
from omni_async.weights.transport.object_store import ObjectStoreReceiver, ObjectStoreSender
from tests.weights.conftest import Packed, make_packed


def write_version(path: Path, manifest: WeightManifest, buckets: list[Bucket]) -> None:
    file = VersionFile(path, manifest)
    try:
        file.open()
        for bucket in buckets:
            file.write(bucket)
        file.seal()
    finally:
        file.discard()


@pytest.fixture
def file(tmp_path: Path, packed: Packed) -> Path:
    path = tmp_path / "version-000003.safetensors"
    write_version(path, *packed)
    return path


async def send(sender: DiskSender, packed: Packed) -> Packed:
    """Sends a version and returns what an engine gets."""
    async with sending(sender, *packed) as transfer:
        return await receive(DiskReceiver(), packed[0], transfer)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_what_arrives_is_what_was_sent_and_every_tensor_is_aligned_to_its_elements(tmp_path, packed):
    manifest, buckets = await send(DiskSender(tmp_path / "weights"), packed)
    verify(manifest, buckets)
    sent, received = dict(unpack(*packed)), dict(unpack(manifest, buckets))
    loaded = load_file(next((tmp_path / "weights").iterdir()))  # as other programs do
    assert received.keys() == sent.keys() == loaded.keys()
    for name, tensor in sent.items():
        for found in (received[name], loaded[name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found, tensor)
        assert received[name].data_ptr() % max(1, tensor.element_size()) == 0, name
    assert (manifest.version, manifest.digest) == (packed[0].version, packed[0].digest)


async def test_an_old_version_stays_where_it_is_read_or_the_new_one_did_not_arrive(tmp_path):
    sender = DiskSender(tmp_path)
    old = await send(sender, make_packed(1))
    with pytest.raises(LookupError):
        async with sending(sender, *make_packed(2)):
            raise LookupError("an engine died")
    assert names(tmp_path) == ["version-000001.safetensors", "version-000002.safetensors"]
    async with sending(sender, *make_packed(3, seed=1)):
        assert len(names(tmp_path)) == 3
    assert names(tmp_path) == ["version-000003.safetensors"]
    verify(*old)


async def test_what_a_trainer_that_was_killed_left_goes_when_the_first_version_has_arrived(tmp_path):
    for version in (40, 60):
        write_version(tmp_path / f"version-{version:06d}.safetensors", *make_packed(version))
    (tmp_path / "version-000060.tmp").write_bytes(b"cut off")
    others = ["best.safetensors", "notes.tmp", "version-000060.safetensors.mine", "version-new.safetensors"]
    for name in others:
        (tmp_path / name).touch()
    async with sending(DiskSender(tmp_path), *make_packed(50)):
        assert (tmp_path / "version-000060.safetensors").exists(), "it may be read until the new one has arrived"
    assert names(tmp_path) == sorted([*others, "version-000050.safetensors"])


async def test_a_version_is_not_written_through_a_link_or_into_what_is_no_folder(tmp_path, packed):
    (tmp_path / "kept").write_bytes(b"kept")
    for name in ("version-000003.tmp", "version-000003.safetensors"):
        (tmp_path / name).symlink_to("kept")
    await send(DiskSender(tmp_path), packed)
    assert (tmp_path / "kept").read_bytes() == b"kept" and not (tmp_path / "version-000003.safetensors").is_symlink()
    (tmp_path / "weights").write_text("in the way")
    said = r"weights\.transport: disk: version 3 cannot be written to .*version-000003\.safetensors: "
    with pytest.raises(TransportError, match=said):
        await send(DiskSender(tmp_path / "weights"), packed)


def test_a_version_that_cannot_be_written_whole_or_has_a_dtype_that_files_lack_leaves_nothing(tmp_path, packed):
    with pytest.raises(WeightError):
        write_version(tmp_path / "version", packed[0], packed[1][:1])
    manifest = WeightManifest(1, "full", "", (TensorSpec("t", "complex128", (1,), (Piece(0, 0, 16),)),))
    with pytest.raises(TransportError, match=r"have no complex128 \('t'\); use another transport"):
        write_version(tmp_path / "version", manifest, [np.zeros(16, np.uint8)])
    assert not list(tmp_path.iterdir())


LENGTH, TRUNCATED = r"has \d+ bytes, its header promises \d+", "not a safetensors file, or is truncated"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], LENGTH),
        (lambda data: data + b"\0", LENGTH),
        (lambda data: data[:100], TRUNCATED),
        (lambda data: data[:5], TRUNCATED),
        (lambda data: b"", "cannot be read"),
        (lambda data: b"\xff" * 200, TRUNCATED),
        (lambda data: b"\x08" + b"\0" * 7 + b"[1, 2]  ", "not a safetensors file: "),
        (lambda data: b"\x08" + b"\0" * 7 + b'{"a": 1}', "not a safetensors file: "),
        (lambda data: b"\x02" + b"\0" * 7 + b"{}", "holds version None"),
    ],
)
def test_a_truncated_or_foreign_file_is_refused(file, packed, damage, message):
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WeightError, match=message) as caught:
        read_version(file, packed[0])
    assert str(caught.value).startswith("weights of version 3") and str(file) in str(caught.value)


def test_a_missing_file_another_versions_and_one_with_a_flipped_byte_are_refused(file, packed):
    with pytest.raises(WeightError, match=r"weights of version 3: .*nowhere cannot be read"):
        read_version(file.with_name("nowhere"), packed[0])
    with pytest.raises(WeightError, match=r"weights of version 4 .*holds version 3 with digest"):
        read_version(file, msgspec.structs.replace(packed[0], version=4))
    with pytest.raises(WeightError, match="holds version 3 with digest"):
        read_version(file, make_packed(3, seed=1)[0])
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightError, match="expected digest"):
        verify(*read_version(file, packed[0]))


@pytest.mark.parametrize(
    ("true", "false", "message"),
    [
        (b'"dtype":"F32"', b'"dtype":"F99"', "unknown tensor dtype 'F99'"),
        (b'"dtype":"F32"', b'"dtype":"I32"', "expected digest"),
        (b'"shape":[8,5]', b'"shape":[8,6]', "cannot take 160 bytes"),
        (b'"shape":[8,5]', b'"shape":[5,8]', "expected digest"),
        (b'"flags"', b'"flage"', "expected digest"),
    ],
)
def test_a_header_that_lies_about_a_tensor_is_found(file, packed, true, false, message):
    data = file.read_bytes()
    assert true in data
    file.write_bytes(data.replace(true, false, 1))
    with pytest.raises(WeightError, match=message):
        verify(*read_version(file, packed[0]))


async def test_in_one_process_the_engine_reads_the_trainers_own_copy_and_a_bucket_that_is_gone_is_an_error(packed):
    class Forgetful(LocalStore):
        async def get(self, reference: Any) -> Any:
            raise LookupError("object is gone")

    store = LocalStore()
    sender, receiver = ObjectStoreSender(store), ObjectStoreReceiver(store)
    await sender.init({"rollout-0": receiver.init})
    async with sending(sender, *packed) as transfer:
        manifest, buckets = await receive(receiver, packed[0], transfer)
        with pytest.raises(LookupError, match="object is gone"):
            await receive(ObjectStoreReceiver(Forgetful()), packed[0], transfer)
    verify(manifest, buckets)
    assert manifest == packed[0]
    assert all(np.shares_memory(a, b) for a, b in zip(buckets, packed[1], strict=True))

"""Tests versions as files: whole or refused, readable by others, and no more of them than needed."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights.buckets import unpack
from omni_async.weights.digest import Bucket, WeightError, verify
from omni_async.weights.transport.base import TransportError, receive, sending
from omni_async.weights.transport.disk import DiskReceiver, DiskSender, VersionFile, read_version
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


def send(sender: DiskSender, packed: Packed) -> Packed:
    """Sends a version and returns what an engine gets."""

    async def main() -> Packed:
        async with sending(sender, *packed) as parcel:
            return await receive(DiskReceiver(), packed[0], parcel)

    return asyncio.run(main())


def test_what_arrives_is_what_was_sent(tmp_path, packed):
    manifest, buckets = send(DiskSender(tmp_path / "weights"), packed)
    verify(manifest, buckets)
    sent, received = dict(unpack(*packed)), dict(unpack(manifest, buckets))
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (received[name].dtype, received[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(received[name], tensor)
    assert (manifest.version, manifest.digest) == (packed[0].version, packed[0].digest)


def test_every_tensor_is_aligned_to_its_elements(file, packed):
    for name, tensor in unpack(*read_version(file, packed[0])):
        assert tensor.data_ptr() % max(1, tensor.element_size()) == 0, name


def test_other_programs_can_load_the_file(file, packed):
    loaded = load_file(file)
    assert loaded.keys() == {spec.name for spec in packed[0].tensors}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in unpack(*packed))


async def test_the_newest_version_stays_and_older_ones_go_when_it_has_arrived(tmp_path):
    sender, folder = DiskSender(tmp_path), tmp_path
    for version in (1, 2, 7):
        before = sorted(p.name for p in folder.iterdir())
        async with sending(sender, *make_packed(version)):
            assert sorted(p.name for p in folder.iterdir()) == [*before, f"version-{version:06d}.safetensors"]
        assert [p.name for p in folder.iterdir()] == [f"version-{version:06d}.safetensors"]


def test_an_engine_that_reads_an_old_version_keeps_its_bytes(tmp_path):
    sender = DiskSender(tmp_path)
    old = send(sender, make_packed(1))
    send(sender, make_packed(2, seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["version-000002.safetensors"]
    verify(*old)


def test_a_version_that_did_not_arrive_leaves_the_older_one_alone(tmp_path):
    async def main() -> None:
        sender = DiskSender(tmp_path)
        async with sending(sender, *make_packed(1)):
            pass
        with pytest.raises(LookupError):
            async with sending(sender, *make_packed(2)):
                raise LookupError("an engine died")

    asyncio.run(main())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version-000001.safetensors", "version-000002.safetensors"]


def test_what_a_trainer_that_was_killed_left_goes_when_the_first_version_has_arrived(tmp_path):
    for version in (40, 60):
        write_version(tmp_path / f"version-{version:06d}.safetensors", *make_packed(version))
    (tmp_path / "version-000060.tmp").write_bytes(b"cut off")
    others = ["best.safetensors", "notes.tmp", "version-000060.safetensors.mine", "version-new.safetensors"]
    for name in others:
        (tmp_path / name).touch()

    async def main() -> None:
        async with sending(DiskSender(tmp_path), *make_packed(50)):
            assert (tmp_path / "version-000060.safetensors").exists(), "it may be read until the new one has arrived"

    asyncio.run(main())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "version-000050.safetensors"])


def test_a_folder_that_cannot_be_written_is_named(tmp_path, packed):
    (tmp_path / "weights").write_text("in the way")
    with pytest.raises(
        TransportError,
        match=r"weights\.transport: disk: version 3 cannot be written to .*version-000003\.safetensors: ",
    ):
        send(DiskSender(tmp_path / "weights"), packed)


def test_a_version_that_cannot_be_written_whole_leaves_nothing(tmp_path, packed):
    manifest, buckets = packed
    with pytest.raises(WeightError):
        write_version(tmp_path / "version", manifest, buckets[:1])
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_files_do_not_have_is_refused(tmp_path):
    manifest = WeightManifest(1, "full", "", (TensorSpec("t", "complex128", (1,), (Piece(0, 0, 16),)),))
    with pytest.raises(TransportError, match=r"have no complex128 \('t'\); use another transport"):
        write_version(tmp_path / "version", manifest, [np.zeros(16, np.uint8)])


def test_the_digest_finds_a_flipped_byte(file, packed):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightError, match="expected digest"):
        verify(*read_version(file, packed[0]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], r"has \d+ bytes, its header promises \d+"),
        (lambda data: data + b"\0", r"has \d+ bytes, its header promises \d+"),
        (lambda data: data[:100], "not a safetensors file, or is truncated"),
        (lambda data: data[:5], "not a safetensors file, or is truncated"),
        (lambda data: b"", "cannot be read"),
        (lambda data: b"\xff" * 200, "not a safetensors file, or is truncated"),
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


def test_a_missing_file_is_refused(tmp_path, packed):
    with pytest.raises(WeightError, match=r"weights of version 3: .*nowhere cannot be read"):
        read_version(tmp_path / "nowhere", packed[0])


def test_another_versions_file_is_refused(file, packed):
    other = msgspec.structs.replace(packed[0], version=4)
    with pytest.raises(WeightError, match=r"weights of version 4 .*holds version 3 with digest"):
        read_version(file, other)
    with pytest.raises(WeightError, match="holds version 3 with digest"):
        read_version(file, make_packed(3, seed=1)[0])


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

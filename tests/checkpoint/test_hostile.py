"""Tests checkpoints from elsewhere: whatever is in one, it is usable or refused in one line, and nothing outside of it
is read."""

import os
import shutil
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from omni_async.checkpoint import CheckpointError, State, require_whole
from omni_async.checkpoint.folders import write_manifest
from omni_async.checkpoint.state import write_state
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.control.control_state import ControlState, LedgerState, Unfinished
from omni_async.types import Prompt, ReadyGroup, ReadySample, Score
from omni_async.version_spans import VersionSpans

SAMPLE = ReadySample("7/0", None, None, Score(0.5), VersionSpans.same(0, 2))
READY = ReadyGroup(7, Prompt(0, "x"), None, 0, (SAMPLE,))


def of_versions(*spans: tuple[int, int]) -> ReadyGroup:
    sample = msgspec.structs.replace(SAMPLE, step_versions=VersionSpans(spans))
    return msgspec.structs.replace(READY, samples=(sample,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint" / "tensors").mkdir(parents=True)
    save_file({"model.x": np.zeros(4, np.float32)}, tmp_path / "checkpoint" / "tensors" / "shard.safetensors")
    return with_state(tmp_path / "checkpoint", ControlState(version=3, next_group=9))


def with_state(folder: Path, control: ControlState, **engine: object) -> Path:
    write_state(folder, State(control, "p", "a", dict(engine)))
    return vouched(folder)


def vouched(folder: Path) -> Path:
    """Writes a manifest of what is there now."""
    (folder / "manifest.json").unlink(missing_ok=True)
    write_manifest(folder)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        require_whole(folder)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000
    return str(refused.value)


def name_in_manifest(folder: Path, name: str) -> None:
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes())
    manifest["files"] = {name: {"size": 0, "digest": "0"}, **manifest["files"]}
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))


@pytest.mark.parametrize("name", ["link", "tensors/link.safetensors", "groups", "tensors/more"])
@pytest.mark.parametrize("to", ["file", "folder", "nothing", "itself"])
@pytest.mark.parametrize("named", [False, True])
def test_a_link_is_refused_wherever_it_leads(folder, name, to, named):
    outside = folder.parent / "private"
    if to == "folder":
        outside.mkdir()
        save_file({"model.x": np.zeros(4, np.float32)}, outside / "shard.safetensors")
    elif to == "file":
        outside.write_bytes(b"")
    (folder / name).symlink_to(folder / name if to == "itself" else outside)
    if named:
        name_in_manifest(folder, name)
        name_in_manifest(folder, f"{name}/shard.safetensors")
    assert f"{folder / name} is neither a file nor a folder; a checkpoint has no links" in refusal(folder)


def test_tensors_behind_a_link_are_not_read_where_the_manifest_names_the_state_alone(folder):
    (folder.parent / "newest").symlink_to(folder)
    require_whole(folder.parent / "newest")  # to be reached by a link is fine
    (folder / "tensors").rename(folder.parent / "elsewhere")
    vouched(folder)
    (folder / "tensors").symlink_to(folder.parent / "elsewhere")
    assert f"{folder / 'tensors'} is neither a file nor a folder" in refusal(folder)
    with pytest.raises(CheckpointError, match="is neither a file nor a folder"):
        vouched(folder)


@pytest.mark.parametrize("name", ["pipe", "manifest.json", "state.json", "tensors/shard.safetensors"])
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "pipe":
        name_in_manifest(folder, "pipe")
    assert f"{folder / name} is neither a file nor a folder" in refusal(folder)


def test_a_manifest_without_an_end_is_not_read(folder):
    os.truncate(folder / "manifest.json", 2**40)
    assert "manifest.json is larger than 67108864 bytes" in refusal(folder)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").symlink_to("/dev/zero")
    assert "manifest.json is neither a file nor a folder" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["more.safetensors", "tensors/more.safetensors", "groups/000000007.safetensors", "tensors/extra", "x/a\nb"]
)
def test_a_file_that_the_manifest_does_not_name_is_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    save_file({"model.x": np.ones(4, np.float32)}, folder / name)
    assert "is not what was written: manifest.json does not name it" in refusal(folder)


@pytest.mark.parametrize("name", ["README", ".DS_Store", "tensors/.nfs00000001"])
def test_what_people_and_file_systems_leave_behind_costs_no_checkpoint(folder, name):
    (folder / "groups").mkdir()  # that nothing lies in
    (folder / name).write_text("not read")
    require_whole(folder)


@pytest.mark.parametrize(
    "name", ["a\0b", "x" * 300, "", ".", "a\ufffd", "CON/\u202e", "no/such/file", "../secret", "/etc/hostname"]
)
def test_a_name_that_is_no_file_of_the_checkpoint_is_refused(folder, name):
    (folder.parent / "secret").touch()
    name_in_manifest(folder, name)
    assert "which is no file of the checkpoint" in refusal(folder)


def test_a_manifest_that_vouches_for_nothing_is_refused(folder):
    (folder / "manifest.json").write_bytes(b'{"files": {}, "format": 1}')
    assert "manifest.json does not name it" in refusal(folder)
    shutil.rmtree(folder / "tensors")
    (folder / "state.json").unlink()
    assert "does not name state.json" in refusal(folder)


def a_tensor_at(start: int, end: int) -> bytes:
    header = b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [%d, %d]}}' % (start, end)
    return struct.pack("<Q", len(header)) + header + bytes(16)


OFFSETS = [(0, 10**12), (-4, 4), (4, 0), (0, 3), (2**64, 2**64 + 16)]
LENGTHS = [2**63 - 1, 2**64 - 1, 10**11, 99_000_000, 5]
SHARDS = {f"a tensor at {o}": a_tensor_at(*o) for o in OFFSETS}
SHARDS |= {f"a header of {length}": struct.pack("<Q", length) + b"{}" + bytes(100) for length in LENGTHS}


@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_a_shard_with_an_absurd_header_or_tensors_elsewhere_is_refused(folder, shard):
    (folder / "tensors" / "shard.safetensors").write_bytes(shard)
    assert "shard.safetensors is not a safetensors file" in refusal(vouched(folder))


@pytest.mark.parametrize(
    ("control", "why"),
    [
        (ControlState(version=-1), "version is -1"),
        (ControlState(version=10**400), "version is a number of 1329 bits"),
        (ControlState(next_group=10**13), "next_group is 10000000000000"),
        (ControlState(validated=-3), "validated is -3"),
        (ControlState(ledger=LedgerState(-1)), "admitted is -1"),
        (ControlState(ledger=LedgerState(1, {"trained": -5})), "trained is -5"),
        (ControlState(ledger=LedgerState(1, staleness={-1: 4})), "staleness is -1"),
        (ControlState(unfinished=(Unfinished(-4),)), "an unfinished group is -4"),
        (ControlState(unfinished=(Unfinished(4), Unfinished(4))), "a group stands there twice"),
        (ControlState(unfinished=(Unfinished(7),), ready=(READY,)), "a group stands there twice"),
        (ControlState(ready=(msgspec.structs.replace(READY, samples=()),)), "has no samples"),
        (ControlState(ready=(of_versions((-1, 2)),)), "step_versions is -1"),
        (ControlState(ready=(of_versions((0, 10**15)),)), "the number of step_versions is 10"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(folder, control, why):
    said = refusal(with_state(folder, control))
    assert "is of no run: " in said and why in said


def test_a_state_that_no_machine_can_count_or_read_is_refused(folder):
    said = refusal(with_state(folder, ControlState(), optimizer_steps=10**100))
    assert "engine.optimizer_steps is a number of" in said
    (folder / "state.json").write_bytes(b'{"engine": ' + b"[" * 10**6)
    assert "state.json cannot be read" in refusal(vouched(folder))


def test_a_ready_group_without_trajectories_is_refused(folder):
    assert "000000007.safetensors is missing" in refusal(with_state(folder, ControlState(ready=(READY,))))
    write_group(folder, 7, [np.zeros(3, np.float32)])
    require_whole(with_state(folder, ControlState(ready=(READY,))))


@pytest.mark.parametrize(
    "names", [("0/a", "0/a/b"), ("-1/array",), ("x/array",), ("9/array",), ("array",), ("0/",), ("0/array", "0/b")]
)
def test_trajectories_of_odd_names_are_refused(folder, names):
    write_group(folder, 1, [np.zeros(3, np.float32)])
    save_file({name: np.zeros(2, np.float32) for name in names}, folder / "groups" / "000000001.safetensors")
    try:
        (found,) = read_group(folder, 1, 1)
    except CheckpointError:
        return
    assert names in (("0/array", "0/b"), ("0/",)) and found is not None

"""Checkpoints from elsewhere: whatever is in one, it is usable or refused in one line, and nothing outside of it is read."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from omni_async.checkpoint import CheckpointError, State, require_whole
from omni_async.checkpoint.manifest import write_manifest
from omni_async.checkpoint.state import write_state
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.control.continuation import Continuation, LedgerState, Unfinished
from omni_async.types import Prompt, ReadyGroup, ReadySample, Score

SAMPLE = ReadySample("7/0", None, None, Score(0.5), (0, 0))
READY = ReadyGroup(7, Prompt(0, "x"), None, 0, (SAMPLE,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint" / "tensors").mkdir(parents=True)
    save_file({"model.x": np.zeros(4, np.float32)}, tmp_path / "checkpoint" / "tensors" / "shard.safetensors")
    return with_state(tmp_path / "checkpoint", Continuation(version=3, next_group=9))


def with_state(folder: Path, control: Continuation, **engine: object) -> Path:
    write_state(folder, State(control, "p", "a", dict(engine)))
    return vouched(folder)


def vouched(folder: Path) -> Path:
    """With a manifest of what lies there now."""
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


def test_a_link_out_of_the_folder_is_not_followed(folder: Path) -> None:
    (folder.parent / "private").write_bytes(b"")
    (folder / "link").symlink_to(folder.parent / "private")
    name_in_manifest(folder, "link")
    assert "names 'link', a link to what is outside the checkpoint" in refusal(folder)


def test_a_folder_that_is_a_link_leads_nowhere_either(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "x").write_bytes(b"")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    name_in_manifest(folder, "sub/x")
    assert "a link to what is outside the checkpoint" in refusal(folder)


def test_a_checkpoint_that_is_reached_by_a_link_is_fine(folder: Path) -> None:
    (folder.parent / "newest").symlink_to(folder)
    require_whole(folder.parent / "newest")


def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    name_in_manifest(folder, "pipe")
    assert "is no file" in refusal(folder)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "", ".", "a\ud800"[:1] + "\ufffd", "CON/\u202e", "no/such/file"])
def test_a_name_that_is_no_file_is_refused(folder: Path, name: str) -> None:
    name_in_manifest(folder, name)
    refusal(folder)


def test_a_manifest_that_vouches_for_nothing_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b'{"files": {}, "format": 1}')
    assert "does not name state.json" in refusal(folder)


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 10**11, 99_000_000, 5])
def test_a_shard_with_an_absurd_header_is_refused(folder: Path, length: int) -> None:
    (folder / "tensors" / "shard.safetensors").write_bytes(struct.pack("<Q", length) + b"{}" + bytes(100))
    vouched(folder)
    assert "shard.safetensors is not a safetensors file" in refusal(folder)


@pytest.mark.parametrize("offsets", [(0, 10**12), (-4, 4), (4, 0), (0, 3), (2**64, 2**64 + 16)])
def test_a_shard_whose_tensors_lie_elsewhere_is_refused(folder: Path, offsets: tuple[int, int]) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [%d, %d]}}' % offsets
    (folder / "tensors" / "shard.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    vouched(folder)
    assert "shard.safetensors is not a safetensors file" in refusal(folder)


@pytest.mark.parametrize(
    ("control", "why"),
    [
        (Continuation(version=-1), "version is -1"),
        (Continuation(version=10**400), "version is a number of 1329 bits"),
        (Continuation(next_group=10**13), "next_group is 10000000000000"),
        (Continuation(validated=-3), "validated is -3"),
        (Continuation(ledger=LedgerState(-1)), "admitted is -1"),
        (Continuation(ledger=LedgerState(1, {"trained": -5})), "trained is -5"),
        (Continuation(ledger=LedgerState(1, staleness={-1: 4})), "staleness is -1"),
        (Continuation(unfinished=(Unfinished(-4),)), "an unfinished group is -4"),
        (Continuation(unfinished=(Unfinished(4), Unfinished(4))), "a group stands there twice"),
        (Continuation(unfinished=(Unfinished(7),), ready=(READY,)), "a group stands there twice"),
        (Continuation(ready=(msgspec.structs.replace(READY, samples=()),)), "has no samples"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(folder: Path, control: Continuation, why: str) -> None:
    said = refusal(with_state(folder, control))
    assert "is of no run: " in said and why in said


def test_a_counter_that_no_machine_counts_to_is_refused(folder: Path) -> None:
    assert "engine.optimizer_steps is a number of" in refusal(with_state(folder, Continuation(), optimizer_steps=10**100))


def test_a_deeply_nested_state_is_refused(folder: Path) -> None:
    (folder / "state.json").write_bytes(b'{"engine": ' + b"[" * 10**6)
    vouched(folder)
    assert "state.json cannot be read" in refusal(folder)


def test_a_ready_group_without_trajectories_is_refused(folder: Path) -> None:
    assert "000000007.safetensors is missing" in refusal(with_state(folder, Continuation(ready=(READY,))))
    write_group(folder, 7, [np.zeros(3, np.float32)])
    require_whole(with_state(folder, Continuation(ready=(READY,))))


@pytest.mark.parametrize("names", [("0/a", "0/a/b"), ("-1/array",), ("x/array",), ("9/array",), ("array",), ("0/",), ("0/array", "0/b")])
def test_trajectories_of_odd_names_are_refused(folder: Path, names: tuple[str, ...]) -> None:
    write_group(folder, 1, [np.zeros(3, np.float32)])
    save_file({name: np.zeros(2, np.float32) for name in names}, folder / "groups" / "000000001.safetensors")
    try:
        (found,) = read_group(folder, 1, 1)
    except CheckpointError:
        return
    assert names in (("0/array", "0/b"), ("0/",)) and found is not None

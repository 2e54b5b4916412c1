"""Tests that whole checkpoints alone count, and that hostile ones are one line and lead nowhere."""

import os
import shutil
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors.numpy import save_file
from tensordict import TensorDict

from omni_async.checkpoint import CheckpointError, State, folder_name, read_state, require_whole
from omni_async.checkpoint.folders import begin, newest_first, partial, put_in_place, rotate, sync, write_manifest
from omni_async.checkpoint.state import write_state
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.control.control_state import ControlState, LedgerState, Unfinished
from omni_async.types import Prompt, ReadyGroup, ReadySample, Score, VersionSpans
from tests.support.patience import PATIENCE


def make(checkpoints: Path, version: int, next_group: int = 9) -> Path:
    folder = checkpoints / folder_name(version)
    written = partial(folder)
    shutil.rmtree(written, ignore_errors=True)
    (written / "tensors").mkdir(parents=True)
    save_file({"model.x": np.arange(200, dtype=np.uint8)}, written / "tensors" / "shard.safetensors")
    control = ControlState(version=version, next_group=next_group, unfinished=(Unfinished(7, 2),))
    write_state(written, State(control, "qwen_image", "flow_grpo"))
    write_manifest(written)
    put_in_place(folder)
    return folder


def names(found: Iterable[Path]) -> list[str]:
    return [path.name for path in found]


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink()))
    folder = make(tmp_path, 20)
    *before, last = synced
    written = partial(folder)
    assert {*before} == {written / path.relative_to(folder) for path in (folder, *folder.rglob("*"))}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert before.index(written / "manifest.json") == len(files) - 1, "after what it names"
    assert last == tmp_path, "its name is on the disk, too"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        require_whole(folder)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000
    return str(refused.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tensors/shard.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flipped", "gone"])
def test_damage_is_refused(tmp_path, name, damage):
    folder = make(tmp_path, 40)
    damage(folder / name)  # type: ignore[operator]
    assert "update-000040" in refusal(folder)


class Killed(BaseException):
    """Ends the process: nothing of it is done after this."""


@pytest.mark.parametrize("step", range(9))
def test_a_kill_while_one_replaces_another_leaves_a_whole_one(tmp_path, step, monkeypatch):
    make(tmp_path, 3)
    left = step

    def at_most(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", at_most(Path.rename))
        patch.setattr("omni_async.checkpoint.folders.sync", at_most(sync))
        patch.setattr(shutil, "rmtree", at_most(shutil.rmtree))
        with suppress(Killed):
            make(tmp_path, 3, next_group=11)
    assert left == 0
    (found,) = newest_first(tmp_path)
    require_whole(found)
    assert found.name == ("update-000003" if (tmp_path / "update-000003").exists() else ".update-000003.old")
    folder = make(tmp_path, 3, next_group=12)
    assert [*newest_first(tmp_path)] == [folder]
    assert names(tmp_path.iterdir()) == ["update-000003"]
    assert read_state(folder).control.next_group == 12


def test_the_new_one_is_on_disk_before_the_old_goes(tmp_path, monkeypatch):
    make(tmp_path, 3)
    done: list[str] = []
    remove, synced = shutil.rmtree, "omni_async.checkpoint.folders.sync"
    monkeypatch.setattr(synced, lambda folder: done.append(f"sync {sorted(names(folder.glob('*')))}"))
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: done.append(f"remove {path.name}") or remove(path, **how))
    make(tmp_path, 3)
    assert done[-2:] == ["sync ['.update-000003.old', 'update-000003']", "remove .update-000003.old"]


def test_the_newest_stay_and_nothing_unfinished(tmp_path):
    assert [*newest_first(tmp_path)] == []
    for version in (2, 1000000, 30):
        make(tmp_path, version)
    partial(tmp_path / folder_name(50)).mkdir()
    (tmp_path / "update-best").mkdir()  # made by a user
    assert names(newest_first(tmp_path)) == ["update-1000000", "update-000030", "update-000002"]
    (tmp_path / "update-000030").rename(tmp_path / ".update-000030.old")
    for keep, kept in ((2, ["update-1000000", ".update-000030.old"]), (1, ["update-1000000"])):
        rotate(tmp_path, keep, tmp_path / "update-1000000")
        assert names(newest_first(tmp_path)) == kept
        assert {*names(tmp_path.iterdir())} == {*kept, "update-best"}


@pytest.mark.parametrize(("keep", "kept"), [(1, [40]), (2, [40, 20]), (3, [40, 20, 10]), (9, [40, 20, 10])])
def test_later_ones_than_the_resumed_one_do_not_count(tmp_path, keep, kept):
    """Resumes from 20 because 60 and 80 are damaged."""
    for version in (10, 20, 60, 80):
        make(tmp_path, version)
    for version in (60, 80):
        cut(tmp_path / folder_name(version) / "manifest.json")
    rotate(tmp_path, keep, make(tmp_path, 40))
    assert names(newest_first(tmp_path)) == [folder_name(version) for version in kept]


@pytest.mark.parametrize("kind", ["update-000020", ".update-000020.old", ".update-000020.partial"])
def test_no_link_leads_a_writer_out_of_the_folder(tmp_path, kind):
    checkpoints, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    before = make(elsewhere, 20)
    checkpoints.mkdir()
    (checkpoints / kind).symlink_to(before)
    assert [*newest_first(checkpoints)] == []
    unfinished = begin(checkpoints / "update-000020")
    assert unfinished.is_dir() and not unfinished.is_symlink()
    rotate(checkpoints, 1, make(checkpoints, 20))
    assert names(checkpoints.iterdir()) == ["update-000020"] and not (checkpoints / "update-000020").is_symlink()
    require_whole(before)


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("name", ["update-000002", ".update-000002.old", ".update-000002.partial"])
def test_a_pipe_in_the_place_of_a_checkpoint_is_replaced(tmp_path, name):
    os.mkfifo(tmp_path / name)
    folder = tmp_path / "update-000002"
    (begin(folder) / "content").touch()
    put_in_place(folder)
    assert [*tmp_path.iterdir()] == [folder] and (folder / "content").is_file()


def test_checkpoints_that_are_a_link_are_another_runs(tmp_path):
    before = make(tmp_path / "another", 20)
    (tmp_path / "checkpoints").symlink_to("another")
    assert [*newest_first(tmp_path / "checkpoints")] == []
    with pytest.raises(OSError, match="it is a link"):
        begin(tmp_path / "checkpoints" / "update-000020")
    require_whole(before)


def test_a_state_outside_or_without_an_end_is_not_read(tmp_path):
    state = make(tmp_path, 20) / "state.json"
    state.rename(tmp_path / "state.json")
    state.symlink_to(tmp_path / "state.json")
    with pytest.raises(CheckpointError, match="leads out of its folder"):
        read_state(state.parent)
    state.unlink()
    state.touch()
    os.truncate(state, 2**40)
    with pytest.raises(CheckpointError, match="is larger than 134217728 bytes"):
        read_state(state.parent)
    state.write_bytes(b'{"format": 5, "engine": {"a": [' + b"[]," * 3_000_000 + b"[]]}}")
    with pytest.raises(CheckpointError, match="more than 3000000 values"):
        read_state(state.parent)


def test_a_state_that_no_reader_would_accept_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("omni_async.checkpoint.state._MOST_VALUES", 100)
    state = State(ControlState(version=3, rewards=(1.0,) * 3), "qwen_image", "flow_grpo")
    write_state(tmp_path, state)
    read_state(tmp_path)
    with pytest.raises(OSError, match="values, and 100 can be read"):
        write_state(tmp_path, replace(state, control=replace(state.control, rewards=(1.0,) * 100)))


def state_of(control: str) -> bytes:
    return f'{{"format": 5, "control": {control}, "pipeline": "a", "algorithm": "b"}}'.encode()


NUMBERS = ("1e300", "-1e160", "1e400", "1" * 400, "true", "NaN")
SCORES = ('"rewards": [%s]', '"rounds": [{"version": 1, "reward": 1.0, "parts": {"a": %s}}]')


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (b"{}", "has format 1, this version reads 5"),
        (b'{"format": 4}', "has format 4, this version reads 5"),
        (b'{"format": 5}', "missing required field"),
        (state_of('{"version": "2"}'), "Expected `int`"),
        *((state_of(f'{{"version": 3, {where % number}}}'), "") for where in SCORES for number in NUMBERS),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (None, r"is not a checkpoint folder: it has no state\.json"),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, state, why):
    if state is not None:
        (tmp_path / "state.json").write_bytes(state)
    with pytest.raises(CheckpointError, match=why) as refused:
        read_state(tmp_path)
    assert len(str(refused.value)) < 700


@settings(max_examples=50, deadline=None)
@given(
    version=st.integers(0, 10**6),
    validated=st.sampled_from([None, -1, 7]),  # -1 before the first round is over, of the version before the first
    reasons=st.dictionaries(st.text(max_size=20), st.integers(0, 9), max_size=3),
    staleness=st.dictionaries(st.integers(0, 9), st.integers(0, 99), max_size=3),
    groups=st.lists(st.integers(0, 10**6), unique=True, max_size=5),
)
def test_the_state_comes_back_as_it_was(tmp_path_factory, version, validated, reasons, staleness, groups):
    folder = tmp_path_factory.mktemp("state")
    ledger = LedgerState(3, {"trained": 3}, reasons, staleness)
    control = ControlState(version, 5, 7, validated, ledger, tuple(map(Unfinished, groups)))
    state = State(control, "p", "a", {"optimizer_steps": 3}, {"x": [1.5]})
    write_state(folder, state)
    assert read_state(folder) == state


def test_arrays_come_back_as_they_were(tmp_path):
    """Covers an emulated trajectory, which has no names."""
    before = [np.arange(5, dtype=np.uint8), np.arange(12.0, dtype=np.float32).reshape(3, 4).T]
    write_group(tmp_path, 12, before)
    after = read_group(tmp_path, 12, 2)
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    with pytest.raises(CheckpointError, match="does not hold 3 samples"):
        read_group(tmp_path, 12, 3)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_group(tmp_path, 13, 2)


def test_tensors_that_are_views_come_back_as_they_were(tmp_path):
    values = torch.arange(12.0).reshape(3, 4)
    views = {"transposed": values.T, "every_other": values[:, ::2], "expanded": torch.ones(1).expand(5)}
    calls = {
        f"call{k}": TensorDict({"latents": values + k, "conditioning": TensorDict({"x": views["expanded"]}, [])}, [])
        for k in (0, 1)
    }
    before = [TensorDict({**views, "shared": values}, []), TensorDict({"shared": values}, []), TensorDict(calls, [])]
    write_group(tmp_path, 1, before)
    for one, other in zip(before, read_group(tmp_path, 1, 3), strict=True):
        assert (one == other).all() and sorted(one.keys()) == sorted(other.keys())


SAMPLE = ReadySample("7/0", None, Score(0.5), VersionSpans.same(0, 2))
READY = ReadyGroup(7, Prompt(0, "x"), None, 0, (SAMPLE,))


def of_versions(*spans: tuple[int, int]) -> ReadyGroup:
    sample = replace(SAMPLE, step_versions=VersionSpans(spans))
    return replace(READY, samples=(sample,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "checkpoints", 3)


def with_state(folder: Path, control: ControlState, **engine: object) -> Path:
    write_state(folder, State(control, "p", "a", dict(engine)))
    return vouched(folder)


def vouched(folder: Path) -> Path:
    """Writes a manifest of what is there now."""
    (folder / "manifest.json").unlink(missing_ok=True)
    write_manifest(folder)
    return folder


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


def test_tensors_behind_a_link_are_not_read(folder):
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


def test_a_manifest_without_an_end_or_an_entry_is_refused(folder):
    manifest = folder / "manifest.json"
    os.truncate(manifest, 2**40)
    assert "manifest.json is larger than 67108864 bytes" in refusal(folder)
    manifest.unlink()
    manifest.symlink_to("/dev/zero")
    assert "manifest.json is neither a file nor a folder" in refusal(folder)
    manifest.unlink()
    manifest.write_bytes(b'{"files": {}, "format": 1}')
    assert "manifest.json does not name it" in refusal(folder)
    shutil.rmtree(folder / "tensors")
    (folder / "state.json").unlink()
    assert "does not name state.json" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["more.safetensors", "tensors/more.safetensors", "groups/000000007.safetensors", "tensors/extra", "x/a\nb"]
)
def test_a_file_that_the_manifest_does_not_name_is_refused(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    save_file({"model.x": np.ones(4, np.float32)}, folder / name)
    assert "is not what was written: manifest.json does not name it" in refusal(folder)


@pytest.mark.parametrize("name", ["README", ".DS_Store", "tensors/.nfs00000001"])
def test_leftovers_of_people_and_file_systems_are_fine(folder, name):
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


def a_tensor_at(start: int, end: int) -> bytes:
    header = b'{"x": {"dtype": "F32", "shape": [4], "data_offsets": [%d, %d]}}' % (start, end)
    return struct.pack("<Q", len(header)) + header + bytes(16)


OFFSETS = [(0, 10**12), (-4, 4), (4, 0), (0, 3), (2**64, 2**64 + 16)]
LENGTHS = [2**63 - 1, 2**64 - 1, 10**11, 99_000_000, 5]


def test_an_absurd_header_is_refused(folder):
    headers = [struct.pack("<Q", length) + b"{}" + bytes(100) for length in LENGTHS]
    for shard in (*headers, *(a_tensor_at(*offsets) for offsets in OFFSETS)):
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
        (ControlState(ready=(replace(READY, samples=()),)), "has no samples"),
        (ControlState(ready=(of_versions((-1, 2)),)), "step_versions is -1"),
        (ControlState(ready=(of_versions((0, 10**15)),)), "the number of step_versions is 10"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(folder, control, why):
    said = refusal(with_state(folder, control))
    assert "is of no run: " in said and why in said


def test_a_state_that_no_machine_can_count_or_read_is_refused(folder):
    assert "engine.optimizer_steps is a number of" in refusal(
        with_state(folder, ControlState(), optimizer_steps=10**100)
    )
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

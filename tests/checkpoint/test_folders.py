"""Which checkpoints count: whole ones, newest first; what is wrong with the others is said in one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from omni_async.checkpoint import CheckpointError, State, folder_name, newest_whole, read_state, require_whole
from omni_async.checkpoint.folders import finish, newest_first, partial, rotate
from omni_async.checkpoint.manifest import write_manifest
from omni_async.checkpoint.state import write_state
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.control.continuation import Continuation, LedgerState, Unfinished


def make(checkpoints: Path, version: int) -> Path:
    folder = checkpoints / folder_name(version)
    place = partial(folder)
    (place / "tensors").mkdir(parents=True)
    save_file({"model.x": np.arange(200, dtype=np.uint8)}, place / "tensors" / "shard.safetensors")
    write_state(place, State(Continuation(version=version, next_group=9, unfinished=(Unfinished(7, 2),)), "qwen_image", "flow_grpo"))
    write_manifest(place)
    finish(folder)
    return folder


def test_what_was_written_is_whole_and_says_what_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path, 20)
    require_whole(folder)
    state = read_state(folder)
    assert state.control == Continuation(version=20, next_group=9, unfinished=(Unfinished(7, 2),))
    assert [path.name for path in tmp_path.iterdir()] == ["update-000020"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tensors/shard.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flipped", "gone"])
def test_the_newest_whole_one_counts_and_why_others_do_not_is_said(tmp_path: Path, name: str, damage: object) -> None:
    good, bad = make(tmp_path, 20), make(tmp_path, 40)
    damage(bad / name)  # type: ignore[operator]
    refused: list[str] = []
    assert newest_whole(tmp_path, refused.append) == good
    (why,) = refused
    assert "update-000040" in why and "\n" not in why


def test_no_whole_one_is_none(tmp_path: Path) -> None:
    assert newest_whole(tmp_path, pytest.fail) is None


def test_a_checkpoint_of_the_same_version_is_replaced(tmp_path: Path) -> None:
    make(tmp_path, 3)
    assert make(tmp_path, 3).is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["update-000003"]


def test_only_the_newest_stay_and_nothing_unfinished(tmp_path: Path) -> None:
    for version in (2, 1000000, 30):
        make(tmp_path, version)
    partial(tmp_path / folder_name(50)).mkdir()
    (tmp_path / "update-best").mkdir()  # somebody's own
    rotate(tmp_path, 2)
    assert [path.name for path in newest_first(tmp_path)] == ["update-1000000", "update-000030"]
    assert {path.name for path in tmp_path.iterdir()} == {"update-1000000", "update-000030", "update-best"}


def test_a_manifest_leads_nowhere_else(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    for name in ("../secret", str(secret)):
        manifest = {"files": {name: {"size": 1, "digest": "0"}}, "format": 1}
        (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
        with pytest.raises(CheckpointError, match="which is outside the checkpoint"):
            require_whole(folder)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (b"{}", "has format 1, this version reads 2"),
        (b'{"format": 2}', "missing required field"),
        (b'{"format": 2, "control": {"version": "2"}, "pipeline": "a", "algorithm": "b"}', "Expected `int`"),
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path: Path, state: bytes, why: str) -> None:
    (tmp_path / "state.json").write_bytes(state)
    with pytest.raises(CheckpointError, match=why):
        read_state(tmp_path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["state.json", "manifest.json"]),
    content=st.binary(max_size=200) | st.from_regex(rb'\{"(files|format|control)": .{0,80}\}'),
)
def test_any_bytes_are_a_checkpoint_or_a_refusal(tmp_path: Path, name: str, content: bytes) -> None:
    folder = tmp_path / "fuzzed"
    if not folder.exists():
        make(tmp_path, 1).rename(folder)
    before = (folder / name).read_bytes()
    try:
        (folder / name).write_bytes(content)
        with pytest.raises(CheckpointError):
            require_whole(folder)
    finally:
        (folder / name).write_bytes(before)


@settings(max_examples=50, deadline=None)
@given(
    version=st.integers(0, 10**6),
    reasons=st.dictionaries(st.text(max_size=20), st.integers(0, 9), max_size=3),
    staleness=st.dictionaries(st.integers(0, 9), st.integers(0, 99), max_size=3),
    groups=st.lists(st.integers(0, 10**6), unique=True, max_size=5),
)
def test_the_state_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, version: int, reasons: dict[str, int], staleness: dict[int, int], groups: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("state")
    ledger = LedgerState(3, {"trained": 3}, reasons, staleness)
    state = State(Continuation(version, 5, 7, None, ledger, tuple(map(Unfinished, groups))), "p", "a", {"optimizer_steps": 3}, {"x": [1.5]})
    write_state(folder, state)
    assert read_state(folder) == state


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    """An emulated trajectory has no names."""
    before = [np.arange(5, dtype=np.uint8), np.zeros((2, 3), np.float32)]
    write_group(tmp_path, 12, before)
    after = read_group(tmp_path, 12, 2)
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    with pytest.raises(CheckpointError, match="does not hold 3 samples"):
        read_group(tmp_path, 12, 3)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_group(tmp_path, 13, 2)


def test_a_checkpoint_made_before_the_first_validation_round_was_over_counts(tmp_path: Path) -> None:
    """What is validated then is the version before the first."""
    folder = tmp_path / folder_name(3)
    place = partial(folder)
    place.mkdir(parents=True)
    write_state(place, State(Continuation(version=3, next_group=9, validated=-1), "qwen_image", "flow_grpo"))
    write_manifest(place)
    finish(folder)
    require_whole(folder)
    assert read_state(folder).control.validated == -1

"""Tests that a changed checkpoint is usable or refused in one line, that the run goes on with the one before it, and
that nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from foreign import DEEP, altered, changed, few, listing
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from omni_async.checkpoint import CheckpointError, State, folder_name, require_whole
from omni_async.checkpoint.folders import write_manifest
from omni_async.checkpoint.state import read_state, write_state
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.config import Config, ConfigError, load
from omni_async.control.control_state import ControlState, LedgerState, Unfinished
from omni_async.preflight.resume import find_resume_point
from omni_async.types import Prompt, ReadyGroup, ReadySample, Score
from omni_async.version_spans import VersionSpans
from tests.e2e.emulation import write_recipe
from tests.runtime.runtime_world import write_ledger


def make(folder: Path, version: int, pipeline: str, ledger: LedgerState) -> None:
    """Writes a checkpoint as an emulated run does: two groups unfinished, one ready with its trajectories."""
    (folder / "tensors").mkdir(parents=True)
    save_file({"model.x": np.zeros(4, np.float32)}, folder / "tensors" / "shard.safetensors")
    samples = tuple(ReadySample(f"7/{n}", None, None, Score(0.5), VersionSpans.same(version, 2)) for n in range(2))
    write_group(folder, 7, [np.zeros(3, np.uint8)] * 2)
    ready = (ReadyGroup(7, Prompt(0, "x"), None, version, samples),)
    write_state(
        folder,
        State(ControlState(version, 9, 36, None, ledger, (Unfinished(5), Unfinished(6)), ready), pipeline, "flow_grpo"),
    )
    write_manifest(folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """Makes a run that was killed, with a checkpoint that stays intact and one that is changed."""
    recipe = write_recipe(tmp_path_factory.mktemp("fuzz"))
    run = recipe.parent / "runs" / "emulated-20270101-000000"
    config = load(recipe, [f"checkpoint.resume={run}"])
    run.mkdir(parents=True)
    ledger = write_ledger(run, 4)[-1]
    for version in (1, 2):
        make(run / "checkpoints" / folder_name(version), version, config.model.pipeline, ledger)
    shutil.copytree(run / "checkpoints" / folder_name(2), recipe.parent / "whole")
    return config, run


def _spoil(folder: Path, data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(["manifest.json", "state.json", "tensors/shard.safetensors", "groups/000000007.safetensors"])
    )
    content = (folder / name).read_bytes()
    if name.endswith(".json"):
        (folder / name).write_bytes(
            data.draw(altered(msgspec.json.decode(content)).map(msgspec.json.encode) | changed(content) | st.just(DEEP))
        )
    else:
        (folder / name).write_bytes(data.draw(changed(content) | st.binary(max_size=40)))
    if name != "manifest.json" and data.draw(st.booleans()):  # a deliberate change
        (folder / "manifest.json").unlink()
        write_manifest(folder)


@few(150)
@given(data=st.data())
def test_a_spoilt_checkpoint_is_used_or_passed_over(job: tuple[Config, Path], data: st.DataObject) -> None:
    config, run = job
    top = run.parent.parent
    good, spoilt = (run / "checkpoints" / folder_name(version) for version in (1, 2))
    shutil.rmtree(spoilt)
    shutil.copytree(top / "whole", spoilt)
    _spoil(spoilt, data)
    before = listing(top)
    candidates = [good, spoilt]
    try:
        require_whole(spoilt)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        candidates.remove(spoilt)
    try:
        point = find_resume_point(config)
    except ConfigError as error:
        assert "\n" not in str(error)
        raise AssertionError("there is a whole one") from error
    assert point is not None and point.folder in candidates
    if spoilt in candidates:
        _take_up(spoilt)
    assert listing(top) == before


def _take_up(folder: Path) -> None:
    require_whole(folder)
    for group in read_state(folder).control.ready:
        try:
            assert len(read_group(folder, group.group, len(group.samples))) == len(group.samples)
        except CheckpointError as error:
            assert str(error)

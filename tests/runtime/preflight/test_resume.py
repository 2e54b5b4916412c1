"""Tests where a run goes on: which folder, which checkpoint, and what is logged of those that cannot be used."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from omni_async.checkpoint.folders import folder_name, partial, put_in_place, write_manifest
from omni_async.checkpoint.state import State, made_with, write_state
from omni_async.checkpoint.statement import stated
from omni_async.checkpoint.trajectories import write_group
from omni_async.config import Config, ConfigError
from omni_async.control.control_state import ControlState
from omni_async.records.write.rundir import RunDirectory, RunDirectoryError
from omni_async.runtime.preflight.check import preflight
from omni_async.runtime.preflight.resume import ResumePoint, find_resume_point, newest_of_run
from omni_async.types import Prompt, ReadyGroup, ReadySample, Score, VersionSpans
from tests.runtime.runtime_world import write_ledger, write_world


def recipe(folder: Path, resume: str | None = "auto", **sections: object) -> Config:
    return write_world(folder, checkpoint={"resume": resume}, **sections)


def run_of(config: Config, stamp: str, *versions: int, status: str | None = None, algorithm: str = "flow_grpo") -> Path:
    run = Path(config.run.dir) / f"{config.run.name}-{stamp}"
    (run / "checkpoints").mkdir(parents=True)
    for version in versions:
        control = ControlState(version=version, next_group=2 * version)
        checkpoint_of(run, State(control, config.model.pipeline, algorithm, statement=stated(config, {})))
    if status is not None:
        (run / "summary.json").write_bytes(msgspec.json.encode({"status": status}))
    return run


def checkpoint_of(run: Path, state: State, groups: dict[int, list[Any]] | None = None, emulated: bool = False) -> Path:
    """Writes a checkpoint. A trained one says how many optimizer steps its weights took; `emulated`: there are none."""
    if not (state.engine or emulated):
        state = replace(state, engine={"optimizer_steps": state.version})
    folder = run / "checkpoints" / folder_name(state.version)
    partial(folder).mkdir()
    for group, trajectories in (groups or {}).items():
        write_group(partial(folder), group, trajectories)
    write_state(partial(folder), state)
    write_manifest(partial(folder))
    put_in_place(folder)
    return folder


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Holds the run's lock, as a run that is under way does."""
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        find_resume_point(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def found(config: Config, passed: list[str] | None = None) -> ResumePoint:
    """Returns where the run goes on, which must be somewhere."""
    point = find_resume_point(config, passed)
    assert point is not None
    return point


def test_auto_goes_on_with_the_newest_run_of_this_name_in_its_own_folder(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    assert find_resume_point(recipe(tmp_path, None)) is find_resume_point(config) is None
    run_of(config, "20260101-000000", 3)
    for number in ("", "-2", "-9", "-10"):  # of ten runs of one second the tenth is the newest
        newest = run_of(config, f"20260102-000000{number}", 1, 2)
    run_of(replace(config, run=replace(config.run, name=f"{config.run.name}-other")), "20270101-000000", 3)
    point = found(config)
    assert (point.run, point.folder, point.state.version) == (newest, newest / "checkpoints" / "update-000002", 2)
    assert point.notes == (f"going on with {newest.name} from update 2",)
    assert (found(recipe(tmp_path, str(newest))).run, found(recipe(tmp_path, str(newest))).state.version) == (newest, 2)
    new = found(recipe(tmp_path, str(newest / "checkpoints" / "update-000001")))
    assert (new.run, new.state.version) == (None, 1), "a checkpoint folder starts a new run"


def test_a_damaged_checkpoint_is_passed_over_and_a_run_without_another_is_refused(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    run = run_of(config, "20260101-000000", 1, 2)
    (run / "checkpoints" / "update-000002" / "state.json").write_bytes(b"{}")
    point = found(config)
    assert point.state.version == 1
    warning, note = point.notes
    assert warning.startswith("warning: not resumed from update-000002: ") and "2 bytes" in warning
    assert note.endswith("from update 1")
    (run / "checkpoints" / "update-000001" / "manifest.json").unlink()
    message = refusal(recipe(tmp_path, str(run)))
    assert "no checkpoint to resume from (not resumed from update-000002" in message
    assert message.endswith("checkpoint.resume=null starts a new run")


def test_auto_takes_the_newest_run_that_is_not_done_and_says_what_it_passes_over(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    run_of(config, "20260101-000000", 1)
    unfinished = run_of(config, "20260102-000000", 3, status="failed")
    damaged = run_of(config, "20260103-000000", 3)
    (damaged / "checkpoints" / "update-000003" / "manifest.json").unlink()
    run_of(config, "20260104-000000")
    run_of(config, "20260105-000000", 3, status="done")
    running = run_of(config, "20260106-000000", 3, status="done")  # that was done, and is being trained further
    run_of(config, "20260107-000000", 4, status="done")
    (Path(config.run.dir) / "test-20270101-000000").write_text("a file")
    (Path(config.run.dir) / "test-notes").mkdir()
    passed: list[str] = []
    with held(running):
        point = found(config, passed)
    assert (point.run, point.state.version) == (unfinished, 3)
    assert point.notes == ("going on with test-20260102-000000 from update 3",)
    runs, nothing, broken, done = passed
    assert runs == "passed over test-20260106-000000: it is running"
    assert nothing == "passed over test-20260104-000000: it has no checkpoint"
    assert broken.startswith(
        "warning: passed over test-20260103-000000: has no checkpoint to resume from (not resumed f"
    )
    assert done.startswith("passed over, because done: test-20260107-000000, test-20260105-000000 (checkpoint.resume=<")


def test_auto_begins_a_run_where_none_can_be_gone_on_with_and_says_why(tmp_path: Path) -> None:
    """Lets a cluster that repeats the command get on."""
    config = recipe(tmp_path)
    run = run_of(config, "20260101-000000", 1)
    (run / "checkpoints" / "update-000001" / "manifest.json").unlink()
    for second in range(7):
        run_of(config, f"20250101-00000{second}", 4, status="done")
    inputs = preflight(config)
    assert (inputs.run, inputs.config.checkpoint.resume, inputs.start) == (None, None, ControlState())
    damaged, done = inputs.notes
    assert damaged.startswith("warning: passed over test-20260101-000000: ")
    assert done.startswith("passed over, because done: test-20250101-000006, ") and "-000002 and 2 others" in done


def test_a_run_beyond_the_last_update_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    run = run_of(config, "20260101-000000", 2, 12)
    beyond = f"{run} is at update 12, beyond trainer.updates = 4; trainer.updates=N with N above 12 resumes it"
    for resume in ("auto", str(run)):
        assert beyond in refusal(recipe(tmp_path, resume))
    said = refusal(recipe(tmp_path, str(run / "checkpoints" / "update-000012")))
    assert "update-000012 is at update 12 already, trainer.updates is 4; trainer.updates=N with N above 12" in said
    last = find_resume_point(recipe(tmp_path, trainer={"updates": 12}))
    assert last is not None, "its last checkpoint is written before its end"
    # One that began before that checkpoint and starts again by itself does not go on with it.
    refused: list[str] = []
    point = newest_of_run(config, run, refused)
    assert point is not None and point.state.version == 2
    assert refused == ["warning: not resumed from update-000012: it is beyond trainer.updates = 4"]


def test_a_run_that_is_running_is_left_alone(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    older, newer = run_of(config, "20260101-000000", 3), run_of(config, "20260102-000000", 1)
    with held(newer):
        point = found(config)
        assert point.run == older
        assert "is running" in refusal(recipe(tmp_path, str(newer)))
        with pytest.raises(RunDirectoryError, match="is running"):
            RunDirectory.reopen(newer)


def test_a_wrong_path_is_reported_for_what_it_is(tmp_path: Path) -> None:
    gone, file = tmp_path / "gone", tmp_path / "recipe.yaml"
    expected = "; expected 'auto', the folder of a run or that of a checkpoint"
    assert refusal(recipe(tmp_path, str(gone))) == f"checkpoint.resume: no such folder: {gone}{expected}"
    assert refusal(recipe(tmp_path, str(file))) == f"checkpoint.resume: {file} is not a folder{expected}"
    run = tmp_path / "world-20260101-000000"
    run.mkdir()
    (run / "latest").symlink_to(tmp_path)
    assert f"is not a whole checkpoint: it has no manifest.json{expected}" in refusal(recipe(tmp_path, str(run)))
    (run / "config.yaml").touch()
    removed = f"{run} has no checkpoint to resume from (it has none)"
    assert removed in refusal(recipe(tmp_path, str(run)))


@pytest.mark.parametrize("name", ["samples", "checkpoints", "weights"])
def test_a_run_with_a_link_in_the_place_of_a_folder_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    config = recipe(tmp_path)
    run = run_of(config, "20260101-120000", 2)
    if (run / name).exists():
        (run / name).rename(tmp_path / "away")
    (run / name).symlink_to(tmp_path / "away")
    passed = list[str]()
    assert find_resume_point(config, passed) is None and "the whole run folder may be one instead" in passed[0]
    named = recipe(tmp_path, str(run))
    assert "the whole run folder may be one instead" in refusal(named)


def test_a_checkpoint_elsewhere_is_not_gone_on_from(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    run = run_of(config, "20260101-120000", 2, 4)
    (run / "checkpoints" / folder_name(4)).rename(tmp_path / "away")
    (run / "checkpoints" / folder_name(4)).symlink_to(tmp_path / "away")
    point = found(config)
    assert point.state.version == 2 and "update-000004 is a link" in point.notes[0]


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    run = run_of(recipe(tmp_path), "20260101-000000", 1, algorithm="diffusion_nft")
    assert "its algorithm.name is 'diffusion_nft', the recipe's is 'flow_grpo'" in refusal(recipe(tmp_path, str(run)))
    folder = str(run / "checkpoints" / "update-000001")
    assert refusal(recipe(tmp_path, folder)).startswith("checkpoint.resume: ")


def double_line(ledger: Path, number: int) -> None:
    lines = ledger.read_bytes().split(b"\n")
    ledger.write_bytes(b"\n".join([*lines[:number], *lines[number - 1 :]]))


def test_of_a_damaged_ledger_the_checkpoints_before_the_damage_count(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    run = run_of(config, "20260101-000000")
    states = write_ledger(run, 4)
    for version in (1, 2):
        control = ControlState(version, ledger=states[2 * version])
        checkpoint_of(run, State(control, config.model.pipeline, "flow_grpo", statement=stated(config, {})))
    double_line(run / "ledger.jsonl", 4)
    point = found(config)
    assert point.state.version == 2, "what comes after the lines that count is void"
    whole = (run / "ledger.jsonl").read_bytes()
    (run / "ledger.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:4])[:-9])
    point = found(config)  # of a machine that went down before the lines were on its disk
    assert point.state.version == 1
    assert "not resumed from update-000002: the ledger has 3 lines, the checkpoint counts 4" in point.notes[0]
    (run / "ledger.jsonl").write_bytes(whole)
    double_line(run / "ledger.jsonl", 3)
    point = found(config)
    assert point.state.version == 1
    assert "differ from the lines that the checkpoint counts: line 4 is of group 2, and so is line 3" in point.notes[0]
    double_line(run / "ledger.jsonl", 1)
    said = refusal(recipe(tmp_path, str(run)))
    assert "line 2 is of group 0, and so is line 1; and 1 older cannot be used either)" in said
    newest = run / "checkpoints" / "update-000002"
    assert f"{newest} starts a new run from its weights; checkpoint.resume=null starts a new run" in said
    passed: list[str] = []
    assert find_resume_point(config, passed) is None and "line 2 is of group 0" in passed[0]
    assert find_resume_point(recipe(tmp_path, str(newest))) is not None, "a new run has a ledger of its own"


def test_another_number_of_optimizer_steps_per_update_is_another_job(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    run = run_of(config, "20260101-000000")
    checkpoint_of(run, State(ControlState(2), config.model.pipeline, "flow_grpo", engine={"optimizer_steps": 4}))
    said = refusal(recipe(tmp_path, str(run)))
    assert "it made 4 optimizer steps in 2 updates, trainer.steps_per_update is 1" in said
    assert find_resume_point(recipe(tmp_path, trainer={"steps_per_update": 2, "groups_per_update": 2})) is not None


def test_emulated_devices_do_not_go_on_with_trained_weights_nor_a_trainer_without_them(tmp_path: Path) -> None:
    config, emulation = recipe(tmp_path), {"profile": "p.json"}
    trained = run_of(config, "20260101-000000", 1, 2)
    said = refusal(recipe(tmp_path, str(trained), emulation=emulation))
    assert "it holds trained weights, and the recipe's devices are emulated" in said
    passed: list[str] = []
    assert find_resume_point(recipe(tmp_path, emulation=emulation), passed) is None
    assert "it holds trained weights" in passed[0]
    emulated = run_of(config, "20260102-000000")
    folder = checkpoint_of(emulated, State(ControlState(3), None, "flow_grpo"), emulated=True)
    for path in (emulated, folder):
        assert "it has no weights, because its devices were emulated" in refusal(recipe(tmp_path, str(path)))
    assert found(config).run == trained, "auto passes the emulated run over"
    assert found(recipe(tmp_path, emulation=emulation)).run == emulated


def test_groups_that_wait_are_made_again_by_a_recipe_that_would_make_others(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    ready = ReadyGroup(
        3, Prompt(0, "x"), None, 1, (ReadySample("g3.s0", None, None, Score(0.5), VersionSpans.of((1,))),)
    )
    control, statement = ControlState(1, ready=(ready,)), stated(config, {})
    state = State(control, config.model.pipeline, "flow_grpo", samples=made_with(config), statement=statement)
    folder = str(checkpoint_of(run_of(config, "20260101-000000"), state, {3: [{"latents": np.zeros(2)}]}))
    assert found(config).state.control.ready == (ready,)
    for resume in ("auto", folder):
        point = found(recipe(tmp_path, resume, rollout={"num_inference_steps": 7}))
        assert point.state.control.ready == ()
        assert [one.group for one in point.state.control.unfinished] == [3]
        changed = "rollout.num_inference_steps changed"
        assert point.notes[0] == "changed since update-000001: rollout.num_inference_steps: 10 -> 7"
        assert point.notes[1] == f"groups that waited for the trainer (1) are made again: {changed}"
    masked = recipe(tmp_path, algorithm={"correction": {"mode": "decoupled", "kappa_nats": 2.0}})
    point = found(masked)
    assert point.state.control.ready == (), "they have no means, which the mask reads"
    assert point.notes[-2].endswith("trajectory fields changed")


def test_groups_of_an_earlier_version_are_made_again(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    ready = ReadyGroup(
        3, Prompt(0, "x"), None, 1, (ReadySample("g3.s0", None, None, Score(0.5), VersionSpans.of((1,))),)
    )
    samples = {name: value for name, value in made_with(config).items() if name != "log-prob dtype"}
    state = State(ControlState(1, ready=(ready,)), config.model.pipeline, "flow_grpo", samples=samples)
    checkpoint_of(run_of(config, "20260101-000000"), state, {3: [{"latents": np.zeros(2)}]})
    point = found(config)
    assert (point.state.control.ready, [one.group for one in point.state.control.unfinished]) == ((), [3])
    assert any(note.endswith("made again: log-prob dtype changed") for note in point.notes)


def test_metrics_after_the_checkpoint_are_void(tmp_path: Path) -> None:
    config = recipe(tmp_path, None)
    run = RunDirectory(run_of(config, "20260101-000000", 2))
    for update in (1, 2, 3):
        run.append_metrics(update, {"reward": update, "finished": float(update)})
    for version in (0, 2):
        run.append_metrics(version, {"validation/reward": 0.5})
    with run.metrics.open("ab") as torn:
        torn.write(b'{"update": 4, "rew')
    expected = [(1, True), (2, True), (0, False)]
    again = RunDirectory.reopen(run.path)
    before = run.metrics.read_bytes()
    assert [(line["update"], "finished" in line) for line in again.read_metrics(2, 0)] == expected
    assert run.metrics.read_bytes() == before, "nothing changes before there is something to record"
    again.take_over(config, 2, 0)
    lines = map(msgspec.json.decode, run.metrics.read_bytes().splitlines())
    assert [(line["update"], "finished" in line) for line in lines] == expected
    assert (run.path / "metrics.jsonl.void").read_bytes().count(b"\n") == 2

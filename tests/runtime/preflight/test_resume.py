"""Tests where a run is resumed: which folder, which checkpoint, and the log of unusable ones."""

from __future__ import annotations

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
    """Writes a run's folder with checkpoints of these versions."""
    run = Path(config.run.dir) / f"{config.run.name}-{stamp}"
    (run / "checkpoints").mkdir(parents=True)
    for version in versions:
        checkpoint_of(run, state_of(config, ControlState(version, 2 * version), algorithm=algorithm))
    if status is not None:
        (run / "summary.json").write_bytes(msgspec.json.encode({"status": status}))
    return run


def state_of(config: Config, control: ControlState, algorithm: str = "flow_grpo", **given: Any) -> State:
    return State(control, config.model.pipeline, algorithm, **{"statement": stated(config, {}), **given})


def checkpoint_of(run: Path, state: State, groups: dict[int, list[Any]] | None = None, emulated: bool = False) -> Path:
    """Writes a checkpoint; `emulated`: its weights took no optimizer steps."""
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


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        find_resume_point(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def found(config: Config, passed: list[str] | None = None) -> ResumePoint:
    """Returns where the run is resumed, which must be somewhere."""
    point = find_resume_point(config, passed)
    assert point is not None
    return point


def remove_manifest(run: Path, version: int) -> None:
    (run / "checkpoints" / folder_name(version) / "manifest.json").unlink()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return recipe(tmp_path)


def test_auto_resumes_the_newest_run_of_this_name(tmp_path: Path, config: Config) -> None:
    assert find_resume_point(recipe(tmp_path, None)) is find_resume_point(config) is None
    run_of(config, "20260101-000000", 3)
    for number in ("", "-2", "-9", "-10"):  # of ten runs of one second the tenth is the newest
        newest = run_of(config, f"20260102-000000{number}", 1, 2)
    run_of(replace(config, run=replace(config.run, name=f"{config.run.name}-other")), "20270101-000000", 3)
    point = found(config)
    assert (point.run, point.folder, point.state.version) == (newest, newest / "checkpoints" / "update-000002", 2)
    assert point.notes == (f"continuing {newest.name} from update 2",)
    assert (found(recipe(tmp_path, str(newest))).run, found(recipe(tmp_path, str(newest))).state.version) == (newest, 2)
    new = found(recipe(tmp_path, str(newest / "checkpoints" / "update-000001")))
    assert (new.run, new.state.version) == (None, 1), "a checkpoint folder starts a new run"


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, config: Config) -> None:
    run = run_of(config, "20260101-000000", 1, 2)
    (run / "checkpoints" / "update-000002" / "state.json").write_bytes(b"{}")
    point = found(config)
    assert point.state.version == 1 and point.notes[1].endswith("from update 1")
    assert point.notes[0].startswith("warning: not resumed from update-000002: ") and "2 bytes" in point.notes[0]
    remove_manifest(run, 1)
    message = refusal(recipe(tmp_path, str(run)))
    assert "no checkpoint to resume from (not resumed from update-000002" in message
    assert message.endswith("checkpoint.resume=null starts a new run")
    inputs = preflight(config)  # auto lets a cluster that repeats the command begin a run
    assert (inputs.run, inputs.config.checkpoint.resume, inputs.start) == (None, None, ControlState())
    assert inputs.notes[0].startswith("warning: passed over test-20260101-000000: ")


def test_auto_reports_what_it_passes_over(tmp_path: Path, config: Config) -> None:
    run_of(config, "20260101-000000", 1)
    unfinished = run_of(config, "20260102-000000", 3, status="failed")
    remove_manifest(run_of(config, "20260103-000000", 3), 3)
    run_of(config, "20260104-000000")
    for second in range(5):
        run_of(config, f"20260105-00000{second}", 3, status="done")
    running = run_of(config, "20260106-000000", 3, status="done")  # that was done, and is being trained further
    run_of(config, "20260107-000000", 4, status="done")
    (Path(config.run.dir) / "test-20270101-000000").write_text("a file")
    (Path(config.run.dir) / "test-notes").mkdir()
    passed: list[str] = []
    lock = RunDirectory.reopen(running)
    point = found(config, passed)
    lock.release()
    assert (point.run, point.state.version) == (unfinished, 3)
    assert point.notes == ("continuing test-20260102-000000 from update 3",)
    runs, nothing, broken, done = passed
    assert runs == "passed over test-20260106-000000: it is running"
    assert nothing == "passed over test-20260104-000000: it has no checkpoint"
    assert broken.startswith("warning: passed over test-20260103-000000: has no checkpoint to resume from (not res")
    assert done.startswith("passed over, because done: test-20260107-000000, test-20260105-000004, ")
    assert "-000001 and 1 more (checkpoint.resume=FOLDER and a larger trainer.updates continue such a run)" in done


def test_a_run_beyond_the_last_update_is_refused(tmp_path: Path, config: Config) -> None:
    run = run_of(config, "20260101-000000", 2, 12)
    beyond = f"{run} is at update 12, beyond trainer.updates = 4; trainer.updates=N with N above 12 resumes it"
    for resume in ("auto", str(run)):
        assert beyond in refusal(recipe(tmp_path, resume))
    said = refusal(recipe(tmp_path, str(run / "checkpoints" / "update-000012")))
    assert "update-000012 is at update 12 already, trainer.updates is 4; trainer.updates=N with N above 12" in said
    last = find_resume_point(recipe(tmp_path, trainer={"updates": 12}))
    assert last is not None, "its last checkpoint is written before its end"
    # A run that began before that checkpoint does not restart from it.
    refused: list[str] = []
    point = newest_of_run(config, run, refused)
    assert point is not None and point.state.version == 2
    assert refused == ["warning: not resumed from update-000012: it is beyond trainer.updates = 4"]


def test_a_running_run_is_left_alone(tmp_path: Path, config: Config) -> None:
    older, newer = run_of(config, "20260101-000000", 3), run_of(config, "20260102-000000", 1)
    lock = RunDirectory.reopen(newer)
    assert found(config).run == older
    assert "is running" in refusal(recipe(tmp_path, str(newer)))
    with pytest.raises(RunDirectoryError, match="is running"):
        RunDirectory.reopen(newer)
    lock.release()


def test_wrong_paths(tmp_path: Path) -> None:
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


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path, config: Config) -> None:
    run = run_of(config, "20260101-000000", 1, algorithm="diffusion_nft")
    assert "its algorithm.name is 'diffusion_nft', the recipe's is 'flow_grpo'" in refusal(recipe(tmp_path, str(run)))
    assert refusal(recipe(tmp_path, str(run / "checkpoints" / "update-000001"))).startswith("checkpoint.resume: ")
    steps = run_of(config, "20260102-000000")
    checkpoint_of(steps, state_of(config, ControlState(2), statement=None, engine={"optimizer_steps": 4}))
    said = refusal(recipe(tmp_path, str(steps)))
    assert "it made 4 optimizer steps in 2 updates, trainer.steps_per_update is 1" in said
    assert find_resume_point(recipe(tmp_path, trainer={"steps_per_update": 2, "groups_per_update": 2})) is not None


def double_line(ledger: Path, number: int) -> None:
    lines = ledger.read_bytes().split(b"\n")
    ledger.write_bytes(b"\n".join([*lines[:number], *lines[number - 1 :]]))


def test_a_damaged_ledger_leaves_the_checkpoints_before_the_damage(tmp_path: Path, config: Config) -> None:
    run = run_of(config, "20260101-000000")
    ledger, states, newest = run / "ledger.jsonl", write_ledger(run, 4), run / "checkpoints" / "update-000002"
    for version in (1, 2):
        checkpoint_of(run, state_of(config, ControlState(version, ledger=states[2 * version])))
    double_line(ledger, 4)
    assert found(config).state.version == 2, "what comes after the lines that count is void"
    whole = ledger.read_bytes()
    ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:4])[:-9])
    point = found(config)  # of a machine that went down before the lines were on its disk
    assert point.state.version == 1
    assert "not resumed from update-000002: the ledger has 3 lines, the checkpoint counts 4" in point.notes[0]
    ledger.write_bytes(whole)
    double_line(ledger, 3)
    point = found(config)
    assert point.state.version == 1
    assert "differ from the lines that the checkpoint counts: line 4 is of group 2, and so is line 3" in point.notes[0]
    double_line(ledger, 1)
    said = refusal(recipe(tmp_path, str(run)))
    assert "line 2 is of group 0, and so is line 1; and 1 older cannot be used either)" in said
    assert f"{newest} starts a new run from its weights; checkpoint.resume=null starts a new run" in said
    passed: list[str] = []
    assert find_resume_point(config, passed) is None and "line 2 is of group 0" in passed[0]
    assert find_resume_point(recipe(tmp_path, str(newest))) is not None, "a new run has a ledger of its own"


def test_emulated_and_trained_runs_do_not_continue_each_other(tmp_path: Path, config: Config) -> None:
    emulation = {"profile": "p.json"}
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


READY = ReadyGroup(3, Prompt(0, "x"), None, 1, (ReadySample("g3.s0", None, Score(0.5), VersionSpans.of((1,))),))


def test_waiting_groups_are_generated_again_by_another_recipe(tmp_path: Path, config: Config) -> None:
    state = state_of(config, ControlState(1, ready=(READY,)), samples=made_with(config))
    run = run_of(config, "20260101-000000")
    folder = str(checkpoint_of(run, state, {3: [{"latents": np.zeros(2)}]}))
    assert found(config).state.control.ready == (READY,)
    for resume in ("auto", folder):
        point = found(recipe(tmp_path, resume, rollout={"num_inference_steps": 7}))
        assert point.state.control.ready == ()
        assert [one.group for one in point.state.control.unfinished] == [3]
        changed = "rollout.num_inference_steps changed"
        assert point.notes[0] == "changed since update-000001: rollout.num_inference_steps: 10 -> 7"
        assert point.notes[1] == f"groups that waited for the trainer (1) are made again: {changed}"
    point = found(recipe(tmp_path, algorithm={"correction": {"mode": "decoupled", "kappa_nats": 2.0}}))
    assert point.state.control.ready == (), "they have no means, which the mask reads"
    assert point.notes[-2].endswith("trajectory fields changed")
    # So are groups of an earlier version of the software.
    samples = {name: value for name, value in made_with(config).items() if name != "log-prob dtype"}
    older = state_of(config, ControlState(2, ready=(READY,)), samples=samples)
    checkpoint_of(run, older, {3: [{"latents": np.zeros(2)}]})
    point = found(config)
    assert (point.state.control.ready, [one.group for one in point.state.control.unfinished]) == ((), [3])
    assert any(note.endswith("made again: log-prob dtype changed") for note in point.notes)


@pytest.mark.parametrize(
    ("before", "now", "again"),
    [
        ({"coef": 1.0}, {"coef": 0.5}, False),
        ({"sampling": {"true_cfg_scale": 4.0}}, {"sampling": {"true_cfg_scale": 3.0}}, False),
        (None, {}, False),
        (None, {"sampling": {"true_cfg_scale": 4.0}}, True),
        ({"sampling": {"true_cfg_scale": 4.0}}, None, True),
    ],
)
def test_another_teacher_leaves_samples_unless_it_needs_negative_prompts(
    tmp_path: Path, config: Config, before: dict[str, Any] | None, now: dict[str, Any] | None, again: bool
) -> None:
    def taught(teacher: dict[str, Any] | None) -> Config:
        given = None if teacher is None else {"path": config.model.path, **teacher}
        return recipe(tmp_path, algorithm={"teacher": given})

    state = state_of(taught(before), ControlState(1, ready=(READY,)), samples=made_with(taught(before)))
    checkpoint_of(run_of(config, "20260101-000000"), state, {3: [{"latents": np.zeros(2)}]})
    point = found(taught(now))
    assert (point.state.control.ready == ()) == again
    assert any("made again: encoding of prompts changed" in note for note in point.notes) == again


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

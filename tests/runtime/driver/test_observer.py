"""Tests the driver's observer: a real coordinator's events in, files and console lines out."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from omni_async.aio.clock import ManualClock
from omni_async.commands.scoring.samples import find_samples
from omni_async.commands.watch.app import _SAMPLE, _media
from omni_async.control.control_state import ControlState
from omni_async.control.events import RunEvent, Shown
from omni_async.data.image_files import prompt_image
from omni_async.media import Media
from omni_async.records.read.record import read_run
from omni_async.records.write.attempts import Fault, read_faults
from omni_async.records.write.devices import Device
from omni_async.records.write.rundir import RunDirectory, RunDirectoryError
from omni_async.records.write.sinks.base import Sink
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.summary import Summary, read_summary, write_summary
from omni_async.runtime.driver import sample_files
from omni_async.runtime.driver.observer import Observer
from omni_async.types import Prompt, Score, ScoreJob, Span
from tests.control import control_world
from tests.runtime.runtime_world import (
    OFFLINE,
    Control,
    ImageStore,
    RecordingSink,
    RememberingConsole,
    update,
    write_world,
)
from tests.support.loops import play
from tests.support.patience import PATIENCE


class TellingSink(RecordingSink):
    """A sink that remembers the numbers and remarks of validation rounds."""

    def metrics(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        if "not_scored" in numbers:
            self._calls.append(f"{step} {numbers}")

    def remark(self, name: str, text: str, step: int) -> None:
        self._calls.append(f"{step} {name}: {text}")


class Watched(control_world.Run):
    """A run of the control plane's world whose driver is an Observer."""

    def __init__(self, folder: Path, sink: Sink | None = None, **kwargs: Any) -> None:
        validation = {"every": 2, "num_inference_steps": 3}
        config = control_world.make_config(S=1, P=2, updates=4, validation=validation)
        super().__init__(config, **kwargs)
        self.sinks, self.clock = Sinks([sink] if sink else []), ManualClock(1000.0)
        self.console = RememberingConsole()
        self.run = RunDirectory.create(write_world(folder), self.clock)
        self.observer = Observer(config, self.run, self.console, self.sinks, self.clock)

    async def driver(self) -> None:
        await self.coordinator.phase("generating the first samples")
        watching = asyncio.create_task(self.observer.watch(self.coordinator, ImageStore()))
        await self.observer.closing.wait()
        await self.coordinator.conclude()
        await watching
        self.clock.advance(8.0)
        await self.observer.samples_written(10.0)
        self.sinks.finish("done")

    def metrics(self, key: str) -> list[dict[str, Any]]:
        """Returns the lines with this key."""
        lines = [json.loads(line) for line in self.run.metrics.read_text().splitlines()]
        return [line for line in lines if key in line]

    def summary(self, peak_memory: int | None = None) -> Summary:
        return self.observer.summary("done", None, peak_memory, self.clock.now(), self.observer.spans.all())


def watch(folder: Path, **kwargs: Any) -> Watched:
    return asyncio.run(Watched(folder, **kwargs).play())


def observer(
    folder: Path, sinks: Sinks | None = None, start: ControlState | None = None, owns: bool = True, **sections: Any
) -> tuple[Observer, RunDirectory, RememberingConsole, ManualClock]:
    config, clock, console = write_world(folder, **sections), ManualClock(1000.0), RememberingConsole()
    run = RunDirectory.create(config, clock)
    return Observer(config, run, console, sinks or Sinks(), clock, start, owns), run, console, clock


def validated(version: int, *references: Any) -> RunEvent:
    """Makes a round of reward 0.5 that shows samples of these references."""
    shown = tuple(Shown(reference, Prompt(0, "a prompt"), Score(1.0)) for reference in references)
    return RunEvent(
        "validation", {"version": version, "round": {"version": version, "reward": 0.5}, "standard_error": 0.1}, shown
    )


def show(watcher: Observer, *events: RunEvent, status: str = "done") -> None:
    """Makes the observer watch these events, then the end."""

    async def main() -> None:
        control = Control()
        control.log.add("phase", {"text": "before"})
        for event in events:
            control.log.add(event.kind, event.data, event.shown)
        control.end(status)
        await control.conclude()
        control.log.add("spans", {"spans": []})  # of a role that was given up, a moment too late
        await watcher.watch(control, ImageStore())
        await watcher.samples_written(10.0)

    play(main())


def test_records_of_a_run_add_up(tmp_path):
    watched = watch(tmp_path)
    updates = watched.metrics("reward")
    assert [line["update"] for line in updates] == [1, 2, 3, 4]
    assert [view["update"] for view in watched.console.updates] == [1, 2, 3, 4]
    for line in updates:
        assert line["reward"] == 0.5 and 0 <= line["staleness/mean"] <= line["staleness/max"] <= 1
        counts = line["conservation"]
        assert counts["admitted"] == counts["trained"] + counts["rejected"] + counts["dropped"] + counts["live"]
    view = watched.console.updates[-1]
    assert all(0 <= held <= capacity for held, capacity in view["buffers"].values())
    assert sum(view["staleness_counts"].values()) == 2
    assert watched.console.phases == ["generating the first samples"]

    rounds = [line["update"] for line in watched.metrics("validation/reward")]
    assert rounds == [version for version, _ in watched.console.validations]
    assert rounds[0] == 0 and rounds[-1] == 4

    drawn = {path.name for path in watched.run.samples.iterdir()}
    assert {"train-000001.png", "train-000004.png", "validation-000000.png", "validation-000004.png"} <= drawn
    shown = find_samples([watched.run.path], 100)
    tables = [path for path in drawn if path.endswith(".jsonl")]
    assert len(tables) == len({name for name in drawn if re.fullmatch(r"\w+-\d{6}\.png", name)}) and shown
    assert all(file.is_file() for sample in shown for file in sample.files.values())

    summary = watched.summary(123)
    assert (summary.updates, summary.wall_s, summary.first_reward, summary.peak_memory_bytes) == (4, 8.0, 0.5, 123)
    assert summary.images >= 16 and summary.images_per_s == summary.images / 8.0
    assert summary.counters.trained == sum(summary.staleness.values()) == 8 and summary.conserved
    assert [point.version for point in summary.validation] == sorted(rounds)

    found = watched.observer.progress()
    assert (found["update"], found["updates"], found["eta_s"]) == (4, 4, 0.0)
    assert found["reward"] == 0.5 and 0 <= found["staleness/mean"] <= found["staleness/max"] <= 1
    assert found["validation"]["version"] == 4 and found["told"]["text"] == "generating the first samples"
    json.dumps(found)

    watched.observer.ended = None  # as after the loss of the coordinator itself, with no other attempt after it
    summary = watched.observer.summary("failed", "coordinator is gone", None, 1008.0, [])
    assert (summary.updates, summary.images) == (4, updates[-1]["images"])
    assert summary.counters.trained == 8 and msgspec.to_builtins(summary.counters) == updates[-1]["conservation"]


def test_groups_that_are_not_trained_have_reasons_even_without_a_last_event(tmp_path):
    """The console has them while the run continues, the summary after the coordinator is lost."""

    def reward(job: ScoreJob) -> float:
        return 0.5 if job.sample_id.startswith("g1.") else control_world.distinct(job)

    watched = watch(tmp_path, reward=reward)
    left_out = [view["left_out"] for view in watched.console.updates]
    assert left_out[0] in ({}, {"rejected": "1: zero reward variance"})
    assert left_out[-1] == {"rejected": "1: zero reward variance"}
    watched.observer.ended = None
    summary = watched.observer.summary("failed", "coordinator is gone", None, 1008.0, [])
    assert (summary.counters.rejected, summary.reject_reasons) == (1, {"zero reward variance": 1})


def test_accelerators_are_in_the_metrics_and_the_status(tmp_path):
    watcher, run, _, _ = observer(tmp_path)
    watcher.sampled = lambda: [("trainer", "local", [Device("GPU-0", "H100", 2**30, 2**36, 0.5)])]
    show(watcher, update(1, 0.0, 1.0))
    (line,) = map(json.loads, run.metrics.read_text().splitlines())
    assert {name: value for name, value in line.items() if name.startswith("device")} == {
        "device/0/memory_bytes": 2**30,
        "device/0/utilisation": 0.5,
    }
    assert [one.workers for one in watcher.devices()] == [["trainer"]]


def test_a_pipe_for_metrics_is_refused(tmp_path):
    run = observer(tmp_path)[1]
    os.mkfifo(run.metrics)
    with pytest.raises(OSError, match="not a file"):
        run.void_metrics(3, None)


def test_rounds_are_compared_over_common_samples(tmp_path):
    """Scores all in the first round, nothing in the second, and all but the second prompt in the last."""

    def reward(job: ScoreJob) -> float | str:
        if job.kind == "train":
            return control_world.distinct(job)
        version, hard = job.sample_id.partition(".")[0], ".p1." in job.sample_id
        if version == "v2" or (version == "v4" and hard):
            return "no face found"
        return 0.0 if hard else {"v0": 0.5, "v4": 0.625}[version]

    calls: list[str] = []
    watched = watch(tmp_path, reward=reward, sink=TellingSink(calls))
    assert watched.console.validations == [(0, 0.25), (2, None), (4, 0.625)]
    (line,) = (line for line in watched.metrics("validation/reward") if line["update"] == 2)
    assert (line["validation/reward"], line["samples"], line["asked"], line["not_scored"]) == (None, 0, 2, 2)
    assert line["standard_error"] is None and line["reasons"] == [{"reason": "no face found", "samples": 2}]
    summary = watched.summary()
    assert [(one.value, one.samples) for one in summary.validation] == [(0.25, 2), (None, 0), (0.625, 1)]
    change = summary.validation_change
    assert change is not None and change.numbers == {"reward": (0.5, 0.625)}
    assert (change.samples, change.asked) == (1, 2)
    write_summary(tmp_path / "summary.json", summary)
    assert read_summary(tmp_path / "summary.json") == summary
    why = "of 2 samples not scored: no face found; it cannot be the best"
    assert [call for call in calls if call[0].isdigit()] == [
        "0 {'validation/reward': 0.25, 'not_scored': 0}",
        "2 {'not_scored': 2}",
        f"2 not_scored: version 2: 2 {why}",
        "4 {'validation/reward': 0.625, 'not_scored': 1, 'validation_gain': 0.125}",
        f"4 not_scored: version 4: 1 {why}",
    ]


def without(lines: list[bytes], gone: Callable[[dict[str, Any]], bool]) -> list[bytes]:
    return [line for line in lines if not gone(json.loads(line))]


NO_UPDATE, NO_ROUND = "no line of update 1, 2, 3 and 1 more", "no line of validation of version 0, 2, 4;"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: [line.replace(b'"reward":0.5', b'"reward":null') for line in lines], None),
        (lambda lines: without(lines, lambda line: "finished" not in line), f"has {NO_ROUND}"),
        (lambda lines: without(lines, lambda line: line["update"] == 3), "has no line of update 3;"),
        (lambda lines: [*lines, *lines[-1:]], "has more than one line of "),
        (lambda lines: [line[:-9] for line in lines], f"has {NO_UPDATE} and {NO_ROUND}"),
        (None, f"has {NO_UPDATE} and {NO_ROUND}"),
    ],
)
def test_a_resumed_summary_does_not_need_the_metrics_file(tmp_path, damage, said):
    """Gaps of the file are reported."""
    watched = watch(tmp_path)
    before = watched.summary()
    kept = msgspec.json.decode(msgspec.json.encode(asyncio.run(watched.coordinator.continuation())), type=ControlState)
    lines = watched.run.metrics.read_bytes().splitlines(keepends=True)
    watched.run.metrics.unlink()
    if damage is not None:
        watched.run.metrics.write_bytes(b"".join(damage(lines)))
    watched.run.void_metrics(kept.version, kept.validated)
    console = RememberingConsole()
    resumed = Observer(watched.config, watched.run, console, Sinks(), watched.clock)
    resumed.recall(kept)
    after = resumed.summary("interrupted", None, None, 1008.0, [])
    for field in ("updates", "images", "first_reward", "last_reward", "staleness", "validation", "counters"):
        assert getattr(after, field) == getattr(before, field), field
    assert before.updates == 4 and len(before.validation) == 3
    warnings = [note for note in console.notes if note.startswith("warning: ")]
    assert [said in warning for warning in warnings] == ([] if said is None else [True]), console.notes


FILM = Media(video=np.zeros((4, 3, 32, 32), np.uint8), fps=8, audio=np.zeros((1, 4000), np.float32), sample_rate=8000)


def test_sample_files_and_a_full_disk(tmp_path, monkeypatch):
    calls: list[str] = []
    sinks = Sinks([RecordingSink(calls)])
    watcher, run, console, _ = observer(tmp_path, sinks)
    show(watcher, validated(1, "gone"), validated(2, "there", FILM))
    sinks.finish("done")
    names = ["validation-000002-01.mp4", "validation-000002-01.wav"]
    there = {path.name for path in run.samples.iterdir()}
    assert there == {*(f"validation-000002{end}" for end in (".png", ".jsonl", "-00.png")), *names}
    assert [call for call in calls if call != "metrics"] == ["validation 2", *(f"media {name}" for name in names)]
    assert any("validation-000001" in note and "object is gone" in note for note in console.notes)

    def full(media: Media, path: Path) -> list[Path]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample_files, "write_media", full)
    watcher, run, console, _ = observer(tmp_path / "full")
    show(watcher, validated(10, FILM, FILM))
    assert {path.name for path in run.samples.iterdir()} == {"validation-000010.png"}
    said = "samples of validation-000010 were not written: OSError: [Errno 28] No space left on device"
    assert console.notes == [said]


def test_texts_are_in_the_grid_and_in_the_table(tmp_path):
    """They have no files, and `omni-async score` finds them."""
    calls: list[str] = []
    sinks = Sinks([RecordingSink(calls)])
    watcher, run, console, _ = observer(tmp_path, sinks)
    texts = [Media(text="<b>42</b>\n", finish="stop"), Media(text="", finish="length")]
    show(watcher, validated(2, *texts))
    sinks.finish("done")
    assert {path.name for path in run.samples.iterdir()} == {"validation-000002.png", "validation-000002.jsonl"}
    assert [call for call in calls if call != "metrics"] == ["validation 2"] and not console.notes
    found = find_samples([run.path], 100)
    assert [sample.media().text for sample in found] == ["<b>42</b>\n", ""]
    assert [sample.media().finish for sample in found] == ["stop", "length"]
    assert {sample.prompt.text for sample in found} == {"a prompt"}
    (grid,) = read_run(run.path).grids
    assert [(tile.text, tile.image, tile.row["reward"]) for tile in grid.tiles] == [
        ("<b>42</b>\n", None, 1.0),
        ("", None, 1.0),
    ]
    live: Any = SimpleNamespace(run=run, follower=SimpleNamespace(samples={("train", 2)}))
    (run.samples / "validation-000002.jsonl").rename(run.samples / "train-000002.jsonl")
    assert _media(live, 2, "a prompt") == [{"text": "<b>42</b>\n"}, {"text": ""}]


def test_an_answer_has_the_image_of_its_prompt(tmp_path):
    asked = tmp_path / "asked.png"
    Image.new("RGB", (800, 400)).save(asked)
    prompt = Prompt(0, "How many?", images=(prompt_image(asked, "asked.png"),))
    watcher, run, console, _ = observer(tmp_path / "runs", Sinks([]))
    event = validated(2)
    shown = tuple(Shown(Media(text=text, finish="stop"), prompt, Score(1.0)) for text in ("2", ""))
    show(watcher, RunEvent(event.kind, event.data, shown))
    (grid,) = read_run(run.path).grids
    names = [tile.question.name for tile in grid.tiles if tile.question is not None]
    assert names == ["validation-000002-00-question.png", "validation-000002-01-question.png"]
    assert all(_SAMPLE.fullmatch(name) for name in names) and not console.notes
    with Image.open(run.samples / names[0]) as copy:
        assert copy.size == (384, 192)
    assert [one.prompt.metadata for one in find_samples([run.path], 100, [tmp_path])] == [{}, {}]


GPUS = {"rollout": {"gpus": 1}, "trainer": {"gpus": 0.5}}


@pytest.mark.parametrize(
    ("cpus", "sections", "devices"),
    [
        (8, {"placement": GPUS, "run": {"runtime": "ray"}}, 2.5),  # CPUs do not count then
        (8, {"placement": {"reward": {"cpus": 0.5}}, "run": {"runtime": "ray"}}, 4.0),
        (2, {"run": {"runtime": "ray"}}, 2.0),  # the machine has no more
        (8, {"placement": GPUS}, 1.0),  # one process uses one accelerator, or all CPUs
        (8, {}, 8.0),
        (2, {"run": {"ray_address": "auto", "runtime": "ray"}}, 5.0),  # handed out by a cluster that has them
        (2, {"emulation": {"profile": "p.json"}}, 5.0),  # none of this machine's
    ],
)
def test_devices_of_the_throughput(tmp_path, monkeypatch, cpus, sections, devices):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cpus))
    watcher, _, _, clock = observer(tmp_path, rollout={"workers": 2}, reward={"workers": 2}, **sections)
    clock.advance(10.0)
    spans = [Span("rollout-0", "generate", 1000.0, 1005.0), Span("reward-0", "starved", 1000.0, 1010.0)]
    show(watcher, RunEvent("spans", {"spans": spans}))
    summary = watcher.summary("failed", "no engine", None, clock.now(), watcher.spans.all())
    assert summary.busy["rollout"]["busy"] == 0.5 and summary.busy["reward"]["starved"] == 1.0
    assert summary.devices == devices


def test_held_records_are_written_once(tmp_path):
    start = ControlState(version=60, validated=59)
    watcher, run, *_ = observer(tmp_path, start=start, owns=False)
    show(watcher, validated(60), status="failed")
    watcher.recall(start)
    watcher.fault(Fault(1001.0, "trainer", "https://me:hunter2@h is gone", "attempt 2", 3.0))
    assert not run.metrics.exists() and not run.faults.exists()
    show(watcher, validated(60), update(61, 5000.0, 5004.0))
    assert [line["update"] for line in run.read_metrics()] == [60, 61]
    assert [fault.reason for fault in read_faults(run.faults)] == ["https://***@h is gone"]
    summary = watcher.summary("failed", "https://me:hunter2@h failed", None, 1002.0, ())
    assert summary.reason == "https://***@h failed"


def test_samples_of_a_lost_folder_are_discarded(tmp_path):
    watcher, run, *_ = observer(tmp_path, start=ControlState(version=60), owns=False)
    run.spans.mkdir()  # where the timeline's file is to begin

    async def main() -> None:
        watcher._samples.draw(validated(60, "image"), ImageStore())
        with pytest.raises(RunDirectoryError, match="cannot begin"):
            watcher.take_over()
        async with asyncio.timeout(PATIENCE):
            await watcher.samples_written(10 * PATIENCE)
        assert not [*run.samples.iterdir()]

    play(main())


def test_eta_is_at_the_pace_of_this_attempt(tmp_path):
    watcher, *_ = observer(tmp_path, trainer={"updates": 100})
    assert watcher.progress()["eta_s"] is None
    watcher.recall(ControlState(version=60))
    assert (watcher.progress()["update"], watcher.progress()["eta_s"]) == (60, None)
    show(watcher, update(61, 5000.0, 5004.0))
    assert watcher.progress()["eta_s"] == 39 * 4.0
    show(watcher, update(62, 5004.0, 5010.0))
    assert (watcher.progress()["update"], watcher.progress()["eta_s"]) == (62, 38 * 5.0)


def test_preferences_and_a_vanished_gradient(tmp_path):
    watcher, _, console, _ = observer(tmp_path, **OFFLINE)
    show(watcher, update(1, 0.0, 1.0, accuracy=0.9, margin=1.5, grad_norm=2.0, loss=0.3))
    [view] = console.updates
    assert "reward" not in view and view["extra"] == {"accuracy": 0.9, "margin": 1.5, "grad_norm": 2.0}
    assert watcher.progress()["reward"] is None and watcher.progress()["margin"] == 1.5
    summary = watcher.summary("done", None, None, 1.0, [])
    assert (summary.updates, summary.first_reward, summary.last_reward) == (1, None, None)
    watcher, _, console, _ = observer(tmp_path / "vanished")
    norms = [1.0] * 5 + [0.0] * 6
    show(watcher, *(update(n, n - 1.0, float(n), grad_norm=norm) for n, norm in enumerate(norms, start=1)))
    assert [note.partition(" (")[0] for note in console.notes] == ["warning: update 8: the gradient has vanished"]

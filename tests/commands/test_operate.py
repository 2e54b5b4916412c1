"""Tests `omni-async status`, `scale` and `stop`: what they print, and what they refuse in one line."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omni_async.cli import main
from omni_async.commands import operate
from omni_async.control.rounds import Round
from omni_async.records.write.rundir import RunDirectory, append_jsonl
from omni_async.records.write.summary import Counters, Status, Summary, write_summary
from omni_async.runtime.driver import control_socket
from omni_async.runtime.driver.control_socket import ControlSocket, Request
from omni_async.types import LedgerEntry
from tests.support.configs import make_summary
from tests.support.patience import PATIENCE

LEFT_OUT: dict[str, Any] = {"samples": 29, "asked": 30, "reasons": {"no face found": 1}}
STATUS: dict[str, Any] = {
    "progress": {
        **{"update": 42, "updates": 100, "eta_s": 200.4, "reward": 0.4312, "images_per_s": 21.34, "grad_norm": 0.0141},
        **{"staleness/mean": 1.24, "staleness/max": 2, "admission/reserve_s": 0.0, "admission/starved_s": 0.25},
        "validation": {"version": 40, "value": 0.52, "parts": {"ocr_exact": 0.5}, **LEFT_OUT},
        "told": {"at": 1_800_000_000.0, "text": "reward-0: ocr is down"},
    },
    "parts": {
        name: {"pid": pid, "node": "a"} for name, pid in (("coordinator", 11), ("rollout-0.2", 12), ("rollout-1", 13))
    },
    "faults": 3,
    "buffers": {
        "slots": {"live": 2, "awaiting_publication": 1, "capacity": 6},
        "replay": {"capacity": 16, "reserved": 4, "ready": 1},
        "bytes": {"capacity": 2**33, "reserved": 3 * 2**30, "ready": 2**30, "most": 2**31},
    },
    "conservation": {"admitted": 9, "trained": 4, "rejected": 1, "dropped": 2, "live": 2},
    "reasons": {"zero reward variance": 1},
    "drop_reasons": {"generation failed: CUDA out of memory": 2},
    "engines": {"rollout-0.2": 7, "rollout-1": -1},
    "scorers": {
        "ocr": {"in_flight": 8, "queued": 2, "answer_s/p50": 0.25, "answer_s/p95": 1.5},
        "judge": {"in_flight": 40, "queued": 0},
    },
    "addresses": {},
    "devices": [
        {
            **{"number": 0, "node": "a", "workers": ["rollout-0.2", "trainer"]},
            "device": {
                **{"id": "GPU-1", "name": "NVIDIA H100", "utilisation": 0.97},
                **{"memory_bytes": 41 * 2**30, "total_bytes": 80 * 2**30},
            },
        }
    ],
}


@contextmanager
def running(run: Path) -> Iterator[list[Request]]:
    """Serves a run that answers, and yields what it was asked."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    asked: list[Request] = []
    ready, over = threading.Event(), threading.Event()

    async def answer(request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
        asked.append(request)
        if request.scale:
            tell("rollout-2: loading")
        return STATUS

    async def serve() -> None:
        async with ControlSocket(run / "control.sock") as control:
            control.answer, control.stop = answer, lambda: asked.append(Request(stop=True))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(PATIENCE)
    try:
        yield asked
    finally:
        over.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_the_status_is_a_table_for_people_and_json_for_programs(tmp_path, capsys):
    with running(tmp_path / "run"):
        assert main(["status", str(tmp_path / "run")]) == 0
        said = capsys.readouterr().out
        assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS
    lines = said.splitlines()
    learned = "reward 0.431 (mean of the last 5 updates), grad_norm 0.0141"
    assert lines[:6] == [
        "update 42/100, about 3 min 20 s left",
        f"{learned}, staleness 1.2 updates on average, 2 at most, reserve 0 s (trainer waited 0.25 s), images/s 21.3",
        "validation of version 40: reward 0.520, ocr_exact 0.500; 1 of 30 samples not scored: no face found",
        "groups: 9 admitted, 4 trained, 1 rejected, 2 dropped, 2 live",
        "1 of 9 groups was rejected: zero reward variance",
        "2 of 9 groups were dropped: generation failed: CUDA out of memory",
    ]
    assert lines[6].startswith("last message, at 2027-01-15 ") and lines[6].endswith(":00: reward-0: ocr is down")
    cells = [line.split() for line in lines]
    assert ["rollout-0.2", "12", "version", "7"] in cells and ["rollout-1", "13", "none", "yet"] in cells
    assert ["slots", "3", "6"] in cells and ["replay", "4", "16", "1"] in cells
    assert ["ocr", "8", "2", "0.25", "s", "1.5", "s"] in cells and ["judge", "40", "0"] in cells
    assert "accelerator    memory  of      busy  used by" in lines
    assert "0 NVIDIA H100  41 GiB  80 GiB  97%   rollout-0.2, trainer" in lines
    assert lines[-1] == "faults mended: 3"


def test_a_stop_while_a_run_starts(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("")
    for answer, said in (
        ({}, "the run stops after it has written a checkpoint\n"),
        ({"doing": "starting Ray"}, "the run stops without a further checkpoint: it is starting Ray\n"),
    ):
        monkeypatch.setattr(operate, "ask", lambda *_, answer=answer, **__: answer)
        assert main(["stop", str(tmp_path)]) == 0
        assert capsys.readouterr().out == said


@pytest.mark.parametrize("command", ["status", "scale rollout=2", "stop"])
def test_a_command_waits_30_s_for_the_answer(tmp_path, monkeypatch, command):
    name, *words = command.split()
    line, ends = control_socket._line, list[float]()
    monkeypatch.setattr(control_socket, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(control_socket, "_line", lambda *how: ends.append(how[-1]) or line(*how))
    with running(tmp_path / "run"):
        assert main([name, str(tmp_path / "run"), *words]) == 0
    assert {*ends} == {1030.0}


NOTHING_YET = dict.fromkeys(("eta_s", "reward", "staleness/mean", "staleness/max", "images_per_s", "validation"))
BEGUN = {**STATUS, "progress": {**NOTHING_YET, "update": 60, "updates": 100}}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (BEGUN, ["update 60/100, no update of this attempt yet", "groups: 9 admitted"]),
        ({"doing": "loading engines, scorers and the trainer", "parts": {}}, ["it is loading engines, scorers and"]),
    ],
)
def test_a_run_that_starts_or_has_no_update_yet_has_a_status(tmp_path, capsys, monkeypatch, status, said):
    monkeypatch.setitem(globals(), "STATUS", status)
    with running(tmp_path / "run"):
        assert main(["status", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(begun) for line, begun in zip(lines, said, strict=False))


def left(
    folder: Path, *, updates: int = 2, summary: Summary | None = None, checkpoint: bool = True, **numbers: float
) -> Path:
    """Writes what a run of that many updates leaves."""
    folder.mkdir()
    (folder / "config.yaml").write_text("")
    run = RunDirectory(folder)
    for update in range(1, updates + 1):
        line = {"reward": update / 10, "staleness/mean": 0.5, "finished": 1000.0 * update}
        run.append_metrics(update, line | numbers)
    if updates:
        run.append_metrics(updates, {"validation/reward": 0.52, "validation/ocr_exact": 0.5})
    if checkpoint:
        (run.checkpoints / "update-000002").mkdir(parents=True)
    if summary is not None:
        write_summary(run.summary, summary)
    return folder


def over(status: Status, reason: str | None = None) -> Summary:
    rounds = [Round(0, 0.25, {"ocr_exact": 0.2}), Round(2, 0.5, {"ocr_exact": 0.4})]
    counters = Counters(admitted=3, trained=3, rejected=0, dropped=0, live=0)
    made = {"images": 4000, "rewards": [0.25, 0.75], "staleness": [1, 1, 2], "counters": counters}
    made["cpu_s"] = {"rollout": 101.4, "driver": 20.0}
    return make_summary(status=status, reason=reason, started=0.0, finished=200.0, rounds=rounds, **made)


def test_a_run_that_is_over_or_failed_is_shown_from_its_summary(tmp_path, capsys):
    folder = left(tmp_path / "run", summary=over("done"))
    assert main(["status", str(folder)]) == 0
    checkpoint = f"its newest checkpoint is {folder}/checkpoints/update-000002"
    goes_on = f"the same recipe with checkpoint.resume={folder} and a larger trainer.updates resumes it"
    assert capsys.readouterr().out.splitlines() == [
        "run: done after 2 updates, 3 min 20 s after loading",
        "reward 0.500 -> 0.500 (means of the first and the last 5 updates)",
        "validation of versions 0 to 2 (2 rounds): reward 0.250 -> 0.500, ocr_exact 0.200 -> 0.400",
        "staleness 1.3 updates on average, 2 at most; images/s 20.0",
        "121 CPU s: rollout 101, driver 20",
        "groups: 3 admitted, 3 trained, 0 rejected, 0 dropped, 0 live",
        f"{checkpoint}; {goes_on}",
        "next:",
        f"  omni-async report {folder}  # a page about it",
    ]
    (folder / "config.yaml").write_text("rollout: {engine: transformers}\n")
    assert main(["status", str(folder)]) == 0
    assert "2 at most; answers/s 20.0\n" in capsys.readouterr().out
    assert main(["status", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["running"], found["update"], found["summary"]["status"]) == (False, 2, "done")
    for command in ("stop", "scale rollout=2"):
        name, *words = command.split()
        assert main([name, str(folder), *words]) == 2
        assert "the run is over: run: done after 2 updates, 3 min 20 s after loading\n" in capsys.readouterr().err

    folder = left(tmp_path / "failed", summary=over("failed", "the judge is \x1b[2J down"), checkpoint=False)
    assert main(["status", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(r"run: failed (the judge is \x1b[2J down) after 2 updates")
    assert "it left no checkpoint to resume from" in said


@pytest.mark.parametrize(
    ("numbers", "shown"), [({}, "reward 0.2"), ({"accuracy": 0.9375, "margin": 24.7}, "accuracy 0.938, margin 24.7")]
)
def test_a_run_that_was_killed_is_shown_from_its_metrics(tmp_path, capsys, numbers, shown):
    folder = left(tmp_path / "run", **numbers)
    assert main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run: it is not running, and it left no summary: it was killed, or the machine went down"
    assert lines[1].startswith("the last update was 2, at ") and lines[1].endswith(f", {shown}, staleness/mean 0.5")
    assert lines[2] == "validation of version 2: reward 0.520, ocr_exact 0.500"
    assert lines[3].endswith(f"checkpoint.resume={folder} resumes it")
    RunDirectory(folder).append_metrics(3, {"reward": 0.5, "finished": 3000.0})
    assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[3].endswith(f"={folder} resumes it, and makes 1 update again")


def test_a_run_that_was_killed_counts_the_groups_of_its_ledger_that_were_not_trained(tmp_path, capsys):
    folder = left(tmp_path / "run")
    endings = [("trained", None), ("dropped", "generation failed 3 times: 3608 tokens"), ("rejected", "no face found")]
    for group, (event, reason) in enumerate(endings):
        entry = LedgerEntry("run", group, 0, event, reason, 0, None, None, None, 1, None)
        append_jsonl(folder / "ledger.jsonl", entry)
    scored = {"samples": 1, "asked": 2, "reasons": [{"reason": "no face found", "samples": 1}]}
    RunDirectory(folder).append_metrics(3, {"validation/reward": 1.0, **scored})
    assert main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    left_out = "1 of 2 samples not scored: no face found; it cannot be the best"
    assert lines[2] == f"validation of version 3: reward 1.000; {left_out}"
    assert lines[3:5] == [
        "1 of 3 groups was rejected: no face found",
        "1 of 3 groups was dropped: generation failed: 3608 tokens",
    ]


def test_edited_metrics_show_what_numbers_they_still_have_and_a_run_that_another_process_has_is_running_all_the_same(
    tmp_path, capsys
):
    folder = left(tmp_path / "run")
    edited = '{"update":1,"reward":"high","finished":1e300,"staleness/mean":0.5}\n'
    (folder / "metrics.jsonl").write_text(edited + '{"update":1,"validation/reward":"?","validation/ocr":[]}\n')
    assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "the last update was 1, staleness/mean 0.5"
    folder = left(tmp_path / "other", updates=0)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "other: it is running, but does not answer from here: it may be starting or ending, or run on another machine",
        "no update was made",
    ]


def test_a_summary_recorded_before_samples_were_counted_is_shown_with_the_counts_of_its_metrics(tmp_path, capsys):
    summary = over("done")
    folder = left(tmp_path / "run", updates=0, summary=summary)
    for version, reward, samples in ((0, 0.25, 2), (2, 0.5, 1)):
        RunDirectory(folder).append_metrics(version, {"validation/reward": reward, "samples": samples})
    plain = json.loads((folder / "summary.json").read_text())
    for name in ("validation_change", "drop_reasons"):
        del plain[name]
    for point in plain["validation"]:
        for name in ("samples", "asked", "reasons"):
            del point[name]
    (folder / "summary.json").write_text(json.dumps(plain))
    assert main(["status", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("validation of versions 0 to 2 (2 rounds): not comparable")
    assert lines[4] == "validation of version 2: reward 0.500; 1 of 2 samples not scored; it cannot be the best"


@pytest.mark.parametrize("content", [b"{", b'{"run":"\xff"}', b"[" * 100_000, None])
def test_a_folder_whose_summary_is_damaged_is_refused_in_one_line(tmp_path, capsys, content):
    folder = left(tmp_path / "run")
    if content is None:
        os.mkfifo(folder / "summary.json")  # it has no writer
    else:
        (folder / "summary.json").write_bytes(content)
    assert main(["status", str(folder)]) == 2
    assert "its summary or metrics cannot be read" in capsys.readouterr().err


def test_workers_are_asked_for_and_the_new_state_is_shown_and_a_run_is_stopped(tmp_path, capsys):
    with running(tmp_path / "run") as asked:
        assert main(["scale", str(tmp_path / "run"), "rollout=3", "reward=1"]) == 0
        said = capsys.readouterr().out
        assert main(["stop", str(tmp_path / "run")]) == 0
    assert asked == [Request(scale={"rollout": 3, "reward": 1}), Request(stop=True)]
    assert said.startswith("rollout-2: loading\nupdate 42/100") and "rollout-1" in said
    assert "checkpoint" in capsys.readouterr().out


EXPECTED = "expected rollout=N or reward=N with N from 1 to 100000"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("status", "there is no run in "),
        ("status nowhere", "nowhere is not a run folder"),
        ("scale run rollout=0", f"'rollout=0': {EXPECTED}"),
        ("scale run reward=100001", f"'reward=100001': {EXPECTED}"),
        (f"scale run rollout={'9' * 5000}", EXPECTED),
        ("scale run rollout=2 rollout=3", "'rollout=3': rollout is there twice"),
        ("scale run trainer=2", f"'trainer=2': {EXPECTED}"),
        ("scale run rollout", f"'rollout': {EXPECTED}"),
        ("scale run rollout=2", "run is not running here: control.sock: No such file or directory"),
        ("stop run", "run is not running here"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_run_in_runs_is_found_by_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with running(tmp_path / "runs" / "mine-20260101-120000"):
        assert main(["status", "mine-20260101-120000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_is_of_the_newest_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("newest", "older")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        config = tmp_path / "runs" / name / "config.yaml"
        config.write_text("")
        os.utime(config, (1e9 - number, 1e9 - number))
    results = [(main(words), *capsys.readouterr()) for words in (["status"], ["status", "runs/newest"])]
    assert results[0] == results[1] and "older" not in "".join(results[0][1:])

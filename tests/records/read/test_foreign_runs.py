"""Tests that a run folder from elsewhere names no file outside, and takes no more time and memory than a page needs."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from omni_async.cli import main
from omni_async.commands.report import pictures, staleness
from omni_async.commands.report.data import page_of
from omni_async.commands.report.shown import show
from omni_async.config import ConfigError
from omni_async.control.control_state import LedgerState
from omni_async.media import Media
from omni_async.records.read import line_files, record
from omni_async.records.read.columns import Columns
from omni_async.records.read.follow import Follower
from omni_async.records.read.record import read_run
from omni_async.records.read.spans import Actor, Placed, SpanLine, SpanStore
from omni_async.records.write import files
from omni_async.records.write.images import write_media
from omni_async.records.write.ledger_file import LedgerDamaged, require_prefix
from omni_async.records.write.rundir import RunDirectory, RunDirectoryError
from omni_async.records.write.summary import read_ending, write_summary
from omni_async.simulation.run_folder import read_measured
from omni_async.types import Span
from tests.fuzz.damage import a_socket
from tests.support.configs import make_summary
from tests.support.made_run import MadeRun

NAMES = ("metrics.jsonl", "ledger.jsonl", "spans.jsonl", "attempts.jsonl", "faults.jsonl", "summary.json", "trace.json")
MORE = ("summary.json.void", "profile.json", "changes.jsonl", ".lock", "control.sock", "weights")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made-20260101-120000"
    made.mkdir()
    MadeRun(groups=12).write(made)
    write_summary(made / "summary.json", make_summary(status="done", reason=None))
    return made


def page(folder: Path) -> str:
    return msgspec.json.encode(page_of([read_run(folder)], "now")).decode()


def polled(folder: Path) -> Follower:
    follower = Follower(folder)
    for _ in follower.poll():
        pass
    return follower


KINDS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: a_socket(path, random.Random()),
    "circle": lambda path: path.symlink_to(path.name),
    "outside": lambda path: path.symlink_to("/etc/passwd"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_in_the_place_of_a_file_is_left_out_with_its_reason(folder, kind, capsys):
    for name in (*NAMES, *MORE):
        (folder / name).unlink(missing_ok=True)
        KINDS[kind](folder / name)
    run = read_run(folder)
    [*run.spans()]
    assert {*NAMES} <= {*run.left_out} and run.updates == run.ledger == []
    assert all(f"{name}: " in page(folder) for name in NAMES)
    followed = polled(folder)
    assert {*NAMES} <= {*followed.left_out} and followed.problem
    for command in ("status", "stop", "simulate"):
        assert main([command, str(folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises((OSError, LedgerDamaged)):
        require_prefix(folder / "ledger.jsonl", LedgerState(1, {"trained": 1}, {}, {}, 9, "digest", {}))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_in_the_place_of_the_samples_and_their_files_is_left_out(folder, kind, capsys):
    rows = [{"prompt": "a", "image": "validation-000000-00.png", "video": "validation-000000-00.mp4"}]
    (folder / "samples" / "validation-000000.jsonl").write_bytes(msgspec.json.encode(rows[0]) + b"\n")
    for name in ("validation-000000-00.png", "validation-000000-00.mp4", "validation-000001.jsonl"):
        KINDS[kind](folder / "samples" / name)
    run = read_run(folder)
    assert page_of([run], "now") and "samples/validation-000001.jsonl" in run.left_out
    assert run.grids[0].tiles[0].image is None and "validation-000000-00.png" in run.left_out
    away = folder.with_name("elsewhere")
    (folder / "samples").rename(away)
    if kind == "outside":
        (folder / "samples").symlink_to(away)
    else:
        KINDS[kind](folder / "samples")
    run = read_run(folder)
    assert page_of([run], "now") and run.grids == []
    assert (kind in ("folder",)) or "samples" in run.left_out
    assert polled(folder).samples == []


def test_a_link_that_stays_in_the_folder_is_read_and_the_folder_may_be_a_link(folder):
    (folder / "kept").mkdir()
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (folder / name).rename(folder / "kept" / name)
        (folder / name).symlink_to(Path("kept") / name)
    other = folder.with_name("other-20260101-120000")
    other.symlink_to(folder)
    for path in (folder, other):
        run = read_run(path)
        assert run.left_out == {} and len(run.ledger) == 12 and run.updates
        assert len(polled(path).ended) == 12


def test_a_report_replaces_no_pipe_s_reader_and_no_file_that_the_recipe_names(folder, tmp_path, capsys):
    os.mkfifo(folder / "report.html")
    assert main(["report", str(folder)]) == 0 and (folder / "report.html").is_file()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    (folder / "config.yaml").write_text(f"data: {{prompts: {prompts}}}\n")
    assert main(["report", str(folder), "--out", str(prompts)]) == 2
    assert "--out" in capsys.readouterr().err and prompts.read_text() == "a cat\n"


@pytest.mark.parametrize("value", ['"a \\ud800"', str(10**400), ".nan"])
def test_a_value_that_no_page_can_hold_is_left_out_with_config_yaml(folder, value, capsysbinary):
    (folder / "config.yaml").write_text(f"buffer: {{groups: {value}}}\n")
    assert "config.yaml" in read_run(folder).left_out
    odd = folder.rename(folder.with_name(os.fsdecode(b"made\xff\n-20260101-120000")))
    assert main(["report", str(odd)]) == 0 and (odd / "report.html").read_bytes().decode()


def test_links_in_a_circle_are_no_run(tmp_path, capsys):
    (tmp_path / "run").symlink_to("run")
    for command in ("report", "status", "simulate", "export"):
        more = ["--out", str(tmp_path / "out")] if command == "export" else []
        assert main([command, str(tmp_path / "run"), *more]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_checkpoints_elsewhere_are_none_of_the_run(folder, tmp_path):
    away = tmp_path / "away"
    (away / "update-000001").mkdir(parents=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / "update-000001").symlink_to(away / "update-000001")
    assert read_run(folder).checkpoints == {}
    (folder / "checkpoints" / "update-000001").unlink()
    (folder / "checkpoints").rmdir()
    (folder / "checkpoints").symlink_to(away)
    assert read_run(folder).checkpoints == {} and "checkpoints" in read_run(folder).left_out


def test_no_file_that_a_recipe_names_is_read(folder, tmp_path):
    for name in ("secret.txt", "secret.jsonl", "secret.yaml"):
        (tmp_path / name).write_text('{"prompt": "the secret"}\n' * 97)
        (folder / "config.yaml").write_text(f"data: {{prompts: {tmp_path / name}}}\n")
        assert "the secret" not in page(folder) and "prompt 7" in page(folder)
        (folder / "config.yaml").write_text(f"extends: {tmp_path / name}\n")
        (folder / "profile.json").touch()
        with pytest.raises(ConfigError, match="leads out of its folder"):
            read_measured(folder)
    (folder / "config.yaml").write_text(f"model: {{path: {tmp_path}}}\ndata: {{prompts: a.txt}}\n")
    with pytest.raises(ConfigError, match=r"model\.pipeline: missing"):
        read_measured(folder)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".jsonl")])
def test_nothing_is_read_behind_a_line_that_no_run_writes(folder, name):
    path = folder / name
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before)
    os.truncate(path, len(before) + 2**30)
    run, followed = read_run(folder), polled(folder)
    assert len([*run.spans()]) >= 0 and f"has more than {files.LONGEST_LINE} bytes" in run.left_out[name]
    if name in ("metrics.jsonl", "ledger.jsonl"):
        assert run.updates and len(run.ledger) == len(followed.ended) == 12
        assert "nothing is read from there on" in followed.left_out[name]


def test_a_block_behind_a_long_line_has_a_bounded_number_of_lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * (line_files._BLOCK + 1) + b"\n" * 2**20)
    first, *rest = line_files.GrowingFile(path).blocks()
    assert len(first.lines) == 1 and max(len(block.lines) for block in rest) <= line_files._BLOCK


def test_what_is_held_of_a_file_is_bounded_in_lines_values_and_memory(folder, monkeypatch):
    assert read_run(folder).left_out == {}
    monkeypatch.setattr(files, "_MOST_MEMORY", 3000)
    run = read_run(folder)
    assert 0 < len(run.ledger) < 12 and "is read up to line" in run.left_out["ledger.jsonl"]
    monkeypatch.undo()
    assert files._memory(b'{"a":"\xc3\xa4"}', True) > files._memory(b'{"a":"aa"}', True)
    RunDirectory(folder).append_metrics(2, {"finished": 1.0})
    monkeypatch.setattr(record, "_MOST_UPDATES", 1)
    assert "is read up to line 1" in read_run(folder).left_out["metrics.jsonl"]
    monkeypatch.setattr(files, "_MOST_VALUES", 10)
    with pytest.raises(ValueError, match="more than 10 values"):
        files.decode_line(b"[" + b"1," * 10 + b"1]", msgspec.json.Decoder())


def test_the_status_of_a_killed_run_reports_lines_of_the_ledger_that_are_not_counted(folder, capsys):
    (folder / "summary.json").unlink()
    assert main(["status", str(folder)]) == 0 and "part of ledger.jsonl" not in capsys.readouterr().out
    with (folder / "ledger.jsonl").open("ab") as ledger:
        ledger.write(b"damaged\n")
    assert main(["status", str(folder)]) == 0
    assert "groups are counted from part of ledger.jsonl: 1 line cannot be read" in capsys.readouterr().out


NUMBERS = ("1e308", "1e160", "-1e160", "9" * 400, "1e400", "true", '"1"', f"{2**63}", "-1", "[]", "NaN")
OF_LEDGER = "group prompt attempts trained_version staleness admitted_version step_versions reward"
OF_METRICS = "update finished wall_s reward images_per_s standard_error samples"


def edited(line: dict[str, Any], names: Iterable[str], number: str) -> list[str]:
    """Returns the line once for each name, with the number under that name."""
    return [json.dumps({**line, name: "EDITED"}).replace('"EDITED"', number) for name in names]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_no_run_has_are_left_out_with_file_and_line(folder, number, capsys):
    run = RunDirectory(folder)
    for path, names in ((run.ledger, OF_LEDGER), (run.metrics, OF_METRICS)):
        *lines, last = path.read_text().splitlines()
        path.write_text("\n".join([*lines, *edited(json.loads(last), names.split(), number)]) + "\n")
    attempt = {"began": 1, "ended": 2, "status": "done", "reason": None, "from_update": 0, "to_update": 1, "wall_s": 1}
    fault = {"time": 1, "part": "trainer", "reason": "", "replacement": "", "seconds": 1}
    for path, one in ((run.attempts, attempt), (run.faults, fault)):
        numbers = [name for name, value in one.items() if isinstance(value, int)]
        path.write_text("\n".join(edited(one, numbers, number)) + "\n")
    summary = folder / "summary.json"
    summary.write_text(edited(json.loads(summary.read_text()), ["wall_s"], number)[0])
    found = read_run(folder)
    assert "the first is line 12" in found.left_out["ledger.jsonl"] and len(found.ledger) in range(11, 20)
    assert found.summary is None and "summary.json" in found.left_out
    damaged = ("attempts.jsonl",) if number == "-1" else ("attempts.jsonl", "faults.jsonl")
    assert all("the first is line " in found.left_out[name] for name in damaged)
    first = page_of([found], "now")["sections"][0]
    assert first["id"] == "verdict" and "summary.json: cannot be read" in json.dumps(first)
    assert polled(folder).lines_cut >= 1
    assert main(["status", str(folder)]) == 2
    assert "its summary or metrics cannot be read" in capsys.readouterr().err
    summary.unlink()
    assert main(["status", str(folder)]) == 0
    RunDirectory(folder).wall_s(1)
    assert read_ending(summary) == (None, 0)


@pytest.mark.parametrize("name", ["origin_s", "ts", "dur"])
@pytest.mark.parametrize("number", NUMBERS[:8])
def test_times_that_no_clock_has_are_left_out_of_the_timeline(folder, name, number):
    made = MadeRun(groups=6)
    (folder / "spans.jsonl").unlink()
    made.write(folder, over=True)
    text = (folder / "trace.json").read_text()
    first = text.index(f'"{name}":') + len(name) + 3
    end = min(at for at in (text.find(",", first), text.find("}", first)) if at > 0)
    (folder / "trace.json").write_text(text[:first] + number + text[end:])
    assert page(folder)
    followed = polled(folder)
    assert followed.spans.window(followed.spans.start, followed.spans.end + 1, 0, 1, 10, 100)


# ---- what is made of it ----------------------------------------------------------------------------------------------


def test_ages_workers_tracks_columns_and_names_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(staleness, "_MOST_AGES", 4)
    entries = [msgspec.structs.replace(MadeRun(groups=40).entry(0), group=n, staleness=n) for n in range(40)]
    (folder / "ledger.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(entries))
    _, chart = staleness.staleness(show([read_run(folder)])).tabs[0].blocks
    assert [one.name for one in chart.series] == [*(f"staleness {n}" for n in range(3)), "staleness 3 and more"]
    assert sum(one.y[0] for one in chart.series) == pytest.approx(1)

    monkeypatch.setattr("omni_async.records.read.run_spans._MOST_SLOTS", 3)
    spans = [Span(f"rollout-{n % 9}", "generate", 1000.0 + n, 1001.0 + n, {}) for n in range(18)]
    (folder / "spans.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(spans))
    run = read_run(folder)
    assert {span.actor for span in run.spans()} == {"rollout-0", "rollout-1", "rollout-2"}
    assert "more than 3 workers" in run.left_out["spans.jsonl"]

    monkeypatch.setattr("omni_async.records.read.spans._MOST_TRACKS", 3)
    monkeypatch.setattr("omni_async.records.read.spans._MOST_ACTORS", 5)
    actor, store = Actor("trainer"), SpanStore()
    assert [actor.track_of(0.0, 9.0) for _ in range(5)] == [0, 1, 2, 2, 2]
    store.add([Placed(SpanLine(f"rollout-{n}", f"k{n}" * 200, 0.0, 1.0), 0, 1) for n in range(20)])
    assert len(store.lanes()) == 6 and max(map(len, store.kinds)) == 200

    monkeypatch.setattr("omni_async.records.read.columns._MOST_NUMBERS", 300)
    columns = Columns()
    assert [columns.add({"a": 1}) for _ in range(4)] == [True, True, True, False] and len(columns) == 3


def test_only_the_tables_that_a_page_shows_are_read(folder, monkeypatch):
    for n in range(200):
        (folder / "samples" / f"validation-{n:06d}.jsonl").write_text('{"prompt": "a"}\n' * 5)
    monkeypatch.setattr(record, "_MOST_TILES", 3)
    tables, read = list[Path](), record.read_foreign
    monkeypatch.setattr(record, "read_foreign", lambda path, *a, **more: tables.append(path) or read(path, *a, **more))
    run = read_run(folder)
    page_of([run], "now")
    assert sum(path.parent.name == "samples" for path in tables) == 24 and len(run.grids) == 200
    assert len(run.grids[0].tiles) == 3


def test_pixels_and_bytes_of_images_are_bounded(folder, monkeypatch):
    path = folder / "samples" / "validation-000000-00.png"
    embedded = lambda: pictures._Embedded(folder / "samples")(path)  # noqa: E731
    Image.new("L", (400, 300)).save(path)
    assert embedded().startswith("data:image/webp")
    for name, bound in (("_MOST_PIXELS", 400 * 300 - 1), ("_MOST_DECODED", 400 * 300 - 1), ("_LARGEST", 100)):
        with monkeypatch.context() as patch:
            patch.setattr(pictures, name, bound)
            assert embedded() == ""
    path.write_bytes(b"GIF89a" + bytes(100))
    assert embedded() == "" and pictures._side(path, folder / "samples") == 0


def test_a_socket_elsewhere_is_not_asked(folder, tmp_path, capsys):
    (folder / "summary.json").unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        (folder / "control.sock").symlink_to(tmp_path / "s")
        assert main(["stop", str(folder)]) == 2
    assert "leads out of its folder" in capsys.readouterr().err


def test_an_answer_of_another_version_is_reported(folder, monkeypatch, capsys):
    KINDS["socket"](folder / "control.sock")
    monkeypatch.setattr("omni_async.commands.operate.ask", lambda *_, **__: {"progress": {"update": None}})
    assert main(["status", str(folder)]) == 2
    assert "this version does not know its answer" in capsys.readouterr().err


# ---- continuing in it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["samples", "checkpoints", "weights"])
def test_no_run_goes_on_in_a_folder_with_a_link_in_the_place_of_a_folder(folder, tmp_path, name):
    away = tmp_path / "away"
    away.mkdir()
    if (folder / name).is_dir():
        (folder / name).rename(tmp_path / "old")
    (folder / name).symlink_to(away)
    with pytest.raises(RunDirectoryError, match="is a link; the whole run folder may be one instead"):
        RunDirectory.reopen(folder)
    assert not [*away.iterdir()]
    whole = tmp_path / "whole-20260101-120000"
    (folder / name).unlink()
    whole.symlink_to(folder)
    RunDirectory.reopen(whole).release()


@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl"])
def test_no_run_goes_on_from_lines_that_are_elsewhere_or_cannot_be_read(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/etc/passwd")
    with pytest.raises(RunDirectoryError, match="leads out of its folder"):
        RunDirectory.reopen(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(RunDirectoryError, match=f"{name} cannot be read"):
        RunDirectory(folder).wall_s(3)


def test_samples_are_written_through_no_link(folder, tmp_path):
    (tmp_path / "kept").write_bytes(b"kept")
    (folder / "samples" / "train-000001-00.png").symlink_to(tmp_path / "kept")
    write_media(Media(image=np.zeros((3, 4, 4), np.uint8)), folder / "samples" / "train-000001-00")
    assert (tmp_path / "kept").read_bytes() == b"kept"
    assert not (folder / "samples" / "train-000001-00.png").is_symlink()

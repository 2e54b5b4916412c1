"""Tests with the library itself, offline: what it leaves is read back; it may neither report nor capture anything."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from omni_async.config import schema
from omni_async.records.write.sinks.base import SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.wandb_sink import WandbSink
from tests.records.write.sinks.sink_world import about, serving, tell
from tests.support.patience import PATIENCE
from tests.support.places import ROOT

_BLOCK, _HEADER, _FIRST = 32768, struct.Struct("<IHB"), 7  # of the library's file: LevelDB's log, after 7 bytes


_DENIED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextmanager
def proxy() -> Iterator[tuple[dict[str, str], list[str]]]:
    """Refuses whatever wants to reach the network; yields the environment that leads here, and what was asked."""
    asked: list[str] = []

    class Denying(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            asked.append(self.rfile.readline().decode())
            self.wfile.write(_DENIED)

    with serving(Denying) as address:
        yield dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address), asked


def work(folder: Path, status: str, goes_on: bool) -> subprocess.CompletedProcess[str]:
    """Runs `main` in a process of its own, as the library keeps a process and settings per process."""
    with proxy() as (environment, asked):
        command = [sys.executable, "-m", "tests.records.write.sinks.test_wandb_sink", str(folder), status, str(goes_on)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert asked == [] and done.returncode == 0, (asked, done.stderr)
    return done


def main(folder: Path, status: Any, goes_on: bool) -> None:
    sink = WandbSink(schema.Wandb(enabled=True), about(folder, goes_on))
    sinks = Sinks([sink])
    if goes_on:
        assert sink.where == "", "it stays as it is until it has begun"
    sinks.begin(0)
    sys.stdout.write("a line of the run\n")
    tell(sinks)
    (folder / "summary.json").write_text("{}")
    sinks.artifact(folder / "summary.json")
    sinks.finish(status)
    sys.stdout.write(f"{sink.where}\n")


def records(file: Path) -> list[Any]:
    """Reads the records of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, part, found = file.read_bytes(), _FIRST, b"", []
    while at + _HEADER.size <= len(content):
        if (left := _BLOCK - at % _BLOCK) < _HEADER.size:
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(content, at)
        at += _HEADER.size + size
        part += content[at - size : at]
        if kind in (1, 4):  # whole, or the last part of one
            found.append(Record.FromString(part))
            part = b""
    return found


def test_an_offline_run_has_its_numbers_image_file_and_end_and_goes_on_as_itself(tmp_path):
    folder = tmp_path / "run-1"
    for status, code in (("interrupted", 255), ("done", 0)):
        before = {*folder.glob("wandb/offline-run-*/*.wandb")}
        done = work(folder, status, goes_on=status == "done")
        line, where = done.stdout.splitlines()
        assert line == "a line of the run" and done.stderr == "", "nothing is captured or printed besides"
        assert "wandb sync " in where and where.endswith("/run-1/wandb/offline-run-*")
        (file,) = {*folder.glob("wandb/offline-run-*/*.wandb")} - before
        assert file.name == "run-run-1.wandb"

        found = records(file)
        kinds = {record.WhichOneof("record_type"): record for record in found}
        assert not kinds.keys() & {"output", "output_raw", "stats", "environment", "alert"}
        run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.project, list(run.tags)) == ("run-1", "omni_async", ["qwen_image", "flow_grpo", "S=2"])
        assert "omni-async report" in run.notes and kinds["exit"].exit.exit_code == code
        rows = [
            {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in found
            if record.WhichOneof("record_type") == "history"
        ]
        numbers = [(row["update"], row.get("goal/reward"), row.get("goal/validation_reward")) for row in rows[:3]]
        assert numbers == [(1, 0.25, None), (2, 0.5, None), (1, None, 0.75)]
        assert rows[3]["goal/validation/_type"] == "image-file" and rows[3]["update"] == 1
        saved = {file.path for record in found for file in record.files.files}
        assert "summary.json" in saved and any(path.startswith("media/images/goal/validation") for path in saved)


def test_an_account_that_cannot_be_used_is_refused_in_one_line_without_its_key(tmp_path, monkeypatch):
    key = "k" * 40
    with proxy() as (environment, asked):
        environment |= {"WANDB_INIT_TIMEOUT": f"{PATIENCE:g}", "NO_PROXY": "", "no_proxy": ""}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        config = schema.Wandb(enabled=True, mode="online", api_key=key, base_url="http://wandb.invalid")
        with pytest.raises(SinkUnusableError, match=r"^tracking\.wandb: cannot start a run: .*mode=offline") as refused:
            WandbSink(config, about(tmp_path / "run-1"))
    assert asked, "what the offline runs did not ask for"
    assert key not in str(refused.value) and "\n" not in str(refused.value)

    def refuse(sink: WandbSink) -> None:
        raise ValueError("https://me:hunter2@h failed")

    monkeypatch.setattr(WandbSink, "_open", refuse)
    with pytest.raises(SinkUnusableError, match=r"cannot start a run: https://\*\*\*@h failed;"):
        WandbSink(schema.Wandb(enabled=True), about(tmp_path / "run-1"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True")

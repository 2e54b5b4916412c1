"""The world of damaged run folders: whole runs to copy, one case of damage, and what every command makes of it.

A case is known by a seed and a number. `Case.of` draws the run, its state, the file, the damage and the commands of it;
`play` makes the folder, runs the commands in this process, and returns the problems of how they ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import msgspec
import numpy as np

from omni_async.cli import main
from omni_async.config import ConfigError
from omni_async.media import Media
from omni_async.simulation.what_if import measured_step
from omni_async.types import WeightReport
from tests.fuzz import damage
from tests.support.recorded_runs import place

MARK = "kept out of every result"
_FULL, _LORA = "full-20261125-210306", "lora-20261125-210320"
_KEYS = {
    _FULL: ("run.name=full", "trainer.updates=5"),
    _LORA: (
        "run.name=lora",
        "model.lora={rank: 2, alpha: 64}",
        "trainer.optimizer={name: adamw, lr: 1.0e-3}",
        "trainer.ema={every: 1}",
        "weights.payload=lora",
        "trainer.updates=4",
    ),
}
STATES = ("finished", "killed", "running")
_STATES_WITH = {"spans.jsonl": STATES[1:], "trace.json": STATES[:1], "summary.json": STATES[:1]}
MOST_BYTES = 300 * 2**20  # above the undamaged folder
_KILLED_AT_CPU_S, _ROOM = 15.0, 3 * 2**30


# ---- whole runs ------------------------------------------------------------------------------------------------------


def build(base: Path) -> None:
    """Make the model, the recipe and the runs that cases copy: every file that a run folder can have is in them."""
    base.mkdir(parents=True, exist_ok=True)
    runs = place(base)
    recipe = base / "recipe.yaml"
    recipe.write_text(
        recipe.read_text().replace("[{name: jpeg_size}]}", "[{name: jpeg_size}], backoff_s: 0, outage_s: 1}")
    )
    for run in runs.iterdir():
        _complete(run)
    tables = base / "tables"
    tables.mkdir()
    media = Media(
        image=np.zeros((3, 8, 8), np.uint8),
        video=np.zeros((5, 3, 16, 16), np.uint8),
        fps=5.0,
        audio=np.zeros((1, 400), np.float32),
        sample_rate=8000,
    )
    from omni_async.records.write.images import write_media

    for folder in (tables, runs / _FULL / "samples"):
        write_media(media, folder / ("media" if folder == tables else "train-000004-07"))
    rows = [{"prompt": "a", "image": "media.png", "n": 1}, {"prompt": "b", "image": "media.png", "target": "7"}]
    (tables / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tables / "rows.csv").write_text('prompt,image,metadata\na,media.png,\nb,media.png,"{""n"": 1}"\n')
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), tables / "rows.parquet")


def _complete(run: Path) -> None:
    """Add the files that neither recorded run has, and leave two samples of each grid."""
    config = run / "config.yaml"
    config.write_text(
        config.read_text().replace("backoff_s: 1.0", "backoff_s: 0.0").replace("outage_s: 600.0", "outage_s: 1.0")
    )
    for table in (run / "samples").glob("*.jsonl"):
        lines = table.read_text().splitlines(keepends=True)
        table.write_text("".join(lines[:2]))
    for tile in (run / "samples").glob("*-0[2-9].png"):
        tile.unlink()
    full = run / "samples" / "train-000004.jsonl"
    if full.exists():
        more = {"prompt": "7", "video": "train-000004-07.mp4", "audio": "train-000004-07.wav", "reward": 0.5}
        full.write_text(full.read_text() + json.dumps({**more, "text": "7", "parts": {"x": 1.0}}) + "\n")
    fault = {"time": 1795640590.0, "part": "rollout-0", "reason": "killed", "replacement": "rollout-1", "seconds": 2.0}
    change = {"update": 2, "key": "trainer.optimizer.lr", "before": 1.0, "now": 2.0}
    action = {"time": 1795640590.0, "action": "stop", "workers": {}, "address": "", "result": "done", "seconds": 0.1}
    for name, line in (("faults", fault), ("changes", change), ("actions", action)):
        (run / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    from omni_async.records.read.trace_file import read_trace

    spans = read_trace(run / "trace.json")
    (run / "spans.jsonl").write_bytes(b"".join(msgspec.json.encode(span, enc_hook=str) + b"\n" for span in spans))
    shutil.copy(run / "summary.json", run / "summary.json.void")
    shutil.copy(run / "metrics.jsonl", run / "metrics.jsonl.void")
    shutil.copytree(run / "checkpoints" / "update-000002" / "tensors", run / "weights" / "version-000002")


def simulate_known_once() -> None:
    """Let a report simulate the recipe and profile of an undamaged run once.

    The simulation takes a second. A damaged recipe or profile is simulated each time."""
    from omni_async.commands.report import what_it_buys

    real, known = what_it_buys.what_if, dict[str, Any]()

    def what_if(config: Any, profile: Any, finished: Sequence[float] = (), **more: Any) -> Any:
        key = repr((config, profile))
        if key not in known:
            known[key] = real(config, profile, finished, **more)
        took, _ = measured_step(config, finished)
        return msgspec.structs.replace(known[key], measured_s=took)

    what_it_buys.what_if = what_if


def be_quick() -> None:
    """Draw black images in place of a model's, and simulate each job once."""
    from omni_async.commands.evaluation import drawing
    from omni_async.simulation import what_if

    drawing.DiffusersEngine = _Black
    what_if._SEEDS = 1


class _Black:
    """An engine that takes any weights, and draws black."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def start(self) -> WeightReport:
        return WeightReport("rollout-0", 0, "")

    async def close(self) -> None:
        pass

    async def stage(self, manifest: Any, buckets: Any) -> None:
        pass

    async def swap(self, version: int) -> None:
        pass

    async def generate(self, request: Any) -> Any:
        return SimpleNamespace(media=Media(image=np.zeros((3, 8, 8), np.uint8)))


# ---- cases -----------------------------------------------------------------------------------------------------------

_READ_BY: dict[str, tuple[str, ...]] = {
    "samples": ("report", "watch", "score", "export"),
    "checkpoints": ("export", "eval", "resume", "train"),
    "weights": ("report", "watch"),
    "config.yaml": ("report", "watch", "status", "export", "eval", "score", "resume"),
    "metrics.jsonl": ("report", "watch", "status", "export", "resume", "train"),
    "metrics.jsonl.void": ("report", "resume"),
    "ledger.jsonl": ("report", "watch", "status", "resume", "train"),
    "attempts.jsonl": ("report", "watch", "status", "resume", "train"),
    "faults.jsonl": ("report", "watch", "train"),
    "changes.jsonl": ("report", "watch", "export"),
    "actions.jsonl": ("watch",),
    "spans.jsonl": ("report", "watch", "train"),
    "trace.json": ("report", "watch"),
    "summary.json": ("report", "watch", "status", "resume", "train"),
    "summary.json.void": ("report", "status", "resume"),
    "profile.json": ("report", "watch"),
    "control.sock": ("watch", "status", "report"),
    ".lock": ("status", "watch", "report", "resume"),
    "": ("report", "watch", "status", "export", "eval", "score", "resume"),
}
_SHARE = {"checkpoints": 8.0, "samples": 5.0, "tables": 3.0, "control.sock": 2.0}
_SHARE |= {"metrics.jsonl": 3.0, "config.yaml": 3.0}


@dataclass(frozen=True)
class Case:
    """One damage and the commands that read the damaged files. file: below the run folder, or below `tables`."""

    seed: int
    number: int
    run: str
    state: str
    file: str
    damage: str
    signed: bool
    commands: tuple[str, ...]

    @classmethod
    def of(cls, base: Path, seed: int, number: int, quick: bool = False) -> Case:
        """Draw a case; a `quick` one has the first of its commands alone, and trains no update."""
        rng = random.Random(f"{seed}/{number}")
        run = rng.choice((_FULL, _LORA))
        files = _files(base, run)
        of_kind = rng.choices([*files], [_SHARE.get(kind, 1.0) for kind in files])[0]
        file = rng.choice(files[of_kind])
        if of_kind == "control.sock":
            how, state = rng.choice((*_ANSWERS, "a_fifo", "a_link", "a_device", "a_folder")), "running"
        else:
            path = base / ("tables" if of_kind == "tables" else f"runs/{run}") / file
            damages = damage.damages_of(path)
            how, state = rng.choice(damages).__name__, rng.choice(_STATES_WITH.get(file, STATES))
        readers = ("score",) if of_kind == "tables" else _READ_BY[of_kind]
        if state == "running":
            readers = tuple(name for name in readers if name not in ("resume", "train")) or ("resume",)
        commands = tuple(rng.sample(readers, min(len(readers), 2)))
        if quick:
            commands = ("resume" if commands[0] == "train" else commands[0],)
        return cls(seed, number, run, state, f"tables/{file}" if of_kind == "tables" else file, how,
                   rng.random() < 0.7, commands)  # fmt: skip

    def __str__(self) -> str:
        signed = ", manifest signed again" if self.signed and self.file.startswith("checkpoints") else ""
        return f"case {self.number}: {self.run} {self.state}: {self.damage} of {self.file or '.'}{signed}"


def _files(base: Path, run: str) -> dict[str, list[str]]:
    """Return the files and folders that can be damaged, by the name of the first part of their path."""
    folder = base / "runs" / run
    found: dict[str, list[str]] = {"": [""], "control.sock": ["control.sock"]}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found.setdefault(name.partition("/")[0], []).append(name)
    found["tables"] = sorted(path.name for path in (base / "tables").iterdir())
    return found


# ---- a case in this process ------------------------------------------------------------------------------------------


@dataclass
class Played:
    """How a command ended. outcome: `used`, `refused`, `failed`, or `FAULT`, with the `problems`."""

    command: str
    outcome: str
    cpu_s: float
    grown: int
    problems: list[str] = field(default_factory=list)


def play(base: Path, top: Path, case: Case | None, commands: Sequence[str]) -> list[Played]:
    """Make a case, or the undamaged run, in the empty folder `top` and run these commands."""
    rng = random.Random(f"{case.seed}/{case.number}/damage" if case else 0)
    place_ = _Place(base, top, case.run if case else _FULL)
    place_.copy("finished" if case is None else case.state)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_worker_of(top))
        running = case is not None and case.state == "running"
        if case is not None:
            try:
                _apply(place_, case, rng)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                return [Played("-", f"not applicable: {error!r}", 0.0, 0)]
        if running:
            answers = case.damage if case and case.file == "control.sock" else "well"
            stack.enter_context(_job(place_.run, answers, rng))
        if case is not None and case.damage == "a_link" and case.file in ("", "."):
            commands = [one for one in commands if one not in _CONTINUING]  # the user names the link
        return [_played(place_, command, rng) for command in commands]


_CONTINUING = ("resume", "train")  # write into the run folder


def _apply(place_: _Place, case: Case, rng: random.Random) -> None:
    if case.file == "control.sock" and case.damage in _ANSWERS:
        return
    path = place_.top / case.file if case.file.startswith("tables/") else place_.run / case.file
    if case.file == "control.sock":
        path.touch()
    place_.damaged = path
    damage._NAMED[case.damage](path, rng)
    parts = Path(case.file).parts
    if case.signed and parts[:1] == ("checkpoints",) and len(parts) > 2 and parts[-1] != "manifest.json":
        damage.sign(place_.run / parts[0] / parts[1])


@dataclass
class _Place:
    """The folders of a case: `top`/runs, tables, outside (which nothing may touch), cwd and tmp."""

    base: Path
    top: Path
    name: str
    damaged: Path | None = None
    named: Path | None = None  # by the user of a command, who may name a link

    @property
    def run(self) -> Path:
        return self.top / "runs" / self.name

    @property
    def out(self) -> Path:
        return self.top / "cwd" / "out"

    def copy(self, state: str) -> None:
        for folder in ("cwd/out", "tmp", "outside"):
            (self.top / folder).mkdir(parents=True)
        shutil.copytree(self.base / "runs" / self.name, self.run)
        shutil.copytree(self.base / "tables", self.top / "tables")
        outside = self.top / "outside"
        (outside / "secret.txt").write_text(f"{MARK}\n")
        for name in ("secret.jsonl", "secret.json"):
            (outside / name).write_text(json.dumps({"prompt": MARK, "image": "secret.png", "text": MARK}) + "\n")
        (outside / "secret.yaml").write_text(f"run: {{name: '{MARK}'}}\n")
        picture = self.base / "tables" / "media.png"
        (outside / "secret.png").write_bytes(picture.read_bytes() + MARK.encode())
        if state == "finished":
            (self.run / "spans.jsonl").unlink()
        else:
            for name in ("summary.json", "trace.json"):
                (self.run / name).unlink()

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Return the state of everything but the results. No command may change it; some may change the run folder."""
        shared = [self.base / name for name in ("recipe.yaml", "prompts.txt", "validation.txt", "model", "runs")]
        found = [*self.top.rglob("*"), *shared]
        return {str(path): _state(path) for path in found if self.out not in (path, *path.parents)}


def _state(path: Path) -> tuple[Any, ...]:
    try:
        found = path.lstat()
    except OSError:
        return ()
    is_small = path.is_file() and not path.is_symlink() and found.st_size < 2**20
    size = 0 if path.is_dir() and not path.is_symlink() else found.st_size
    return (
        found.st_mode,
        size,
        found.st_ino,
        0 if not size else found.st_mtime_ns,
        path.read_bytes() if is_small and size else b"",
    )


@contextlib.contextmanager
def _worker_of(top: Path) -> Iterator[None]:
    """Work in the case's folder, with its folder for temporary files."""
    before, path = Path.cwd(), [*sys.path]
    os.chdir(top / "cwd")
    os.environ["TMPDIR"], tempfile.tempdir = str(top / "tmp"), None
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        del os.environ["TMPDIR"]
        tempfile.tempdir = None


def _played(place_: _Place, command: str, rng: random.Random) -> Played:
    shutil.rmtree(place_.out)
    place_.out.mkdir()
    place_.named = place_.run
    before, own = place_.snapshot(), str(place_.run)
    out, err = io.StringIO(), io.StringIO()
    problems: list[str] = []
    _forget_peak()
    began, grown = time.process_time(), _memory("VmRSS")
    code: int | None = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = COMMANDS[command](place_, rng, problems)
    except SystemExit as error:
        problems.append(f"SystemExit {error.code!r}")
    except BaseException:  # noqa: BLE001 (every one is a fault)
        problems.append("raised: " + _tail(traceback.format_exc()))
    cpu_s, grown = time.process_time() - began, _memory("VmHWM") - grown
    said, told = out.getvalue(), err.getvalue()
    problems += _wrong_output(code, said, told)
    after = place_.snapshot()
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    may_write = command in ("resume", "train")
    changed = [path for path in changed if not (may_write and path.startswith(own))]
    if command == "train":  # downloaded or compiled files belong to no case
        changed = [path for path in changed if not path.startswith(str(place_.top / "tmp"))]
    problems += [f"changed {path[len(str(place_.top)) + 1 :]!r}" for path in changed[:3]]
    if place_.damaged is None or place_.damaged != place_.named:
        problems += _leaked(place_, said + told)
    outcome = "FAULT" if problems else {0: "used", 2: "refused"}.get(code or 0, "failed")
    return Played(command, outcome, cpu_s, grown, problems)


def _tail(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if "^^^" not in line]
    return " | ".join(lines[-7:])[-1200:]


def _wrong_output(code: int | None, out: str, err: str) -> Iterator[str]:
    if code is not None and code not in (0, 1, 2):
        yield f"exit code {code}"
    if "Traceback" in err or "Traceback" in out:
        yield "traceback on stderr: " + _tail(err if "Traceback" in err else out)
        return
    lines = err.split("\n")
    if long := [line for line in lines if len(line) > 2100]:
        yield f"a line of {len(long[0])} characters on stderr: {long[0][:200]!r}"
    if code == 2 and (len(lines) < 2 or not lines[-2].startswith("omni-async: ")):
        yield f"exit code 2 without a line: {err[-300:]!r}"
    for line in (*lines, *out.split("\n")):
        if bad := [c for c in line if not c.isprintable() and c not in "\t\r"]:
            yield f"control characters {bad[0]!r} in {line[:200]!r}"
            return


def _leaked(place_: _Place, text: str) -> Iterator[str]:
    if MARK in text:
        yield "shows what is in a file outside the folder"
    for path in place_.out.rglob("*"):
        if path.is_symlink():
            yield f"left a link: {path.name}"
        elif path.is_file() and path.stat().st_size < 2**25 and MARK.encode() in path.read_bytes():
            yield f"{path.name} holds what is in a file outside the folder"


# ---- memory ----------------------------------------------------------------------------------------------------------


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


# ---- commands --------------------------------------------------------------------------------------------------------


def _strict(text: str | bytes, problems: list[str], what: str) -> Any:
    try:
        return msgspec.json.decode(text)  # takes neither NaN nor Infinity
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problems.append(f"{what} is no JSON: {error}")
        return None


def _report(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    page = place_.out / "report.html"
    code = main(["report", str(place_.run), "--out", str(page)])
    if code == 0:
        found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
        if found:
            _strict(found[1], problems, "the page's data")
    return code


def _status(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    code = main(["status", str(place_.run)])
    as_json = io.StringIO()
    with contextlib.redirect_stdout(as_json):
        again = main(["status", str(place_.run), "--json"])
    if again == 0:
        _strict(as_json.getvalue(), problems, "status --json")
    return code


def _export(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    which, merged = rng.choice(("best", "last", "2")), ["--merged"] * (place_.name == _LORA and rng.random() < 0.5)
    out = place_.out / "exported"
    code = main(["export", str(place_.run), "--which", which, *merged, "--out", str(out)])
    if code == 0:
        from safetensors import safe_open

        for file in out.rglob("*.safetensors"):
            with safe_open(file, "np") as tensors:
                [*tensors.keys()]
        if not (out / "README.md").is_file():
            problems.append("an export without its card")
    elif out.exists() or [*place_.out.iterdir()]:
        problems.append(f"left {[path.name for path in place_.out.iterdir()]} behind")
    return code


def _eval(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    out = place_.out / "compared"
    words = ["--which", rng.choice(("base,2", "last", "best")), "--seeds", "1", "--limit", "1", "--steps", "2"]
    code = main(["eval", str(place_.run), *words, "--out", str(out)])
    if code == 0:
        _strict((out / "results.json").read_bytes(), problems, "results.json")
    return code


def _score(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    table = (
        place_.top / "tables" / rng.choice(("rows.jsonl", "rows.csv", "rows.parquet", "media.png", "media.mp4", "."))
    )
    place_.named = what = rng.choice((place_.run, table))
    out = place_.out
    words = ["--json", str(out / "s.json"), "--out", str(out / "s.csv"), "--grid", str(out / "g.png")]
    code = main(["score", str(place_.base / "recipe.yaml"), str(what), *words])
    if code == 0:
        _strict((out / "s.json").read_bytes(), problems, "s.json")
        lines = (out / "s.csv").read_text().splitlines()
        problems += [f"a formula in the CSV: {line[:200]!r}" for line in lines if re.search(r'(^|,)"?[=@+]', line)]
    return code


def _recipe_words(place_: _Place) -> list[str]:
    keys = (*_KEYS[place_.name], f"run.dir={place_.top}/runs", f"checkpoint.resume={place_.run}")
    return [str(place_.base / "recipe.yaml"), *keys]


def _resume(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    """Find the checkpoint, and take the folder over as a resumed run does before its first update."""
    from omni_async.config import load
    from omni_async.records.write.rundir import RunDirectory, RunDirectoryError
    from omni_async.records.write.span_log import SpanLog
    from omni_async.runtime.preflight.resume import nothing_to_do

    words = _recipe_words(place_)
    if rng.random() < 0.3:
        words[-1] = "checkpoint.resume=auto"
    code = main(["check", *words, "--no-probe"])
    config = load(words[0], words[1:])
    nothing_to_do(config)
    try:
        reopened = RunDirectory.reopen(place_.run)
        try:
            reopened.take_over(config, 2, 2)
            SpanLog(reopened.spans, 1.0, held=True).begin_file()
        finally:
            reopened.release()
    except (RunDirectoryError, ConfigError) as error:
        if "\n" in str(error) or len(str(error)) > 2000:
            problems.append(f"more than a line: {str(error)[:300]!r}")
    return code


def _train(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    return main(["train", *_recipe_words(place_)])


def _watch(place_: _Place, rng: random.Random, problems: list[str]) -> int:
    if not (place_.run / "config.yaml").is_file():
        return main(["watch", str(place_.run)])
    asyncio.run(_look_at_page(place_, rng, problems))
    return 0


async def _look_at_page(place_: _Place, rng: random.Random, problems: list[str]) -> None:
    from aiohttp.test_utils import TestClient, TestServer

    from omni_async.commands.watch.app import WatchApp
    from omni_async.commands.watch.guard import Guard
    from omni_async.commands.watch.lives import Lives

    lives = Lives(place_.run, is_one=True)
    live, keeping = lives._open[place_.run.name]
    keeping.cancel()  # looks are taken here
    app = WatchApp(lives, Guard("127.0.0.1", None)).app()
    async with TestClient(TestServer(app)) as client:
        await live.look()
        if live._reporting:
            await live._reporting
        await live.look()
        _strict(live.message(), problems, "the page's news")
        _strict(live.report, problems, "the page's report")
        shown = [problem for problem in (live.problem, live.report_problem) if problem]
        ours = [problem for problem in shown if re.search(r": (?!ConfigError)\w+(Error|Exception|Exceeded): ", problem)]
        problems += [f"the page shows a mistake of ours: {problem[:500]}" for problem in ours]
        names = sorted(path.name for path in (place_.run / "samples").glob("*"))[:50] if rng.random() < 0.99 else []
        group, name = rng.randrange(8), rng.choice(names) if names else "none.png"
        window = "from=0&to=1e3&first=0&last=9&columns=100"
        for path in ("/api/report", f"/api/window?{window}", f"/api/group/{group}", f"/samples/{quoted(name)}"):
            async with client.get(path) as response:
                content = await response.read()
                if response.status >= 500:
                    problems.append(f"{path}: {response.status}: {content[:500]!r}")
                if MARK.encode() in content:
                    problems.append(f"{path} holds what is in a file outside the folder")


def quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(os.fsencode(name), safe="")


COMMANDS: dict[str, Callable[[_Place, random.Random, list[str]], int]] = {
    "report": _report,
    "watch": _watch,
    "status": _status,
    "export": _export,
    "eval": _eval,
    "score": _score,
    "resume": _resume,
    "train": _train,
}


# ---- a job that answers ----------------------------------------------------------------------------------------------

_STATUS: dict[str, Any] = {
    "parts": {"rollout-0": {"pid": 100}, "reward-0": {"pid": 101}, "trainer": {"pid": 99}},
    "engines": {"rollout-0": 3},
    "addresses": {"rollout-0": "10.0.0.1"},
    "faults": 0,
    "conservation": {"admitted": 40, "trained": 30, "rejected": 2, "dropped": 0, "live": 8},
    "reasons": {"zero reward variance": 2},
    "drop_reasons": {"scorer down": 1},
    "buffers": {
        "slots": {"capacity": 12, "live": 8, "awaiting_publication": 0},
        "trajectories": {"capacity": 96, "reserved": 60, "ready": 4},
        "bytes": {"capacity": None, "reserved": 2_000_000, "ready": 1_000_000, "most": 1_500_000},
    },
    "devices": [
        {
            "number": 0, "node": "local", "workers": ["trainer"],
            "device": {"id": "0", "name": "H100", "memory_bytes": 1, "total_bytes": 2, "utilisation": 0.5},
        }
    ],
    "scorers": {"jpeg_size": {"in_flight": 1, "queued": 2, "answer_s/p50": 0.1, "answer_s/p95": 0.2}},
    "progress": {
        "update": 4, "updates": 100, "eta_s": 90.0, "reward": 0.51, "staleness/mean": 1.0, "staleness/max": 2,
        "images_per_s": 3.0, "told": {"text": "a scorer is down", "at": 1795640590.0}, "validation": None,
    },
}  # fmt: skip
_ANSWERS = ("well", *("value",) * 8, *("key",) * 3, "bytes", "endless", "nothing", "deep", "many")


@contextlib.contextmanager
def _job(run: Path, answers: str, rng: random.Random) -> Iterator[None]:
    """Hold the folder's lock, and answer at its control socket, well or not."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = os.open(run / ".lock", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if answers not in _ANSWERS:
            yield
            return
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            here = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
            listening.bind(f"/proc/self/fd/{here}/control.sock")
            os.close(here)
            listening.listen(16)
        except OSError:
            yield
            return
        thread = threading.Thread(target=_serve, args=(listening, answers, rng.randrange(2**32)), daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            (run / "control.sock").unlink(missing_ok=True)


def _serve(listening: socket.socket, answers: str, seed: int) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            _answer(connection, answers, random.Random(seed))


def _answer(connection: socket.socket, answers: str, rng: random.Random) -> None:
    tree: Any = json.loads(
        json.dumps(rng.choice(({"status": _STATUS}, {"status": _STATUS}, {"error": "x"}, {"doing": "x"})))
    )
    content = json.dumps(tree).encode()
    match answers:
        case "value" | "key":
            change = damage._replace_one if answers == "value" else damage._change_key
            raw = rng.choice(damage.VALUES)
            content = json.dumps(change(tree, rng)).replace(f'"{damage._RAW}"', raw).replace(damage._RAW, "2").encode()
        case "bytes":
            content = rng.randbytes(rng.choice((1, 100, 10_000)))
        case "endless":
            for _ in range(500):
                connection.sendall(b"x" * 2**20)
            return
        case "nothing":
            return
        case "deep":
            content = b'{"status":' + b"[" * 200_000
        case "many":
            content = b'{"status":{"parts":{' + b",".join(b'"p%d":{"pid":1}' % n for n in range(200_000)) + b"}}}"
    connection.sendall(content + b"\n")


# ---- bounds ----------------------------------------------------------------------------------------------------------


def watch_over(log: TextIO, wall_s: float) -> None:
    """End this process, its threads' places in `log`, once the next case used too much of the processor or of time."""
    faulthandler.register(signal.SIGPROF, log, all_threads=False, chain=True)
    signal.setitimer(signal.ITIMER_PROF, _KILLED_AT_CPU_S)
    faulthandler.dump_traceback_later(wall_s, exit=True, file=log)
    most = _memory("VmSize") + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def forbidden(played: Sequence[Played], usual: dict[str, Played], most_cpu_s: float) -> Iterator[str]:
    """Yield the problems of a case's commands. `usual`: the commands of the undamaged folder."""
    for one in played:
        yield from (f"{one.command}: {problem}" for problem in one.problems)
        if one.command in usual:
            if one.cpu_s > usual[one.command].cpu_s + most_cpu_s:
                yield f"{one.command}: {one.cpu_s:.1f} s of the processor"
            if one.grown > max(0, usual[one.command].grown) + MOST_BYTES:
                yield f"{one.command}: {one.grown / 2**20:.0f} MiB of memory"

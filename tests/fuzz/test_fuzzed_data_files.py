"""Tests that data from elsewhere (prompt files, preference files, profiles, files of runs) are read, or refused in one
line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign import DEEP, TEXTS, altered, changed, few, listing, plain
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from omni_async.bench.measure import NotMeasurableError, measure
from omni_async.cli import main
from omni_async.config import Config, ConfigError, load
from omni_async.data.preferences import PreferencePairs
from omni_async.data.prompts import load_prompts
from omni_async.performance.profile import load_profile
from omni_async.tracking.rundir import RunDirectory
from tests.e2e.emulation import PROFILE, write_recipe

LINES = b'{"prompt": "the digit 7", "target": "7", "n": 1}\n\n{"prompt": "x"}\n'


def refused(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 3000


# ---- prompts ---------------------------------------------------------------------------------------------------------


@few(150)
@given(
    content=changed(LINES)
    | st.lists(plain.map(msgspec.json.encode) | st.sampled_from([DEEP, b"\xff", b"\0"]), max_size=3).map(b"\n".join),
    suffix=st.sampled_from([".txt", ".jsonl"]),
)
@example(content=b'{"prompt": "' + b"x" * 2**20 + b'"}', suffix=".jsonl")
@example(content=b'{"prompt": "x", "big": ' + b"9" * 4000 + b"}", suffix=".jsonl")
@example(content=b'{"prompt": "x", "target": {"a": "' + b"x" * 9999 + b'"}}', suffix=".jsonl")
def test_prompt_files(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"prompts{suffix}"
    path.write_bytes(content)
    try:
        prompts = load_prompts(str(path), "data.prompts", 1000)
    except ConfigError as error:
        refused(error)
    else:
        assert prompts and msgspec.json.decode(msgspec.json.encode(prompts))
    assert listing(tmp_path) == {path.name: content}
    path.unlink()


# ---- preferences -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    png = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(png, "PNG")
    table = {"prompt": ["a", "b"], "chosen": [png.getvalue()] * 2, "rejected": [png.getvalue()] * 2}
    file = tmp_path_factory.mktemp("parquet") / "pairs.parquet"
    pq.write_table(pa.table(table), file, compression="snappy")
    return file.read_bytes()


def _pairs_or_refusal(folder: Path, content: bytes) -> None:
    (folder / "pairs.parquet").write_bytes(content)
    try:
        pairs = PreferencePairs(str(folder / "pairs.parquet"))
        pairs.prompts(100)
        for image in (media.pixels for media in pairs.media(0)):
            assert image.dtype == np.uint8 and image.ndim == 3
    except ConfigError as error:
        refused(error)
    assert listing(folder) == {"pairs.parquet": content}


@few(150)
@given(data=st.data())
def test_preference_files(tmp_path: Path, parquet: bytes, data: st.DataObject) -> None:
    _pairs_or_refusal(
        tmp_path, data.draw(changed(parquet) | st.binary(max_size=200).map(lambda middle: b"PAR1" + middle + b"PAR1"))
    )


@few(60)
@given(image=st.sampled_from(["../private.png", "/etc/passwd", *TEXTS]) | st.text(max_size=20) | st.binary(max_size=60))
def test_files_that_preference_files_name(tmp_path: Path, image: str | bytes) -> None:
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "private.png")
    try:
        table = pa.table({"prompt": ["a"], "chosen": [image], "rejected": [image]})
    except (pa.ArrowException, UnicodeEncodeError):
        return
    pq.write_table(table, folder / "pairs.parquet")
    with pytest.raises(ConfigError) as error:
        PreferencePairs(str(folder / "pairs.parquet")).media(0)
    refused(error.value)


# ---- profiles and files of runs --------------------------------------------------------------------------------------


def _profile_or_refusal(path: Path) -> None:
    try:
        load_profile(str(path))
    except ConfigError as error:
        refused(error)


@few(100)
@given(data=st.data())
def test_profiles(tmp_path: Path, data: st.DataObject) -> None:
    written = msgspec.json.encode(PROFILE)
    path = tmp_path / "profile.json"
    path.write_bytes(data.draw(changed(written) | altered(PROFILE).map(_json)))
    _profile_or_refusal(path)


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


class Finished:
    """A whole emulated run: its configuration, folder and files."""

    def __init__(self, config: Config, run: Path) -> None:
        self.config = config
        self.run = run
        self.files = {p.name: p.read_bytes() for p in run.iterdir() if p.suffix in (".json", ".jsonl")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    recipe = write_recipe(tmp_path_factory.mktemp("finished"))
    overrides = ["emulation.time_scale=0.002", "trainer.updates=9", "staleness.max_updates=1"]
    assert main(["train", str(recipe), *overrides]) == 0
    (run,) = (recipe.parent / "runs").iterdir()
    return Finished(load(recipe, overrides), run)


@few(40)
@given(data=st.data())
@example(data=None)
def test_files_of_a_run(finished: Finished, data: st.DataObject | None) -> None:
    config, run, files = finished.config, finished.run, finished.files
    for name, content in files.items():
        (run / name).write_bytes(content)
    if data is not None:
        name = data.draw(st.sampled_from([*files]))
        (run / name).write_bytes(
            data.draw(changed(files[name]) | st.sampled_from([DEEP, b"", b"null\n", b"[]\n", b'{"update": "x"}\n']))
        )
    before = listing(run)
    try:
        assert measure(run, config).step_s > 0
    except NotMeasurableError as error:
        assert data is not None
        refused(error)
    assert listing(run) == before
    reopened = RunDirectory.reopen(run)
    assert listing(run) == before, "until there is something to record"
    reopened.take_over(config, 3, None)
    reopened.release()
    assert {name for name, content in listing(run).items() if before.get(name) != content} <= {
        "metrics.jsonl", "metrics.jsonl.void", "config.yaml", "summary.json", "summary.json.void"
    }  # fmt: skip

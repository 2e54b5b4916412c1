"""Tests every file from elsewhere that we read (recipes, prompts, preferences, profiles, checkpoints, files of runs):
it is used, or refused in one line without a traceback, and nothing is written."""

from __future__ import annotations

import io
import json
import shutil
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from omni_async.checkpoint import State, folder_name, require_whole
from omni_async.checkpoint.folders import write_manifest
from omni_async.checkpoint.state import read_state, write_state
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.cli import main
from omni_async.commands.bench.result import Overlap
from omni_async.config import Config, load
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.data.preferences import PreferencePairs
from omni_async.data.prompts import load_prompts
from omni_async.performance.profile import load_profile
from omni_async.runtime.preflight.resume import find_resume_point
from omni_async.types import Prompt, ReadyGroup, ReadySample, Score, VersionSpans
from tests.fuzz.foreign import DEEP, TEXTS, altered, changed, listing, of, plain, refusal_or_nothing
from tests.runtime.runtime_world import write_ledger
from tests.support.examples import few
from tests.support.job_world import PROFILE, write_emulated

# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_emulated(tmp_path_factory.mktemp("fuzz"))


@cache
def altered_recipe(recipe: Path) -> st.SearchStrategy[bytes]:
    """Generates recipes in which every key is there, defaults included, and some are changed."""
    tree = {section: value for section, value in msgspec.to_builtins(load(recipe)).items() if value is not None}
    return altered(tree).map(lambda tree: yaml.safe_dump(tree, allow_unicode=False).encode())


@few(400)
@given(data=st.data())
@example(data=b"\xff\xfe")
@example(data=b"run: {seed: 1:1:1:1:1:1" + b":59" * 300 + b".5}")
def test_any_recipe(recipe, data):
    """Tries any bytes, a recipe with some bytes changed, one with some values changed, and any overrides."""
    overrides = []
    if not isinstance(data, bytes):
        texts = st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
        names = st.sampled_from([f"run.name={text}" for text in TEXTS])
        overrides = data.draw(st.lists(st.text(max_size=30) | names, max_size=2))
        some = st.binary(max_size=100) | texts, changed(recipe.read_bytes()), altered_recipe(recipe)
        data = data.draw(st.one_of(*some))
    spoilt = recipe.with_name("spoilt.yaml")
    spoilt.write_bytes(data)
    with refusal_or_nothing(recipe.parent):
        assert isinstance(load(spoilt, overrides), Config)


OVERRIDDEN = ["run.name", "reward.scorers.0.params.x", "emulation.profile", "checkpoint.resume", "data.prompts"]


@few(40)
@given(data=st.data())
def test_the_command_line_answers_in_one_line(recipe, data, capsys):
    spoilt = recipe.with_name("spoilt.yaml")
    spoilt.write_bytes(data.draw(altered_recipe(recipe)))
    before = listing(recipe.parent)
    override = f"{data.draw(st.sampled_from(OVERRIDDEN))}={msgspec.json.encode(data.draw(plain)).decode()}"
    code = main(["check", str(spoilt), *data.draw(st.sampled_from([[], [override]]))])
    said = capsys.readouterr()
    assert listing(recipe.parent) == before
    if code == 0:
        assert said.err == "" and isinstance(yaml.safe_load(said.out), dict)
    else:
        (line,) = said.err.split("\n")[:-1]
        assert code == 2 and line.startswith("omni-async: ") and said.out == "" and line.isprintable()


# ---- prompts, preferences, profiles ----------------------------------------------------------------------------------

LINES = b'{"prompt": "the digit 7", "target": "7", "n": 1}\n\n{"prompt": "x"}\n'


@few(150)
@given(
    content=changed(LINES)
    | st.lists(plain.map(msgspec.json.encode) | st.sampled_from([DEEP, b"\xff", b"\0"]), max_size=3).map(b"\n".join),
    suffix=st.sampled_from([".txt", ".jsonl"]),
)
@example(content=b'{"prompt": "' + b"x" * 2**20 + b'"}', suffix=".jsonl")
@example(content=b'{"prompt": "x", "big": ' + b"9" * 4000 + b"}", suffix=".jsonl")
@example(content=b'{"prompt": "x", "target": {"a": "' + b"x" * 9999 + b'"}}', suffix=".jsonl")
def test_prompt_files(tmp_path, content, suffix):
    path = tmp_path / f"prompts{suffix}"
    path.write_bytes(content)
    with refusal_or_nothing(tmp_path):
        prompts = load_prompts(str(path), "data.prompts", 1000)
        assert [prompt.index for prompt in prompts] == list(range(len(prompts))) != []
        assert all(prompt.text.strip() and len(prompt.text) <= 1000 for prompt in prompts)
        assert msgspec.json.decode(msgspec.json.encode(prompts))


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    png = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(png, "PNG")
    table = {"prompt": ["a", "b"], "chosen": [png.getvalue()] * 2, "rejected": [png.getvalue()] * 2}
    file = tmp_path_factory.mktemp("parquet") / "pairs.parquet"
    pq.write_table(pa.table(table), file, compression="snappy")
    return file.read_bytes()


@few(150)
@given(data=st.data())
def test_preference_files(tmp_path, parquet, data):
    path = tmp_path / "pairs.parquet"
    framed = st.binary(max_size=200).map(lambda middle: b"PAR1" + middle + b"PAR1")
    path.write_bytes(data.draw(changed(parquet) | framed))
    with refusal_or_nothing(tmp_path):
        pairs = PreferencePairs(str(path))
        pairs.prompts(100)
        assert all(media.pixels.dtype == np.uint8 and media.pixels.ndim == 3 for media in pairs.media(0))


@few(60)
@given(image=st.sampled_from(["../private.png", "/etc/passwd"]) | st.text(max_size=20) | st.binary(max_size=60))
def test_files_that_preference_files_name(tmp_path, image):
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "private.png")
    try:
        table = pa.table({"prompt": ["a"], "chosen": [image], "rejected": [image]})
    except (pa.ArrowException, UnicodeEncodeError):
        return
    pq.write_table(table, folder / "pairs.parquet")
    with refusal_or_nothing(folder):
        PreferencePairs(str(folder / "pairs.parquet")).media(0)
        raise AssertionError("there is no such image")


@few(100)
@given(data=st.data())
def test_profiles(tmp_path, data):
    path = tmp_path / "profile.json"
    as_json = altered(PROFILE).map(lambda tree: json.dumps(tree).encode("utf-8", "surrogatepass"))
    path.write_bytes(data.draw(changed(msgspec.json.encode(PROFILE)) | as_json))
    with refusal_or_nothing(tmp_path):
        load_profile(str(path))


# ---- files of runs, results of benchmarks ----------------------------------------------------------------------------


@few(12)
@given(data=st.data())
def test_a_report_of_any_result(tmp_path, capsys, data):
    """Shows a benchmark's result from elsewhere; the report alone is written, in its own folder."""
    folder = tmp_path / "overlap"
    folder.mkdir(exist_ok=True)
    written = msgspec.json.encode(data.draw(of(Overlap)))
    (folder / "overlap.json").write_bytes(data.draw(st.just(written) | changed(written)))
    code = main(["bench", "overlap", str(folder), "--report", "--out", str(folder)])
    errors = capsys.readouterr().err
    assert code in (0, 1, 2) and "Traceback" not in errors and len(errors.splitlines()) == (code == 2)
    assert {name.split("/")[0] for name in listing(tmp_path)} == {"overlap"}
    assert set(listing(folder)) <= {"overlap.json", "overlap.html", "overlap.md", "overlap.png"}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """Makes a run that was killed, with a checkpoint that stays intact and one that is changed.

    Both have two unfinished groups and a ready one with its trajectories."""
    recipe = write_emulated(tmp_path_factory.mktemp("fuzz"))
    run = recipe.parent / "runs" / "emulated-20270101-000000"
    config = load(recipe, [f"checkpoint.resume={run}"])
    run.mkdir(parents=True)
    ledger = write_ledger(run, 4)[-1]
    for version in (1, 2):
        folder = run / "checkpoints" / folder_name(version)
        (folder / "tensors").mkdir(parents=True)
        save_file({"model.x": np.zeros(4, np.float32)}, folder / "tensors" / "shard.safetensors")
        samples = tuple(ReadySample(f"7/{n}", None, Score(0.5), VersionSpans.same(version, 2)) for n in range(2))
        write_group(folder, 7, [np.zeros(3, np.uint8)] * 2)
        ready = (ReadyGroup(7, Prompt(0, "x"), None, version, samples),)
        control = ControlState(version, 9, 36, None, ledger, (Unfinished(5), Unfinished(6)), ready)
        write_state(folder, State(control, config.model.pipeline, "flow_grpo"))
        write_manifest(folder)
    shutil.copytree(run / "checkpoints" / folder_name(2), recipe.parent / "whole")
    return config, run


def spoil(folder: Path, data: st.DataObject) -> None:
    names = ["manifest.json", "state.json", "tensors/shard.safetensors", "groups/000000007.safetensors"]
    path = folder / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    if path.suffix == ".json":
        others = altered(msgspec.json.decode(content)).map(msgspec.json.encode) | st.just(DEEP)
    else:
        others = st.binary(max_size=40)
    path.write_bytes(data.draw(changed(content) | others))
    if path.name != "manifest.json" and data.draw(st.booleans()):  # a deliberate change
        (folder / "manifest.json").unlink()
        write_manifest(folder)


@few(150)
@given(data=st.data())
def test_a_spoilt_checkpoint_is_used_or_passed_over(killed, data):
    config, run = killed
    top = run.parent.parent
    good, spoilt = (run / "checkpoints" / folder_name(version) for version in (1, 2))
    shutil.rmtree(spoilt)
    shutil.copytree(top / "whole", spoilt)
    spoil(spoilt, data)
    candidates = {good}
    with refusal_or_nothing(top):
        require_whole(spoilt)
        candidates.add(spoilt)
    with refusal_or_nothing(top):
        point = None
        point = find_resume_point(config)
    assert point is not None and point.folder in candidates, "there is a whole one"
    if spoilt in candidates:
        for group in read_state(spoilt).control.ready:
            with refusal_or_nothing(top):
                assert len(read_group(spoilt, group.group, len(group.samples))) == len(group.samples)

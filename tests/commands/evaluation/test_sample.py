"""Tests `omni-async sample`."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import save_file

from omni_async import cli
from omni_async.checkpoint.folders import MANIFEST_FILE, write_manifest
from omni_async.checkpoint.state import read_state, write_state
from omni_async.commands.evaluation.gallery import Gallery
from omni_async.commands.evaluation.models import ADAPTERS, EXPORTED_RECIPE, find_models
from omni_async.commands.evaluation.settings import _typed
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.training.trained import TrainedWeights
from tests.commands.evaluation.conftest import PROMPTS
from tests.commands.export.export_world import trained_run
from tests.pipelines.families import QWEN_IMAGE
from tests.support.configs import build
from tests.support.job_world import Run

_SMALL = ("height=32", "width=32", "--steps", "3")


def sampled(*words: str | Path, out: str = "drawn", code: int = 0) -> Path:
    assert cli.main(["sample", *map(str, words), "--out", out]) == code
    return Path(out)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path, out: str = "drawn") -> str:
    """Returns the one line that such a command ends with."""
    capsys.readouterr()
    sampled(*words, out=out, code=2)
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("omni-async: ")


def pixels(file: Path) -> np.ndarray:
    return np.array(Image.open(file))


def same(one: Path, other: Path) -> bool:
    return np.array_equal(pixels(one), pixels(other))


def rows(table: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in table.read_text().splitlines()]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects `load` for every model that is loaded, and the id of every sample that is drawn."""
    told: list[str] = []
    load, generate = DiffusersEngine._load, DiffusersEngine.generate

    def loading(engine: DiffusersEngine) -> None:
        told.append("load")
        load(engine)

    async def generating(engine: DiffusersEngine, request: Any) -> Any:
        told.append(request.sample_id)
        return await generate(engine, request)

    monkeypatch.setattr(DiffusersEngine, "_load", loading)
    monkeypatch.setattr(DiffusersEngine, "generate", generating)
    return told


def test_a_model_alone_draws_files_a_grid_and_a_table_to_score(checkpoint, recipe):
    out = sampled(checkpoint, "--prompt", "the digit 7", "--prompt", "a circle", "--seeds", "2", *_SMALL)
    [folder] = [path for path in out.iterdir() if path.is_dir()]
    names = ["000-0", "000-1", "001-0", "001-1"]
    assert sorted(file.stem for file in folder.glob("*.png")) == names
    texts = ["the digit 7", "the digit 7", "a circle", "a circle"]
    assert [(row["image"], row["prompt"]) for row in rows(folder / "samples.jsonl")] == [
        (f"{name}.png", text) for name, text in zip(names, texts, strict=True)
    ]
    assert len({pixels(folder / f"{name}.png").tobytes() for name in names}) == 4
    assert pixels(folder / "000-0.png").shape == (32, 32, 3)
    assert Image.open(out / "grid.png").width > 2 * 192
    assert cli.main(["score", str(recipe), str(folder / "samples.jsonl"), "--json", "scored.json"]) == 0
    assert json.loads(Path("scored.json").read_text())["failed"] == 0


@pytest.mark.parametrize("kind", ["finished", "lora"])
def test_the_last_checkpoint_draws_the_validation_samples_bit_for_bit(kind, checkpoint, request):
    finished: Run = request.getfixturevalue(kind)
    out = sampled(finished.path, "--seeds", "2")
    own = sorted((finished.path / "samples").glob("validation-000003-*.png"))
    assert len(own) == len(PROMPTS) * 2
    drawn = sorted((out / "update-000003").glob("*.png"))
    assert all(map(same, drawn, own)) and len(drawn) == len(own)
    untrained = sampled(checkpoint, "--recipe", finished.path / "config.yaml", "--seeds", "2", out="base")
    assert not all(map(same, sorted(untrained.glob("*/*.png")), own)), "training changed nothing"


def test_a_typed_prompt_of_the_validation_has_its_own_noise(finished, tmp_path):
    out = sampled(finished.path, "--prompt", PROMPTS[2], "--prompt", "a new one", "--prompt", PROMPTS[2])
    assert sorted(file.name for file in out.glob("*/*.png")) == ["002-0.png", "004-0.png"]
    ours, own = out / "update-000003" / "002-0.png", finished.path / "samples" / "validation-000003-04.png"
    assert same(ours, own)
    (tmp_path / "prompts.txt").write_text("one\none\ntwo\n")
    validation = {"prompts": str(tmp_path / "prompts.txt"), "every": 1, "num_inference_steps": 2}
    found = _typed(["new", "two", "one"], build({"validation": validation}), lambda prompt: None)
    assert {prompt.text: prompt.index for prompt in found} == {"new": 3, "two": 2, "one": 0}


def test_the_base_is_drawn_first_by_the_same_pipeline(finished, drawn):
    out = sampled(finished.path, "--against", "base", "--limit", "2")
    assert drawn == ["load", *["v0.p0.s0", "v0.p1.s0"] * 2]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"base", "update-000003"}
    first = finished.path / "samples" / "validation-000000-00.png"
    assert same(out / "base" / "000-0.png", first)
    grid = pixels(out / "grid.png")
    tile = np.repeat(np.repeat(pixels(out / "base" / "000-0.png"), 6, axis=0), 6, axis=1)
    assert np.array_equal(grid[6 : 6 + 192, 6 : 6 + 192], tile)


def test_which_and_a_checkpoint_s_folder_name_the_same(finished):
    one = sampled(finished.path, "--which", "2", "--limit", "1", out="one")
    other = sampled(finished.path / "checkpoints" / "update-000002", "--limit", "1", out="other")
    assert same(one / "update-000002/000-0.png", other / "update-000002/000-0.png")


def test_settings_are_changed_by_flags_and_by_keys(finished):
    out = sampled(finished.path, "--limit", "1", "--steps", "2", "--guidance", "2", "--seed", "9", "width=48")
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["steps"], settings["seed"], settings["samples per prompt"]) == (2, 9, 1)
    assert settings["sampling"] | {"true_cfg_scale": 2.0, "width": 48, "height": 32} == settings["sampling"]
    assert pixels(out / "update-000003" / "000-0.png").shape == (32, 48, 3)


def test_exported_adapters_draw_what_their_checkpoint_does(lora):
    Path("adapters").mkdir()
    factors = TrainedWeights(lora.path / "checkpoints" / "update-000003").read("transformer")
    # As `omni-async export` writes them: alpha / rank is in B.
    named = {f"transformer.{name}": one * (32 if ".lora_B." in name else 1) for name, one in factors.items()}
    save_file(named, Path("adapters", ADAPTERS))
    shutil.copy(lora.path / "config.yaml", Path("adapters", EXPORTED_RECIPE))
    out = sampled("adapters", "--against", lora.path)
    base = sampled("adapters", "--against", "base", out="base") / "base"
    for name in ("000-0.png", "001-0.png", "002-0.png"):
        ours, theirs = pixels(out / "adapters" / name), pixels(out / "update-000003" / name)
        assert np.array_equal(ours, theirs) and not np.array_equal(ours, pixels(base / name))


def test_a_checkpoint_s_moving_average_draws_if_it_has_one(lora, capsys):
    name = "000-0.png"
    average = sampled(lora.path, "--policy", "ema", "--limit", "1", out="average") / "update-000003-ema" / name
    trained = sampled(lora.path, "--policy", "trained", "--limit", "1") / "update-000003-trained" / name
    assert same(trained, lora.path / "samples" / "validation-000003-00.png")
    assert not same(trained, average)
    line = refused(capsys, lora.path, "--policy", "old", out="d")
    assert line.endswith("has no 'old' policy; it has ema, trained")


@pytest.mark.thorough
def test_videos_with_sound_are_drawn_and_shown(tmp_path):
    from omni_async_pipelines.ltx_2.tiny import build

    model = build(tmp_path / "ltx")
    small = ("height=64", "width=64", "num_frames=9", "max_sequence_length=32", "--steps", "2")
    out = sampled(model, "--prompt", "a dog barks", *small)
    assert sorted(file.suffix for file in (out / "ltx").glob("000-0.*")) == [".mp4", ".wav"]
    [row] = rows(out / "ltx" / "samples.jsonl")
    assert row == {"prompt": "a dog barks", "video": "000-0.mp4", "audio": "000-0.wav"}
    assert Image.open(out / "grid.png").width >= 192


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "omni-async: interrupted; finished samples are kept"),
    ],
)
def test_a_full_disk_or_ctrl_c_keeps_what_is_drawn(error, code, line, finished, drawn, monkeypatch, capsys):
    whole = sampled(finished.path, out="whole") / "update-000003"
    add, added = Gallery.add, []

    def adding(gallery: Gallery, *given: Any) -> None:
        if added:
            raise error
        added.append(given)
        add(gallery, *given)

    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(Gallery, "add", adding)
        folder = sampled(finished.path, code=code) / "update-000003"
    [said] = capsys.readouterr().err.splitlines()
    assert line in said and "the same command resumes" in said
    assert len(rows(folder / "samples.jsonl")) == 1
    drawn.clear()
    sampled(finished.path)
    assert len(drawn) == 1 + len(PROMPTS) - 1
    names = ["000-0.png", "001-0.png", "002-0.png"]
    assert all(same(folder / name, whole / name) for name in names)
    assert (folder.parent / "grid.png").exists()
    drawn.clear()
    sampled(finished.path)
    assert drawn == []
    (folder / "001-0.png").unlink()
    table = folder / "samples.jsonl"
    table.write_bytes(table.read_bytes()[:-5])
    sampled(finished.path)
    assert len(drawn) == 3 and {"load", "v0.p1.s0"} < {*drawn}
    assert sorted(row["image"] for row in rows(table)) == names


def test_a_folder_of_other_settings_or_weights_is_refused(finished, capsys):
    again = (finished.path, "--limit", "1")
    sampled(*again)
    for more, why in (
        (["--steps", "7"], "steps 5, not 7; name another folder"),
        (["--seed", "8"], "seed 3, not 8;"),
        (["height=48"], "sampling "),
        (["--limit", "2"], "prompts "),
    ):
        assert refused(capsys, *again, *more).startswith(f"--out: drawn was made with {why}")
    settings = Path("drawn/settings.json")
    written = settings.read_text()
    earlier = {key: value for key, value in json.loads(written).items() if key != "noise"}
    for content, line in (
        (json.dumps(earlier), "drawn was made with noise 'torch', not 'Philox'; name another folder"),
        (
            written.replace(json.loads(written)["models"]["update-000003"][1], "0"),
            "drawn holds samples of other weights as update-000003; name another folder",
        ),
    ):
        settings.write_text(content)
        assert refused(capsys, *again) == f"--out: {line}"
    Path("mine").mkdir()
    Path("mine/letter.txt").write_text("dear")
    Path("file").write_text("")
    line = "--out: mine holds 'letter.txt' and no settings.json; name another folder"
    assert refused(capsys, finished.path, out="mine") == line
    assert refused(capsys, finished.path, out="file") == "--out: file cannot be used: File exists"


def test_what_cannot_be_drawn_is_refused_in_one_line(finished, checkpoint, capsys):
    one = (checkpoint, "--prompt", "x")
    Path("empty").mkdir()
    Path("blank.txt").write_text("\n\n")
    Path("young").mkdir()
    shutil.copy(finished.path / "config.yaml", "young")
    for words, said in (
        (["nowhere"], "there is no folder"),
        (["empty"], "empty: neither a model (no model_index.json"),
        (["blank.txt"], "blank.txt: expected a folder, got a file"),
        ([checkpoint], "--prompt: no prompts; give one"),
        ([checkpoint, "--prompt", " "], "--prompt: expected a text, got an empty one"),
        ([checkpoint, "--prompts", "blank.txt"], "blank.txt holds no prompts; expected one a line"),
        ([*one, "--steps", "1"], "--steps: expected at least 2, got 1"),
        ([*one, "hight=32"], f"{checkpoint}: rollout.sampling.hight: unknown key"),
        ([*one, "--which", "last"], "is no run, but one model; leave --which out"),
        ([*one, "--against", "base"], "--against base: "),
        ([*one, "--device", "abacus", *_SMALL], f"{checkpoint} cannot be loaded: "),
        (["young"], "young: it has no checkpoint yet"),
        ([finished.path, "--which", "7"], "has no checkpoint of that update; it has 1, 2, 3"),
    ):
        assert said in refused(capsys, *words)


def test_a_damaged_checkpoint_and_a_missing_base_are_refused(finished, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(finished.path, copy, ignore=shutil.ignore_patterns("control.sock"))
    [tensors] = (copy / "checkpoints" / "update-000003" / "tensors").glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert "bytes" in refused(capsys, copy) and not Path("drawn").exists()
    folder, config = copy / "checkpoints" / "update-000002", copy / "config.yaml"
    write_state(folder, replace(read_state(folder), statement=None))  # as an earlier version did
    (folder / MANIFEST_FILE).unlink()
    write_manifest(folder)
    config.write_text(config.read_text().replace(finished.config.model.path, "/no/such/model"))
    assert "/no/such/model" in refused(capsys, copy, "--which", "2")


def test_a_run_is_its_base_and_all_its_checkpoints_each_once(finished, checkpoint):
    labels = ["base", "update-000001", "update-000002", "update-000003"]
    run, last = str(finished.path), str(finished.path / "checkpoints" / "update-000003")
    assert [model.label for model in find_models([run], [])] == labels
    assert [model.version for model in find_models([run], [])] == [0, 1, 2, 3]
    assert [model.label for model in find_models([run, last, checkpoint], [])] == labels
    assert [model.label for model in find_models([run], ["2", "base", "last"])] == [labels[2], labels[0], labels[3]]


def test_the_base_of_a_run_needs_no_checkpoint(tmp_path):
    trained = trained_run(tmp_path, QWEN_IMAGE)
    shutil.rmtree(trained.run / "checkpoints")
    [base] = find_models([str(trained.run)], ["base"])
    assert (base.label, base.base, base.version) == ("base", tmp_path / "base", 0)


def test_runs_from_one_base_share_it(finished, lora, drawn):
    models = [model.label for model in find_models([str(finished.path), str(lora.path)], ["base", "last"])]
    full, adapted = f"{finished.path.name}-update-000003", f"{lora.path.name}-update-000003"
    assert models == [f"{finished.path.name}-base", full, adapted]
    out = sampled(lora.path, "--against", finished.path, "--limit", "1")
    assert drawn.count("load") == 2, "the adapters go on the base, and not on another run's weights"
    for run, label in ((finished, full), (lora, adapted)):
        own = pixels(run.path / "samples" / "validation-000003-00.png").astype(int)
        # The run drew it in a larger batch, which rounds otherwise on some CPUs.
        assert np.abs(pixels(out / label / "000-0.png") - own).max() <= 1

"""Tests `omni-async sample`: that it draws what a run draws, goes on where it stopped, and says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file, save_file

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
from tests.support.places import ROOT

_SMALL = ("height=32", "width=32", "--steps", "3")


def sampled(*words: str | Path, out: str = "drawn", code: int = 0) -> Path:
    """Runs `omni-async sample ... --out OUT`, which ends with this exit code, and returns the folder."""
    assert cli.main(["sample", *map(str, words), "--out", out]) == code
    return Path(out)


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Returns the one line that such a command ends with."""
    capsys.readouterr()
    assert cli.main(["sample", *map(str, words)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("omni-async: ")


def pixels(file: Path) -> np.ndarray:
    return np.array(Image.open(file))


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


# ---- what it draws ---------------------------------------------------------------------------------------------------


def test_a_model_alone_draws_every_prompt_and_seed_into_files_a_grid_and_a_table_that_can_be_scored(checkpoint, recipe):
    out = sampled(checkpoint, "--prompt", "the digit 7", "--prompt", "a circle", "--seeds", "2", *_SMALL)
    [folder] = [path for path in out.iterdir() if path.is_dir()]
    names = ["000-0", "000-1", "001-0", "001-1"]
    assert sorted(file.stem for file in folder.glob("*.png")) == names
    assert {row["image"]: row["prompt"] for row in rows(folder / "samples.jsonl")} == dict(
        zip([f"{name}.png" for name in names], ["the digit 7"] * 2 + ["a circle"] * 2, strict=True)
    )
    assert len({pixels(folder / f"{name}.png").tobytes() for name in names}) == 4
    assert pixels(folder / "000-0.png").shape == (32, 32, 3)
    assert Image.open(out / "grid.png").width > 2 * 192
    assert cli.main(["score", str(recipe), str(folder / "samples.jsonl"), "--json", "scored.json"]) == 0
    assert json.loads(Path("scored.json").read_text())["failed"] == 0


@pytest.mark.parametrize("kind", ["finished", "lora"])
def test_the_last_checkpoint_draws_the_run_s_own_validation_samples_bit_for_bit(
    kind: str, checkpoint: str, request: pytest.FixtureRequest
) -> None:
    finished: Run = request.getfixturevalue(kind)
    out = sampled(finished.path, "--seeds", "2")
    own = sorted((finished.path / "samples").glob("validation-000003-*.png"))
    assert len(own) == len(PROMPTS) * 2
    drawn = sorted((out / "update-000003").glob("*.png"))
    assert [pixels(one).tolist() for one in drawn] == [pixels(one).tolist() for one in own]
    untrained = sampled(checkpoint, "--recipe", finished.path / "config.yaml", "--seeds", "2", out="base")
    assert not all(
        np.array_equal(pixels(one), pixels(two))
        for one, two in zip(sorted(untrained.glob("*/*.png")), own, strict=True)
    ), "training changed nothing, so that the comparison says nothing"


def test_a_typed_prompt_of_the_validation_has_its_own_noise_and_another_one_has_not(finished: Run) -> None:
    out = sampled(finished.path, "--prompt", PROMPTS[2], "--prompt", "a new one", "--prompt", PROMPTS[2])
    assert sorted(file.name for file in out.glob("*/*.png")) == ["002-0.png", "004-0.png"]
    ours, own = out / "update-000003" / "002-0.png", finished.path / "samples" / "validation-000003-04.png"
    assert np.array_equal(pixels(ours), pixels(own))


def test_a_typed_prompt_has_no_number_of_the_validation_s_where_texts_are_there_twice(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\none\ntwo\n")
    validation = {"prompts": str(tmp_path / "prompts.txt"), "every": 1, "num_inference_steps": 2}
    found = _typed(["new", "two", "one"], build({"validation": validation}), lambda prompt: None)
    assert {prompt.text: prompt.index for prompt in found} == {"new": 3, "two": 2, "one": 0}


def test_against_the_base_draws_both_with_one_pipeline_and_shows_the_base_first(
    finished: Run, drawn: list[str]
) -> None:
    out = sampled(finished.path, "--against", "base", "--limit", "2")
    assert drawn == ["load", *["v0.p0.s0", "v0.p1.s0"] * 2]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"base", "update-000003"}
    first = finished.path / "samples" / "validation-000000-00.png"
    assert np.array_equal(pixels(out / "base" / "000-0.png"), pixels(first))
    grid = pixels(out / "grid.png")
    tile = np.repeat(np.repeat(pixels(out / "base" / "000-0.png"), 6, axis=0), 6, axis=1)
    assert np.array_equal(grid[6 : 6 + 192, 6 : 6 + 192], tile)


def test_which_chooses_a_checkpoint_of_the_run_and_one_is_given_by_its_folder(finished: Run) -> None:
    one = sampled(finished.path, "--which", "2", "--limit", "1", out="one")
    other = sampled(finished.path / "checkpoints" / "update-000002", "--limit", "1", out="other")
    name = "update-000002/000-0.png"
    assert np.array_equal(pixels(one / name), pixels(other / name))


def test_settings_are_changed_by_flags_and_by_keys(finished: Run) -> None:
    out = sampled(finished.path, "--limit", "1", "--steps", "2", "--guidance", "2", "--seed", "9", "width=48")
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["steps"], settings["seed"], settings["samples per prompt"]) == (2, 9, 1)
    assert settings["sampling"] | {"true_cfg_scale": 2.0, "width": 48, "height": 32} == settings["sampling"]
    assert pixels(out / "update-000003" / "000-0.png").shape == (32, 48, 3)


def test_exported_adapters_draw_what_their_checkpoint_does_on_the_base_that_their_recipe_names(lora: Run) -> None:
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


def test_a_checkpoint_s_moving_average_draws_if_it_has_one(lora: Run, capsys: pytest.CaptureFixture[str]) -> None:
    name = "000-0.png"
    average = sampled(lora.path, "--policy", "ema", "--limit", "1", out="average") / "update-000003-ema" / name
    trained = sampled(lora.path, "--policy", "trained", "--limit", "1") / "update-000003-trained" / name
    assert np.array_equal(pixels(trained), pixels(lora.path / "samples" / "validation-000003-00.png"))
    assert not np.array_equal(pixels(trained), pixels(average))
    assert refused(capsys, lora.path, "--policy", "old", "--out", "d").endswith(
        "has no 'old' policy; it has ema, trained"
    )


@pytest.mark.thorough
def test_videos_with_sound_are_drawn_and_shown(tmp_path: Path) -> None:
    from omni_async_pipelines.ltx_2.tiny import build

    model = build(tmp_path / "ltx")
    small = ("height=64", "width=64", "num_frames=9", "max_sequence_length=32", "--steps", "2")
    out = sampled(model, "--prompt", "a dog barks", *small)
    assert sorted(file.suffix for file in (out / "ltx").glob("000-0.*")) == [".mp4", ".wav"]
    [row] = rows(out / "ltx" / "samples.jsonl")
    assert row == {"prompt": "a dog barks", "video": "000-0.mp4", "audio": "000-0.wav"}
    assert Image.open(out / "grid.png").width >= 192


# ---- what becomes of it when it is cut off ---------------------------------------------------------------------------


def _failing_after(count: int, error: Callable[[], BaseException]) -> Callable[..., None]:
    add, left = Gallery.add, [count]

    def adding(gallery: Gallery, *given: Any) -> None:
        if not left[0]:
            raise error()
        left[0] -= 1
        add(gallery, *given)

    return adding


def test_a_full_disk_ends_it_in_one_line_and_the_same_command_draws_only_what_is_missing(
    finished: Run, drawn: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = sampled(finished.path, out="whole")
    drawn.clear()
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr(Gallery, "add", _failing_after(1, lambda: OSError(errno.ENOSPC, "No space left on device")))
        out = sampled(finished.path, code=1)
    [line] = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line and "the same command resumes" in line
    there = [row["image"] for row in rows(out / "update-000003" / "samples.jsonl")]
    assert len(there) == 1
    drawn.clear()
    sampled(finished.path)
    assert len(drawn) == 1 + len(PROMPTS) - 1
    for name in ("000-0.png", "001-0.png", "002-0.png"):
        assert np.array_equal(pixels(out / "update-000003" / name), pixels(whole / "update-000003" / name))
    assert (out / "grid.png").exists()


def test_what_is_there_is_not_drawn_again_but_a_row_that_was_cut_off_or_lost_its_file_is(
    finished: Run, drawn: list[str]
) -> None:
    folder = sampled(finished.path) / "update-000003"
    drawn.clear()
    sampled(finished.path)
    assert drawn == []
    (folder / "001-0.png").unlink()
    table = folder / "samples.jsonl"
    table.write_bytes(table.read_bytes()[:-5])
    sampled(finished.path)
    assert sorted(drawn) == ["load", "v0.p1.s0", "v0.p2.s0"]
    assert sorted(row["image"] for row in rows(table)) == ["000-0.png", "001-0.png", "002-0.png"]


def test_ctrl_c_keeps_what_was_drawn_and_ends_with_130(
    finished: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Gallery, "add", _failing_after(2, KeyboardInterrupt))
    out = sampled(finished.path, code=130)
    assert (
        capsys.readouterr().err == "omni-async: interrupted; finished samples are kept, and the same command resumes\n"
    )
    assert len(rows(out / "update-000003" / "samples.jsonl")) == 2


# ---- what it refuses -------------------------------------------------------------------------------------------------


def test_a_folder_made_with_other_settings_weights_or_by_something_else_is_refused(
    finished: Run, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled(finished.path, "--limit", "1")
    again = (finished.path, "--limit", "1", "--out", "drawn")
    assert refused(capsys, *again, "--steps", "7") == ("--out: drawn was made with steps 5, not 7; name another folder")
    assert refused(capsys, *again, "--seed", "8").startswith("--out: drawn was made with seed 3, not 8;")
    assert refused(capsys, *again, "height=48").startswith("--out: drawn was made with sampling ")
    assert refused(capsys, finished.path, "--out", "drawn").startswith("--out: drawn was made with prompts ")
    settings = Path("drawn/settings.json")
    written = settings.read_text()
    earlier = {key: value for key, value in json.loads(written).items() if key != "noise"}
    settings.write_text(json.dumps(earlier))
    assert refused(capsys, *again) == "--out: drawn was made with noise 'torch', not 'Philox'; name another folder"
    settings.write_text(written)
    settings.write_text(
        settings.read_text().replace(json.loads(settings.read_text())["models"]["update-000003"][1], "0")
    )
    assert refused(capsys, *again) == (
        "--out: drawn holds samples of other weights as update-000003; name another folder"
    )
    settings.write_text("{")
    assert refused(capsys, *again) == "--out: drawn/settings.json is damaged; name another folder"
    Path("mine").mkdir()
    Path("mine/letter.txt").write_text("dear")
    assert refused(capsys, finished.path, "--out", "mine") == (
        "--out: mine holds 'letter.txt' and no settings.json; name another folder"
    )
    Path("file").write_text("")
    assert refused(capsys, finished.path, "--out", "file") == "--out: file cannot be used: File exists"


def test_weights_are_known_by_content_and_not_by_path_size_or_date(
    checkpoint: str, tmp_path: Path, drawn: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "one" / "model")
    words = ("--prompt", "the digit 7", *_SMALL)
    sampled(model, *words)
    drawn.clear()
    moved = shutil.copytree(model, tmp_path / "two" / "model")
    sampled(moved, *words)
    assert drawn == [], "they are the same"
    file = moved / "vae" / "diffusion_pytorch_model.safetensors"
    before, tensors = file.stat(), load_file(file)
    max(tensors.values(), key=torch.numel).view(-1)[0] += 1
    save_file(tensors, file, {"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert refused(capsys, moved, *words, "--out", "drawn").startswith("--out: drawn holds samples of other weights")


def test_what_cannot_be_drawn_is_refused_in_one_line(
    finished: Run, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = (checkpoint, "--prompt", "x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("\n\n")
    assert refused(capsys, "nowhere", "--out", "d").startswith("there is no folder")
    assert refused(capsys, "empty", "--out", "d").startswith("empty: neither a model in diffusers layout")
    assert refused(capsys, "blank.txt", "--out", "d") == "blank.txt: expected a folder, got a file"
    assert refused(capsys, checkpoint, "--out", "d").startswith("--prompt: no prompts; give one")
    assert refused(capsys, checkpoint, "--prompt", " ", "--out", "d") == "--prompt: expected a text, got an empty one"
    assert refused(capsys, checkpoint, "--prompts", "blank.txt", "--out", "d").endswith(
        "blank.txt holds no prompts; expected one a line"
    )
    assert refused(capsys, *one, "--out", "d", "--steps", "1") == "--steps: expected at least 2, got 1"
    assert refused(capsys, *one, "--out", "d", "hight=32").startswith(
        f"{checkpoint}: rollout.sampling.hight: unknown key"
    )
    assert refused(capsys, *one, "--out", "d", "--which", "last").endswith(
        "is no run, but one model; leave --which out"
    )
    assert refused(capsys, *one, "--out", "d", "--against", "base").startswith("--against base: ")
    assert refused(capsys, *one, "--out", "d", "--device", "abacus", *_SMALL).startswith(
        f"{checkpoint} cannot be loaded: "
    )
    Path("young").mkdir()
    shutil.copy(finished.path / "config.yaml", "young")
    assert refused(capsys, "young", "--out", "d").endswith("young: it has no checkpoint yet")
    assert "has no checkpoint of that update; it has 1, 2, 3" in refused(
        capsys, finished.path, "--which", "7", "--out", "d"
    )


def test_a_damaged_checkpoint_and_a_missing_base_are_refused(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.path, copy, ignore=shutil.ignore_patterns("control.sock"))
    [tensors] = (copy / "checkpoints" / "update-000003" / "tensors").glob("*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    assert "bytes" in refused(capsys, copy, "--out", "d") and not Path("d").exists()
    folder, config = copy / "checkpoints" / "update-000002", copy / "config.yaml"
    write_state(folder, replace(read_state(folder), statement=None))  # as an earlier version did
    (folder / MANIFEST_FILE).unlink()
    write_manifest(folder)
    config.write_text(config.read_text().replace(finished.config.model.path, "/no/such/model"))
    assert "/no/such/model" in refused(capsys, copy, "--which", "2", "--out", "d")


# ---- the models that are meant ---------------------------------------------------------------------------------------


def test_a_run_is_its_base_and_all_its_checkpoints_each_once(finished: Run, checkpoint: str) -> None:
    labels = ["base", "update-000001", "update-000002", "update-000003"]
    run, last = str(finished.path), str(finished.path / "checkpoints" / "update-000003")
    assert [model.label for model in find_models([run], [])] == labels
    assert [model.version for model in find_models([run], [])] == [0, 1, 2, 3]
    assert [model.label for model in find_models([run, last, checkpoint], [])] == labels
    assert [model.label for model in find_models([run], ["2", "base", "last"])] == [labels[2], labels[0], labels[3]]


def test_the_base_of_a_run_needs_no_checkpoint(tmp_path: Path) -> None:
    trained = trained_run(tmp_path, QWEN_IMAGE)
    shutil.rmtree(trained.run / "checkpoints")
    [base] = find_models([str(trained.run)], ["base"])
    assert (base.label, base.base, base.version) == ("base", tmp_path / "base", 0)


def test_runs_from_one_base_are_told_apart_and_their_base_is_drawn_once(
    finished: Run, lora: Run, drawn: list[str]
) -> None:
    models = [model.label for model in find_models([str(finished.path), str(lora.path)], ["base", "last"])]
    full, adapted = f"{finished.path.name}-update-000003", f"{lora.path.name}-update-000003"
    assert models == [f"{finished.path.name}-base", full, adapted]
    out = sampled(lora.path, "--against", finished.path, "--limit", "1")
    assert drawn.count("load") == 2, "the adapters go on the base, and not on another run's weights"
    for run, label in ((finished, full), (lora, adapted)):
        own = pixels(run.path / "samples" / "validation-000003-00.png")
        assert np.array_equal(pixels(out / label / "000-0.png"), own)


# ---- its help --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["sample", "eval"])
def test_the_examples_of_the_help_are_accepted_and_the_one_that_needs_nothing_works(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    examples = re.findall(r"^  omni-async (.+)$", capsys.readouterr().out, flags=re.M)
    assert len(examples) == 4
    for example in examples:
        assert cli._parse(shlex.split(example)).command == command
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    if command == "sample":
        assert cli.main(shlex.split(examples[0])) == 0
        assert pixels(Path("drawn/checkpoint/checkpoint/000-0.png")).shape == (64, 64, 3)

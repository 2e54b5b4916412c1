"""Tests the command: what it writes, what it refuses, and that whatever ends it leaves nothing half."""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from omni_async.checkpoint.folders import write_manifest
from omni_async.commands.command_line import as_markdown
from omni_async.commands.export import card, full, how_to_load
from omni_async.commands.export import folder as export_folder
from omni_async.commands.export.card import card_of
from omni_async.commands.export.curves import plot_curves
from omni_async.config import ConfigError
from omni_async.training.loading import open_tensors
from tests.commands.export.export_world import (
    VERSION,
    Trained,
    computed_elsewhere,
    exported,
    refused,
    trained_run,
    write_checkpoint,
)
from tests.pipelines.families import QWEN_IMAGE
from tests.support.job_world import ENVIRONMENT, run, write_recipe
from tests.support.places import ROOT
from tests.training.training_world import trainable

Capture = pytest.CaptureFixture[str]
# 8 ** 8 values of YAML in a few lines.
BOMB = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_run(tmp_path_factory.mktemp("full"), QWEN_IMAGE)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_run(tmp_path_factory.mktemp("lora"), QWEN_IMAGE, lora=True)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_not_trained_is_the_base_models_and_no_file_is_a_link(trained: Trained, tmp_path: Path) -> None:
    base = Path(trained.config.model.path)
    for name in ("README.md", "all.safetensors", ".hidden", "transformer/diffusion_pytorch_model.fp16.safetensors"):
        (base / name).write_text("of the base model")
    (base / "LICENSE.md").write_text("a licence")
    before = files(base)
    exported(trained.run, "--out", tmp_path / "out")
    made = files(tmp_path / "out")
    own = {"README.md", "recipe.yaml"}
    assert before.keys() - made.keys() == {
        *("all.safetensors", ".hidden", "transformer/diffusion_pytorch_model.fp16.safetensors")
    }, "weights before training would be loaded by name"
    changed = {name for name in made if made[name] != before.get(name)}
    assert changed == {*own, "transformer/diffusion_pytorch_model.safetensors"}
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in (tmp_path / "out").rglob("*.safetensors"))
    assert files(base) == before
    exported(trained.run, "--link", "--out", tmp_path / "linked")
    assert (tmp_path / "linked/vae/diffusion_pytorch_model.safetensors").samefile(
        base / "vae/diffusion_pytorch_model.safetensors"
    )


def test_large_weights_are_cut_into_files_with_an_index(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "_LARGEST_FILE", "100KB")
    exported(trained.run, "--out", tmp_path / "out")
    index = json.loads((tmp_path / "out/transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    found = {f"transformer.{name}": one[...] for name, one in open_tensors(tmp_path / "out/transformer").items()}
    held = trainable(trained.engine)
    assert found.keys() == held.keys() and all(torch.equal(found[name], held[name]) for name in held)


def test_weights_are_stored_as_the_base_stores_them_unless_another_dtype_is_asked_for(tmp_path: Path) -> None:
    trained = trained_run(tmp_path / "run", QWEN_IMAGE)
    path = Path(trained.config.model.path) / "transformer/diffusion_pytorch_model.safetensors"
    base = {name: one.bfloat16() for name, one in load_file(path).items()}
    save_file(base, path, {"format": "pt"})
    write_checkpoint(trained.run, trained.config, trained.engine)  # which states that base
    held = trainable(trained.engine)
    for more, dtype in (([], torch.bfloat16), (["--dtype", "float32"], torch.float32)):
        out = tmp_path / str(dtype)
        exported(trained.run, "--out", out, *more)
        found = load_file(out / "transformer/diffusion_pytorch_model.safetensors")
        assert all(torch.equal(one, held[f"transformer.{name}"].to(dtype)) for name, one in found.items())


def test_the_policy_that_drew_is_exported_unless_another_is_asked_for(tmp_path: Path) -> None:
    name = {"name": "diffusion_nft", "rollout.sde": None}
    trained = trained_run(tmp_path / "run", QWEN_IMAGE, **name)
    (trained.run / "metrics.jsonl").write_text(json.dumps({"update": VERSION, "validation/reward": 0.625}) + "\n")
    old = {n.removeprefix("old."): t for n, t in trained.engine._model.auxiliary.tensors().items()}
    for more, held in (([], old), (["--policy", "trained"], trainable(trained.engine))):
        out = tmp_path / f"out{len(more)}"
        exported(trained.run, "--out", out, *more)
        found = load_file(out / "transformer/diffusion_pytorch_model.safetensors")
        assert all(torch.equal(one, held[f"transformer.{key}"]) for key, one in found.items())
        assert ("0.625" in (out / "README.md").read_text()) is (held is old), "the old policy was validated"


def front_matter(folder: Path) -> dict[str, Any]:
    matter: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    return matter


def test_the_card_says_what_hubs_and_people_ask(trained: Trained, lora: Trained, tmp_path: Path) -> None:
    card = Path(trained.config.model.path) / "README.md"
    card.write_text("---\nlicense: other\nlicense_name: a-licence\nlicense_link: LICENSE.md\ntags: [x]\n---\n# Base\n")
    metrics = [{"update": n, "reward": 0.1 * n, "finished": 1.0} for n in range(1, 4)]
    metrics += [{"update": n, "validation/reward": 0.2 * n} for n in (0, 3)]
    (trained.run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    samples = trained.run / "samples"
    samples.mkdir(exist_ok=True)
    for version in (0, 1, 3):
        (samples / f"validation-{version:06d}.png").write_bytes(b"png")
        (samples / f"validation-{version:06d}.jsonl").write_text("")
    exported(trained.run, "--which", "best", "--out", tmp_path / "out")
    found = front_matter(tmp_path / "out")
    assert (found["license"], found["license_name"], found["pipeline_tag"]) == ("other", "a-licence", "text-to-image")
    text = (tmp_path / "out/README.md").read_text()
    for said in (f"after {VERSION} updates", "| 0.6 |", "curves.png", "recipe.yaml", "flow_grpo", "1 x ocr"):
        assert said in text
    shown = [line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert shown == ["curves.png", "samples/validation-000000.png", "samples/validation-000003.png"]
    assert all((tmp_path / "out" / path).is_file() for path in shown)
    exported(lora.run, "--out", tmp_path / "adapters")
    for name in ("out", "adapters"):  # cards are read elsewhere
        code = (tmp_path / name / "README.md").read_text().split("```")[1]
        assert str(tmp_path.parents[1]) not in code and code.count('"path/to/this/folder"') == 1
    assert front_matter(tmp_path / "adapters")["license"] == "unknown"
    assert "The licence is not known" in (tmp_path / "adapters/README.md").read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\ufeff---\nlicense: mit\n---\n# Model\n", {"license": "mit"}),
        ("# Model\n---\nlicense: mit\n---\n", {}),
        ("---\n- mit\n---\n", {}),
        ("---\nlicense: [\n---\n", {}),
        ("---\na: &a [x, x, x, x, x, x, x, x]\n" + BOMB + "---\n", {}),
    ],
)
def test_a_base_models_card_is_read_where_hubs_read_it(text: str, found: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert card_of(tmp_path) == found


@pytest.mark.parametrize("base", ["quickstart/checkpoint", "quickstart/video/checkpoint"])
def test_models_of_the_repository_have_its_licence(base: str) -> None:
    assert card_of(ROOT / "recipes" / base)["license"] == "apache-2.0"


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    trained: Trained, lora: Trained, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "new" / "out"
    assert "trained all weights and has no adapters" in refused(capsys, trained.run, "--lora", "--out", out)
    assert "there are no adapters" in refused(capsys, trained.run, "--merged", "--out", out)
    assert "has no checkpoint of that update; it has 3" in refused(capsys, trained.run, "--which", "7", "--out", out)
    assert "has no 'ema' policy" in refused(capsys, trained.run, "--policy", "ema", "--out", out)
    assert "there is no folder" in refused(capsys, trained.run, "--base", tmp_path / "gone", "--out", out)
    other = QWEN_IMAGE.build(tmp_path / "deeper")
    path = Path(other) / "transformer/diffusion_pytorch_model.safetensors"
    save_file({name: one[:1].clone() if one.ndim else one for name, one in load_file(path).items()}, path)
    for one in (trained, lora):
        more = ["--merged"] if one is lora else []
        assert "it is another base model" in refused(capsys, one.run, *more, "--base", other, "--out", out)
    half = shutil.copytree(trained.run, tmp_path / "half")
    shard = next((half / "checkpoints").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "bytes" in refused(capsys, half, "--out", out)
    assert not out.parent.exists()


def test_a_folder_that_exists_is_left_as_it_is(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    assert "exists; name a folder that does not" in refused(capsys, trained.run, "--out", out)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "exists" in refused(capsys, trained.run, "--out", tmp_path / "dangling")
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in refused(capsys, trained.run, "--out", tmp_path / "file" / "out")
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "precious", "dangling", "file"}


@pytest.mark.slow
def test_a_disk_without_room_is_refused_before_and_while_it_is_written(
    trained: Trained, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as little:
        little.setattr(export_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=50))
        assert "50 bytes are free" in refused(capsys, trained.run, "--out", tmp_path / "out")
        weights = sum(one.nbytes for one in trainable(trained.engine).values())
        little.setattr(export_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=weights))
        refused(capsys, trained.run, "--out", tmp_path / "out")
        exported(trained.run, "--link", "--out", tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
    limit = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (200_000, 200_000)); from omni_async import cli"
    command = f"{limit}; cli.main(['export', {str(trained.run)!r}, '--out', {str(tmp_path / 'out')!r}])"
    done = subprocess.run([sys.executable, "-c", command], env=ENVIRONMENT, capture_output=True, text=True)
    assert os.strerror(errno.EFBIG) in done.stderr and done.stderr.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


def test_what_a_killed_export_left_is_named_and_nothing_there_is_emptied(
    lora: Trained, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    (tmp_path / ".out.partial").symlink_to("precious")
    left, lure = (tmp_path / f".out.{pid}-0123456789abcdef.partial" for pid in (1, 2))
    left.mkdir()
    (left / ".lock").touch()
    lure.symlink_to("precious")
    exported(lora.run, "--out", tmp_path / "out")
    assert capsys.readouterr().err == f"omni-async: {left} was left by an export that was killed; remove it\n"
    assert left.is_dir() and (tmp_path / "precious" / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["checkpoints", f"checkpoints/update-{VERSION:06d}"])
def test_checkpoints_behind_a_link_are_not_exported(lora: Trained, tmp_path: Path, capsys: Capture, name: str) -> None:
    run = shutil.copytree(lora.run, tmp_path / lora.run.name)
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    assert "its checkpoints are links" in refused(capsys, run, "--out", tmp_path / "out")


@pytest.mark.parametrize("made", ["folder", "file", "link"])
def test_what_appeared_at_the_path_meanwhile_is_not_replaced(tmp_path: Path, made: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="exists; name a folder"), export_folder.whole_folder(out, 0):
        if made == "link":
            out.symlink_to("nowhere")
        else:
            out.mkdir() if made == "folder" else out.touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and out.is_symlink() is (made == "link")


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127])
def test_a_name_as_long_as_names_can_be_is_written(tmp_path: Path, name: str) -> None:
    whole, refusal = export_folder.whole_folder, pytest.raises(ConfigError, match="another export")
    with whole(tmp_path / name, 0) as folder, refusal, whole(tmp_path / name, 0):
        pass
    assert [*tmp_path.iterdir()] == [tmp_path / name] and not folder.exists()


def test_an_export_is_not_written_into_what_it_is_made_of(lora: Trained, capsys: Capture) -> None:
    for folder in (Path(lora.config.model.path), next((lora.run / "checkpoints").iterdir())):
        assert "which this command reads" in refused(capsys, lora.run, "--out", folder / "out")
        assert not (folder / "out").exists()
    assert "which this command reads" in refused(capsys, lora.run, "--out", lora.run / "checkpoints" / "update-000099")


def changed_tensors(run: Path, change: Any) -> Path:
    """Changes the tensors of a run's checkpoint and their metadata, and vouches for them; returns the checkpoint."""
    folder = next((run / "checkpoints").iterdir())
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        made, told = change(tensors, about)
        save_file(made, file, told)
    (folder / "manifest.json").unlink()
    write_manifest(folder)
    return folder


def test_names_of_tensors_lead_no_file_out_of_the_export(lora: Trained, tmp_path: Path, capsys: Capture) -> None:
    run = shutil.copytree(lora.run, tmp_path / lora.run.name)
    evil = str(tmp_path / "evil")

    def rename(tensors: dict[str, Any], about: dict[str, str]) -> Any:
        name = next(name for name in tensors if name.startswith("model.") and "lora_A" in name)
        other = f"model.{evil}{name.removeprefix('model.transformer')}"
        about = {key: value.replace(json.dumps(name), json.dumps(other)) for key, value in about.items()}
        return {other if key == name else key: one for key, one in tensors.items()}, about

    changed_tensors(run, rename)
    assert f"it has tensors of {evil!r}" in refused(capsys, run, "--out", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {run.name}


def test_weights_that_are_no_numbers_are_reported(lora: Trained, tmp_path: Path, capsys: Capture) -> None:
    run = shutil.copytree(lora.run, tmp_path / lora.run.name)

    def spoil(tensors: dict[str, Any], about: dict[str, str]) -> Any:
        name = min(name for name in tensors if name.startswith("model."))
        return tensors | {name: torch.full_like(tensors[name], torch.nan)}, about

    changed_tensors(run, spoil)
    exported(run, "--out", tmp_path / "out")
    assert "1 trained tensors hold NaN or infinity, transformer." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("transformer/diffusion_pytorch_model.safetensors.index.json", "{}"),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", '{"weight_map": [1]}'),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", '{"weight_map": {"a": 1}}'),
        ("transformer/diffusion_pytorch_model.safetensors.index.json", '{"weight_map": {"a": "../vae/x"}}'),
        ("model_index.json", '{"..": ["diffusers", "x"]}'),
        ("model_index.json", '{"/tmp": ["diffusers", "x"]}'),
    ],
)
def test_an_index_names_files_beside_it(
    lora: Trained, tmp_path: Path, capsys: Capture, file: str, content: str
) -> None:
    base = shutil.copytree(lora.config.model.path, tmp_path / "base")
    (base / file).write_text(content)
    assert file in refused(capsys, lora.run, "--merged", "--base", base, "--out", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"base"}


def test_texts_on_a_card_are_no_markup_and_paths_no_code(tmp_path: Path) -> None:
    assert as_markdown("a\n---\n<img src=x>|![a](b) `c` \\[d](e)") == (
        "a --- \\<img src=x>\\|!\\[a](b) \\`c\\` \\\\\\[d](e)"
    )
    assert card._code("a`\n# b") == "a' # b"
    for path in ('x"); import os; ("', "a\\", "new\nline", "\udc80"):
        assert ast.literal_eval(how_to_load._quoted(path)) == path


def test_numbers_that_no_axis_has_are_not_drawn(tmp_path: Path) -> None:
    updates = [{"update": n, "reward": value} for n, value in enumerate((0.5, 1e300, 10**400, True, "x", None))]
    assert plot_curves(tmp_path / "curves.png", updates, [], 1)
    assert not plot_curves(tmp_path / "none.png", updates[1:], [], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_of_two_exports_to_one_folder_the_second_is_refused_and_the_first_is_whole(
    trained: Trained, tmp_path: Path, capsys: Capture
) -> None:
    with export_folder.whole_folder(tmp_path / "out", 0) as folder:
        (folder / "first").touch()
        refusal = refused(capsys, trained.run, "--out", tmp_path / "out")
        assert "another export is writing" in refusal
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "first"]


@pytest.mark.slow
def test_a_real_run_that_was_resumed_keeps_its_best_and_its_export_draws_what_its_weights_draw(tmp_path: Path) -> None:
    import diffusers

    base = QWEN_IMAGE.build(tmp_path / "base")
    recipe = write_recipe(tmp_path / "job", base)
    prompts = f"{{every: 1, prompts: {recipe.parent / 'prompts.txt'}, num_inference_steps: 4}}"
    keys = (f"validation={prompts}", "checkpoint.keep=1", "checkpoint.every=50")
    first = run(recipe, *keys, "trainer.updates=3")
    made = run(recipe, *keys, "trainer.updates=6", f"checkpoint.resume={first.path}")
    rewards = {line["update"]: line["validation/reward"] for line in made.validation if line["update"]}
    assert sorted(rewards) == [1, 2, 3, 4, 5, 6]
    best = max(rewards, key=lambda version: (rewards[version], version))
    code = exported(made.path, "--which", "best", "--out", tmp_path / "out")
    assert f"update-{best:06d}" in {path.name for path in (made.path / "checkpoints").iterdir()}

    pipeline = diffusers.QwenImagePipeline.from_pretrained(base)
    weights = made.weights(best)
    pipeline.transformer.load_state_dict({name.removeprefix("transformer."): one for name, one in weights.items()})
    arguments = {"prompt": "the digit 7", "height": 32, "width": 32, "num_inference_steps": 3, "true_cfg_scale": 1.0}
    generator = torch.Generator().manual_seed(5)
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline(**arguments, generator=generator, output_type="np").images
    call = {"arguments": arguments, "seed": 5}
    (found,) = computed_elsewhere(tmp_path, [{"name": "run", "code": code, "calls": [call]}])["run"]
    assert (found == wanted).all()

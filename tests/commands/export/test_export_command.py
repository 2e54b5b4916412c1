"""Tests `omni-async export`: its files, its refusals, and that no end leaves half of them."""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
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
from omni_async.commands.export.adapter import FILE, OTHER_TOOLS, Adapter
from omni_async.commands.export.card import card_of
from omni_async.commands.export.curves import plot_curves
from omni_async.config import ConfigError, load
from omni_async.training.loading import open_tensors
from tests.commands.export.export_world import (
    VERSION,
    Trained,
    exported,
    refused,
    trained_run,
    write_checkpoint,
)
from tests.config.test_writing import largest_file
from tests.pipelines.families import QWEN_IMAGE
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


@pytest.fixture
def copied(lora: Trained, tmp_path: Path) -> Path:
    return shutil.copytree(lora.run, tmp_path / lora.run.name)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_rest_is_the_base_models_and_no_file_is_a_link(trained, tmp_path):
    base = Path(trained.config.model.path)
    for name in ("README.md", "all.safetensors", ".hidden", "transformer/diffusion_pytorch_model.fp16.safetensors"):
        (base / name).write_text("of the base model")
    (base / "LICENSE.md").write_text("a licence")
    before = files(base)
    exported(trained.run, "--out", tmp_path / "out")
    made = files(tmp_path / "out")
    unused = {"all.safetensors", ".hidden", "transformer/diffusion_pytorch_model.fp16.safetensors"}
    assert before.keys() - made.keys() == unused, "weights before training would be loaded by name"
    changed = {name for name in made if made[name] != before.get(name)}
    assert changed == {"README.md", "recipe.yaml", "transformer/diffusion_pytorch_model.safetensors"}
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in (tmp_path / "out").rglob("*.safetensors"))
    assert files(base) == before
    exported(trained.run, "--link", "--out", tmp_path / "linked")
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "linked" / vae).samefile(base / vae)


def held_by(trained: Trained) -> dict[str, torch.Tensor]:
    return {name.removeprefix("transformer."): one for name, one in trainable(trained.engine).items()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer/diffusion_pytorch_model.safetensors")


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(one, wanted[name]) for name, one in found.items())


def test_large_weights_are_cut_into_files_with_an_index(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(full, "_LARGEST_FILE", "100KB")
    exported(trained.run, "--out", tmp_path / "out")
    index = json.loads((tmp_path / "out/transformer/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    found = {name: one[...] for name, one in open_tensors(tmp_path / "out/transformer").items()}
    assert same(found, held_by(trained))


def test_weights_have_the_bases_dtype_unless_another_is_named(tmp_path):
    trained = trained_run(tmp_path / "run", QWEN_IMAGE)
    base = Path(trained.config.model.path)
    path = base / "transformer/diffusion_pytorch_model.safetensors"
    save_file({name: one.bfloat16() for name, one in weights(base).items()}, path, {"format": "pt"})
    write_checkpoint(trained.run, trained.config, trained.engine)  # which states that base
    for more, dtype in (([], torch.bfloat16), (["--dtype", "float32"], torch.float32)):
        out = tmp_path / str(dtype)
        exported(trained.run, "--out", out, *more)
        assert same(weights(out), {name: one.to(dtype) for name, one in held_by(trained).items()})


def test_the_policy_that_generated_is_exported_unless_another_is_named(tmp_path):
    trained = trained_run(tmp_path / "run", QWEN_IMAGE, **{"name": "diffusion_nft", "rollout.sde": None})
    (trained.run / "metrics.jsonl").write_text(json.dumps({"update": VERSION, "validation/reward": 0.625}) + "\n")
    auxiliary = trained.engine._model.auxiliary.tensors()
    old = {name.removeprefix("old.transformer."): one for name, one in auxiliary.items()}
    for more, held in (([], old), (["--policy", "trained"], held_by(trained))):
        out = tmp_path / f"out{len(more)}"
        exported(trained.run, "--out", out, *more)
        assert same(weights(out), held)
        assert ("0.625" in (out / "README.md").read_text()) is (held is old), "the old policy was validated"


def front_matter(folder: Path) -> dict[str, Any]:
    matter: dict[str, Any] = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    return matter


def test_the_card(trained, lora, tmp_path):
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
        recipe = (tmp_path / name / "recipe.yaml").read_text()
        assert str(tmp_path.parents[1]) not in recipe and load(tmp_path / name / "recipe.yaml").model.path.endswith(
            "/base"
        )
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
def test_a_base_models_card_is_read_where_hubs_read_it(text, found, tmp_path):
    (tmp_path / "README.md").write_text(text)
    assert card_of(tmp_path) == found


def test_models_of_the_repository_have_its_licence():
    for base in ("quickstart/checkpoint", "quickstart/video/checkpoint"):
        assert card_of(ROOT / "recipes" / base)["license"] == "apache-2.0"


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(trained, lora, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    other = QWEN_IMAGE.build(tmp_path / "deeper")
    path = Path(other) / "transformer/diffusion_pytorch_model.safetensors"
    save_file({name: one[:1].clone() if one.ndim else one for name, one in load_file(path).items()}, path)
    half = shutil.copytree(trained.run, tmp_path / "half")
    shard = next((half / "checkpoints").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    for words, said in (
        ([trained.run, "--lora"], "trained all weights and has no adapters"),
        ([trained.run, "--merged"], "there are no adapters"),
        ([trained.run, "--which", "7"], "has no checkpoint of that update; it has 3"),
        ([trained.run, "--policy", "ema"], "has no 'ema' policy"),
        ([trained.run, "--base", tmp_path / "gone"], "there is no folder"),
        ([trained.run, "--base", other], "it is another base model"),
        ([lora.run, "--merged", "--base", other], "it is another base model"),
        ([half], "bytes"),
    ):
        assert said in refused(capsys, *words, "--out", out)
    assert not out.parent.exists()


def test_a_folder_that_exists_is_left_as_it_is(trained, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    assert "exists; name a folder that does not" in refused(capsys, trained.run, "--out", out)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "exists" in refused(capsys, trained.run, "--out", tmp_path / "dangling")
    (tmp_path / "file").write_text("x")
    assert "cannot be written" in refused(capsys, trained.run, "--out", tmp_path / "file" / "out")
    assert {path.name for path in tmp_path.rglob("*")} == {"out", "precious", "dangling", "file"}


def test_a_disk_without_room_is_refused(trained, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as little:
        little.setattr(export_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=50))
        assert "50 bytes are free" in refused(capsys, trained.run, "--out", tmp_path / "out")
        nbytes = sum(one.nbytes for one in trainable(trained.engine).values())
        little.setattr(export_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes))
        refused(capsys, trained.run, "--out", tmp_path / "out")
        exported(trained.run, "--link", "--out", tmp_path / "out")
        shutil.rmtree(tmp_path / "out")
    with largest_file(200_000):
        assert os.strerror(errno.EFBIG) in refused(capsys, trained.run, "--out", tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_leftovers_of_a_killed_export_are_named_and_kept(lora, tmp_path, capsys):
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
def test_checkpoints_behind_a_link_are_not_exported(copied, tmp_path, capsys, name):
    (copied / name).rename(tmp_path / "elsewhere")
    (copied / name).symlink_to(tmp_path / "elsewhere")
    assert "its checkpoints are links" in refused(capsys, copied, "--out", tmp_path / "out")


@pytest.mark.parametrize("made", ["folder", "file", "link"])
def test_a_path_taken_meanwhile_is_not_replaced(tmp_path, made):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="exists; name a folder"), export_folder.whole_folder(out, 0):
        if made == "link":
            out.symlink_to("nowhere")
        else:
            out.mkdir() if made == "folder" else out.touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and out.is_symlink() is (made == "link")


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127])
def test_a_name_as_long_as_names_can_be_is_written_once(trained, tmp_path, capsys, name):
    with export_folder.whole_folder(tmp_path / name, 0) as folder:
        (folder / "first").touch()
        assert "another export is writing" in refused(capsys, trained.run, "--out", tmp_path / name)
    assert [*tmp_path.rglob("*")] == [tmp_path / name, tmp_path / name / "first"]


def test_an_export_is_not_written_into_its_inputs(lora, capsys):
    checkpoints = lora.run / "checkpoints"
    for folder in (Path(lora.config.model.path), next(checkpoints.iterdir()), checkpoints):
        assert "which this command reads" in refused(capsys, lora.run, "--out", folder / "out")
        assert not (folder / "out").exists()


def changed_tensors(run: Path, change: Any) -> None:
    """Changes the tensors of a run's checkpoint and their metadata, and vouches for them."""
    folder = next((run / "checkpoints").iterdir())
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        made, told = change(tensors, about)
        save_file(made, file, told)
    (folder / "manifest.json").unlink()
    write_manifest(folder)


def test_names_of_tensors_lead_no_file_out_of_the_export(copied, tmp_path, capsys):
    evil = str(tmp_path / "evil")

    def rename(tensors: dict[str, Any], about: dict[str, str]) -> Any:
        name = next(name for name in tensors if name.startswith("model.") and "lora_A" in name)
        other = f"model.{evil}{name.removeprefix('model.transformer')}"
        about = {key: value.replace(json.dumps(name), json.dumps(other)) for key, value in about.items()}
        return {other if key == name else key: one for key, one in tensors.items()}, about

    changed_tensors(copied, rename)
    assert f"it has tensors of {evil!r}" in refused(capsys, copied, "--out", tmp_path / "out")
    assert [*tmp_path.iterdir()] == [copied]


def test_weights_that_are_no_numbers_are_reported(copied, tmp_path, capsys):
    def spoil(tensors: dict[str, Any], about: dict[str, str]) -> Any:
        name = min(name for name in tensors if name.startswith("model."))
        return tensors | {name: torch.full_like(tensors[name], torch.nan)}, about

    changed_tensors(copied, spoil)
    exported(copied, "--out", tmp_path / "out")
    assert "1 trained tensors hold NaN or infinity, transformer." in capsys.readouterr().err


INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (INDEX, "{}"),
        (INDEX, '{"weight_map": [1]}'),
        (INDEX, '{"weight_map": {"a": 1}}'),
        (INDEX, '{"weight_map": {"a": "../vae/x"}}'),
        ("model_index.json", '{"..": ["diffusers", "x"]}'),
        ("model_index.json", '{"/tmp": ["diffusers", "x"]}'),
    ],
)
def test_an_index_names_no_file_elsewhere(lora, tmp_path, capsys, file, content):
    base = shutil.copytree(lora.config.model.path, tmp_path / "base")
    (base / file).write_text(content)
    assert file in refused(capsys, lora.run, "--merged", "--base", base, "--out", tmp_path / "out")
    assert [*tmp_path.iterdir()] == [base]


def test_texts_on_a_card_are_no_markup_and_paths_no_code(tmp_path):
    assert as_markdown("a\n---\n<img src=x>|![a](b) `c` \\[d](e)") == (
        "a --- \\<img src=x>\\|!\\[a](b) \\`c\\` \\\\\\[d](e)"
    )
    assert card._code("a`\n# b") == "a' # b"
    for path in ('x"); import os; ("', "a\\", "new\nline", "\udc80"):
        assert ast.literal_eval(how_to_load._quoted(path)) == path


def test_numbers_that_no_axis_has_are_not_drawn(tmp_path):
    updates = [{"update": n, "reward": value} for n, value in enumerate((0.5, 1e300, 10**400, True, "x", None))]
    assert plot_curves(tmp_path / "curves.png", updates, [], 1)
    assert not plot_curves(tmp_path / "none.png", updates[1:], [], 1)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


class Layers:
    components = ("transformer",)

    def __init__(self, *layers: str) -> None:
        self._names = [f"{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"]

    def names(self, component: str) -> list[str]:
        return self._names

    def read(self, component: str) -> dict[str, torch.Tensor]:
        return {name: torch.full((2, 2), 3.0) for name in self._names}


RENAMED = [(r"blocks\.(\d+)\.to_q", r"double_blocks.\1.q")]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (("blocks.0.to_q", "blocks.7.to_q"), {"double_blocks.0.q", "double_blocks.7.q"}),
        (("blocks.0.to_q", "blocks.0.to_k"), None),  # a file that lacks a layer would be loaded in silence
    ],
)
def test_names_for_comfyui_are_of_all_layers_or_of_none(tmp_path, layers, found):
    Adapter(Layers(*layers), 0.5, RENAMED, None).write(tmp_path, lambda nbytes: None)  # type: ignore[arg-type]
    written = load_file(tmp_path / FILE)
    assert {name.rpartition("lora_")[2] for name in written} == {"A.weight", "B.weight"}
    assert {float(one.mean()) for name, one in written.items() if ".lora_B." in name} == {1.5}
    other = tmp_path / OTHER_TOOLS / "transformer.safetensors"
    assert other.exists() == (found is not None)
    assert found is None or {name.partition(".lora_")[0] for name in load_file(other)} == found

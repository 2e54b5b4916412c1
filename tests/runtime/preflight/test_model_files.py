"""Tests that checkpoints, sizes and families that do not fit each other are refused in one line, before anything is
loaded."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from omni_async_pipelines.flux.sampling import FluxSampling
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from omni_async_pipelines.qwen_image_edit.sampling import QwenImageEditSampling
from omni_async_pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling
from omni_async_pipelines.wan2_2.sampling import Wan22Sampling
from omni_async_pipelines.z_image.sampling import ZImageSampling

from omni_async.cli import main
from omni_async.config import ConfigError
from omni_async.plugins import families
from omni_async.plugins.families import find_family
from omni_async.runtime.preflight.model_files import check_sequence
from tests.runtime.runtime_world import write_package, write_world
from tests.support.effort import require_lines

CLASSES = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "text_encoder_3": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
    "tokenizer_3": ("transformers", "T5Tokenizer"),
    "transformer": ("diffusers", "SD3Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
SETTINGS = {"transformer": {"patch_size": 2, "pos_embed_max_size": 32}, "vae": {"block_out_channels": [8, 8, 8, 8]}}


def safetensors(length: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(length)


def write_parts(folder: Path) -> None:
    """Writes a folder that looks like Stable Diffusion 3, with empty parts."""
    for name, (library, cls) in CLASSES.items():
        (folder / name).mkdir(parents=True)
        kind = "tokenizer_" if "Tokenizer" in cls else "scheduler_" if "Scheduler" in cls else ""
        (folder / name / f"{kind}config.json").write_text(json.dumps(SETTINGS.get(name, {})))
        if not kind:
            stem = "diffusion_pytorch_model" if library == "diffusers" else "model"
            (folder / name / f"{stem}.safetensors").write_bytes(safetensors(100))
        if "Tokenizer" in cls:
            (folder / name / "tokenizer.json").write_text("{}")
    index = {**CLASSES, "_class_name": "StableDiffusion3Pipeline", "feature_extractor": [None, None]}
    (folder / "model_index.json").write_text(json.dumps(index))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_parts(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    sections = {
        "model": {"pipeline": "stable_diffusion_3", "path": "model"},
        "run": {"dir": str(tmp_path / "runs"), "runtime": "inprocess"},
        "data": {"prompts": "prompts.txt"},
        "rollout": {"engine": "diffusers", "sampling": {"height": 64, "width": 64}},
        "reward": {"scorers": [{"name": "jpeg_size"}]},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "recipe.yaml"


# Lines of Python: `check` of such a recipe runs at most 360,000 in all, which take a tenth of a second.
LITTLE = 1_000_000


@pytest.fixture
def line(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns the one line of `check` about a recipe."""

    def answer(recipe: Path, *overrides: str) -> str:
        assert require_lines(LITTLE, partial(main, ["check", str(recipe), *overrides])) == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    return answer


def test_a_checkpoint_may_list_more(recipe: Path) -> None:
    """A part without a model, a missing part, and settings of the pipeline."""
    index = recipe.parent / "model" / "model_index.json"
    more = {"guider": ["diffusers", "Guidance"], "transformer_2": [None, None], "boundary_ratio": 0.9}
    index.write_text(json.dumps(json.loads(index.read_text()) | more))
    (recipe.parent / "model" / "guider").mkdir()
    (recipe.parent / "model" / "guider" / "guider_config.json").write_text("{}")
    assert main(["check", str(recipe), "--no-probe", "rollout.sampling.height=512"]) == 0


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("guidance", 2, "unknown key; did you mean 'guidance_scale'? allowed: "),
        ("max_sequence_length", 1000, "expected int >= 1, <= 512, got 1000"),
        ("width", 528, "this checkpoint's position table ends at 512 pixels, got 528"),
    ],
)
def test_sampling_that_the_family_lacks(recipe, line, key, value, expected):
    assert f"rollout.sampling.{key}: {expected}" in line(recipe, f"rollout.sampling.{key}={value}")


def remove(path: str) -> Callable[[Path], Any]:
    return lambda model: shutil.rmtree(model / path) if (model / path).is_dir() else (model / path).unlink()


def write(path: str, content: bytes) -> Callable[[Path], Any]:
    return lambda model: (model / path).write_bytes(content)


def unlisted(model: Path) -> None:
    """Removes the VAE without a trace."""
    remove("vae")(model)
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({key: part for key, part in index.items() if key != "vae"}))


def renamed(ending: str, index: str | None = None) -> Callable[[Path], Any]:
    """Gives the denoiser's weights another ending, and an index of that variant."""

    def spoil(model: Path) -> None:
        (model / WEIGHTS).rename(model / "transformer" / f"diffusion_pytorch_model{ending}")
        if index is not None:
            (model / f"{WEIGHTS}.index{index}.json").write_bytes(SHARDS)

    return spoil


def as_file(model: Path) -> None:
    remove("text_encoder")(model)
    (model / "text_encoder").write_text("")


FP16, BF16_INDEX = "diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.safetensors.index.bf16.json"
SHARDS = b'{"weight_map": {"w": "diffusion_pytorch_model.safetensors", "b": "model-2.safetensors"}}'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 100\n"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (remove("scheduler"), "has no scheduler/, but its model_index.json lists FlowMatchEulerDiscreteScheduler"),
        (remove("text_encoder_3"), "has no text_encoder_3/, but its model_index.json lists T5EncoderModel"),
        (remove("model_index.json"), "it has no model_index.json"),
        (remove("vae/config.json"), "vae has no config.json, but "),
        (remove("tokenizer_2/tokenizer_config.json"), "tokenizer_2 has no *config.json, but "),
        (remove("scheduler/scheduler_config.json"), "scheduler has no scheduler_config.json, but "),
        (write("vae/config.json", b'{"block_out'), "vae/config.json is cut off or no JSON (Input data was truncated"),
        (write("vae/config.json", b"\xff\xfe"), "vae/config.json is cut off or no JSON ("),
        (write("vae/config.json", b"[]"), "vae/config.json: expected a JSON object, got a list"),
        (write("vae/config.json", b"{}"), "height: "),
        (write("vae/config.json", LFS), "vae/config.json is a Git LFS pointer and not the file; fetch it with `git lf"),
        (write("vae/config.json", b'{"_class_name": "AutoencoderKLWan"}'), "vae/config.json is of a AutoencoderKLWan"),
        (remove(WEIGHTS), "transformer has no weights (diffusion_pytorch_model.safetensors, or "),
        (write(WEIGHTS, b""), f"{WEIGHTS} (0 bytes) is cut off or no safetensors file; copy it again"),
        (write(WEIGHTS, safetensors(100)[:-1]), "expected from its header "),
        (write(WEIGHTS, safetensors(100) + b"x"), "expected from its header "),
        (write(WEIGHTS, b"\xff" * 50), "is cut off or no safetensors file"),
        (write(WEIGHTS, (2).to_bytes(8, "little") + b"[]"), "is cut off or no safetensors file"),
        (write(WEIGHTS, safetensors(100).replace(b"[100]", b"[ 10]")), "is no safetensors file: "),
        (write(WEIGHTS, LFS), "is a Git LFS pointer and not the file; fetch it with `git lfs pull`"),
        (write(INDEX, SHARDS), "transformer lacks 1 of 2 files of weights: model-2.safetensors"),
        (write(INDEX, SHARDS.replace(b"model-2", b"../vae/a")), "names of files in its own folder, "),
        (write(INDEX, b'{"weight_map": {}}'), "expected a weight_map, tensors to files"),
        (write(INDEX, SHARDS.replace(b"model-2", b"diffusion_pytorch_model")), "lacks the tensor 'b'"),
        (renamed(".fp16.safetensors"), f"but only the fp16 variant, {FP16}; rename it to diffusion_pytorch_model.safe"),
        (renamed("-00001-of-00002.safetensors"), "but 1 shards without an index (diffusion_pytorch_model-00001-of-00"),
        (renamed(".bf16.safetensors", index=".bf16"), f"but only the bf16 variant in shards; rename {BF16_INDEX} to "),
        (renamed(".bin"), "model.bin is a pickle, which may run code when it is read; convert it to "),
        (as_file, "text_encoder is a file, not a folder, but its model_index.json lists CLIPTextModelW"),
        (remove("tokenizer_3/tokenizer.json"), "tokenizer_3 has no vocabulary; expected tokenizer.json, or "),
        (write("tokenizer/tokenizer.json", b"{"), "tokenizer/tokenizer.json is cut off or no JSON ("),
        (write("tokenizer/tokenizer.json", b""), "tokenizer/tokenizer.json is empty; copy it again"),
        (unlisted, "is no checkpoint of this family in diffusers layout, "),
        (write("model_index.json", b'{"_class_name": "StableDiffusion3Pipeline"}'), "lists no parts"),
        (write("model_index.json", b'{"_class_name": "FluxPipeline"}'), "is a FluxPipeline checkpoint, but model.pip"),
    ],
)
def test_a_checkpoint_that_is_not_whole(recipe, line, spoil, expected):
    spoil(recipe.parent / "model")
    said = line(recipe)
    assert expected in said
    assert said.startswith(("omni-async: model.path: ", "omni-async: rollout.sampling.height: "))


def test_transformers_prefers_a_single_file_to_shards(recipe: Path, line: Callable[..., str]) -> None:
    encoder = recipe.parent / "model" / "text_encoder"
    (encoder / "a.safetensors").write_bytes((encoder / "model.safetensors").read_bytes())
    (encoder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    (encoder / "model.safetensors").write_bytes(safetensors(100)[:-1])
    assert "text_encoder/model.safetensors" in line(recipe)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package that registers the family `mine` with a module of the given source."""

    def install(source: str) -> None:
        write_package(tmp_path / "site", "mine", families.GROUP, mine="my_family:FAMILY")
        (tmp_path / "site" / "my_family.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        families.family_names.cache_clear()
        families.find_family.cache_clear()

    yield install
    sys.modules.pop("my_family", None)
    families.family_names.cache_clear()
    families.find_family.cache_clear()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_package", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("FAMILY = (", "cannot be imported: SyntaxError: '(' was never closed"),
        ("raise RuntimeError('no licence\\nat all')", "cannot be imported: RuntimeError: no licence"),
        ("", "cannot be imported: AttributeError: module 'my_family' has no attribute 'FAMILY'"),
        ("FAMILY = 'mine'", "which is of type str, not PipelineFamily"),
    ],
)
def test_a_broken_family(recipe, line, installed, source, why):
    installed(source)
    said = line(recipe, "model.pipeline=mine")
    assert "model.pipeline: 'mine' is registered as 'my_family:FAMILY', which " in said and why in said
    assert main(["check", str(recipe), "--no-probe"]) == 0, "other families are not affected"
    assert main(["docs", "--out", str(recipe.parent / "page.md")]) == 2, "its keys cannot be documented"


FLUX, Z_IMAGE = FluxSampling(guidance_scale=3.5), ZImageSampling()


@pytest.mark.parametrize(
    ("spec", "config", "said"),
    [
        (FLUX, {"guidance_embeds": True}, None),
        (FluxSampling(), {"guidance_embeds": False}, None),
        (FLUX, {"guidance_embeds": False}, "guidance_scale: this checkpoint's transformer"),
        (Z_IMAGE, {"axes_lens": [514, 32, 32]}, None),
        (Z_IMAGE, {"axes_lens": [513, 32, 32]}, "max_sequence_length: this checkpoint's position table ends"),
        (ZImageSampling(height=528), {"axes_lens": [514, 32, 32]}, "height: this checkpoint's position table ends at "),
        (Z_IMAGE, {"axes_lens": [514, 32, 16]}, "width: this checkpoint's position table ends at 256, got 512"),
        (Z_IMAGE, {"axes_lens": [514]}, "height: "),
    ],
)
def test_a_sample_that_the_transformer_cannot_make(tmp_path, spec, config, said):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    problem = spec.problem(tmp_path)
    assert problem is None if said is None else problem.startswith(said)


# ---- ranks that share the tokens of a sample -------------------------------------------------------------------------


def checkpoint(folder: Path, *heads: int | None) -> Path:
    """Writes the configurations of denoisers with so many heads, and of a VAE."""
    for part, number in zip(("transformer", "transformer_2"), heads, strict=False):
        (folder / part).mkdir()
        config = {"num_attention_heads": number, "patch_size": [1, 2, 2]}
        (folder / part / "config.json").write_text(json.dumps(config))
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    return folder


LARGE = Wan22Sampling(height=192, width=192)
SD3 = StableDiffusion3Sampling(height=48, width=80)
HEADS, TOKENS = "trainer.sequence_parallel: ", "rollout.sampling: a sample's tokens are a multiple of "


@pytest.mark.parametrize(
    ("family", "spec", "heads", "fits", "refused", "said"),
    [
        ("wan2_2", LARGE, (24, 20), 4, 8, f"{HEADS}8 ranks share a sequence, and do not divide the 20 attention heads"),
        ("wan2_2", LARGE, (24, 20), 4, 9, f"{HEADS}9 ranks share a sequence, and do not divide the 24 attention heads"),
        ("qwen_image", QwenImageSampling(), (None,), 1, 2, "model.path: .* does not name its num_attention_heads"),
        ("qwen_image", QwenImageSampling(height=48, width=80), (120,), 5, 2, f"{TOKENS}15, which trainer.sequence_par"),
        ("qwen_image_edit", QwenImageEditSampling(height=64, width=64), (24,), 4, 8, f"{TOKENS}4, "),
        ("wan2_2", Wan22Sampling(height=48, width=80, num_frames=9), (120,), 5, 2, f"{TOKENS}45, "),
        ("stable_diffusion_3", SD3, (24,), 2, 9, f"{HEADS}9 ranks"),
    ],
)
def test_ranks_divide_heads_and_tokens(tmp_path, family, spec, heads, fits, refused, said):
    whole = checkpoint(tmp_path, *heads), find_family(family), {"rollout.sampling": spec}
    check_sequence(fits, *whole)
    with pytest.raises(ConfigError, match=f"^{said}"):
        check_sequence(refused, *whole)


def test_a_family_without_a_plan_of_attention(tmp_path: Path) -> None:
    family = msgspec.structs.replace(find_family("qwen_image"), name="mine", attention_heads=None)
    with pytest.raises(ConfigError, match="ranks cannot share the tokens of a 'mine' sample, got 2; use 1"):
        check_sequence(2, tmp_path, family, {})


def test_degrees_of_a_recipe(tmp_path: Path, line: Callable[..., str]) -> None:
    rollout = {"engine": "diffusers", "group_size": 6, "sampling": {"height": 64, "width": 64}}
    trainer = {"workers": 6, "sequence_parallel": 2}
    write_world(tmp_path, run={"runtime": "ray"}, rollout=rollout, trainer=trainer)
    recipe = tmp_path / "recipe.yaml"
    bucket = "rollout.buckets=[{sampling: {height: 48, width: 16}}]"
    assert "rollout.buckets.0.sampling: a sample's tokens are a multiple of 3" in line(recipe, bucket)
    said = "trainer.compile: layers whose attention exchanges tokens are not compiled"
    assert said in line(recipe, "trainer.compile=true")
    assert main(["check", str(recipe), "--no-probe"]) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove(""), "there is no folder"),
        (remove("vae"), "has no vae/, but its model_index.json lists AutoencoderKL there"),
        (
            write("transformer/diffusion_pytorch_model.safetensors", safetensors(99)),
            "teacher/transformer: w: (99,), but (100,) in model.path; a teacher has the architecture of the model",
        ),
        (
            write("transformer/diffusion_pytorch_model.safetensors", safetensors(100).replace(b'"w"', b'"v"')),
            "teacher/transformer: v: (100,), but no such tensor in model.path",
        ),
    ],
)
def test_a_teacher_has_the_files_and_the_shapes_of_the_model(recipe, line, capfd, change, said):
    shutil.copytree(recipe.parent / "model", recipe.parent / "teacher")
    taught = f"algorithm.teacher={{path: {recipe.parent / 'teacher'}}}"
    assert main(["check", str(recipe), "--no-probe", taught]) == 0
    capfd.readouterr()
    change(recipe.parent / "teacher")
    found = line(recipe, taught)
    assert "algorithm.teacher.path: " in found and said in found and "model.path: " not in found

"""Tests that ranks which cannot share the tokens of a recipe's samples are refused in one line, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import yaml
from omni_async.runtime.sequence_check import check_sequence
from runtime_world import write_checkpoint

from omni_async.cli import main
from omni_async.config import ConfigError
from omni_async.families import SamplingSpec, find_family
from pipelines.qwen_image.sampling import QwenImageSampling
from pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling
from pipelines.wan2_2.sampling import Wan22Sampling


def checkpoint(folder: Path, *heads: int | None, **transformer: object) -> Path:
    """Writes the configurations of denoisers with so many heads, and of a VAE."""
    for part, number in zip(("transformer", "transformer_2"), heads, strict=False):
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps({"num_attention_heads": number, **transformer}))
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    return folder


def refusal(degree: int, folder: Path, family: str, spec: SamplingSpec) -> str:
    with pytest.raises(ConfigError) as refused:
        check_sequence(degree, folder, find_family(family), {"rollout.sampling": spec})
    assert "\n" not in str(refused.value)
    return str(refused.value)


def accepts(degree: int, folder: Path, family: str, spec: SamplingSpec) -> None:
    check_sequence(degree, folder, find_family(family), {"rollout.sampling": spec})


def test_ranks_divide_the_heads_of_every_denoiser(tmp_path: Path) -> None:
    folder, spec = checkpoint(tmp_path, 24, 20, patch_size=[1, 2, 2]), Wan22Sampling(height=192, width=192)
    accepts(4, folder, "wan2_2", spec)
    said = "8 ranks share a sequence, and do not divide the 20 attention heads of"
    assert said in refusal(8, folder, "wan2_2", spec)
    assert refusal(9, folder, "wan2_2", spec).startswith(
        "trainer.sequence_parallel: 9 ranks share a sequence, and do not"
    )


def test_a_checkpoint_that_does_not_say_its_heads_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, None)
    accepts(1, folder, "qwen_image", QwenImageSampling())
    said = refusal(2, folder, "qwen_image", QwenImageSampling())
    assert said.startswith("model.path: ") and "does not say its num_attention_heads, got None" in said


@pytest.mark.parametrize(
    ("family", "spec", "tokens"),
    [
        ("qwen_image", QwenImageSampling(height=48, width=80), 15),
        ("wan2_2", Wan22Sampling(height=48, width=80, num_frames=9), 45),
    ],
)
def test_ranks_divide_the_tokens_of_a_sample(tmp_path: Path, family: str, spec: SamplingSpec, tokens: int) -> None:
    folder = checkpoint(tmp_path, 120, patch_size=[1, 2, 2])
    accepts(5, folder, family, spec)
    said = refusal(2, folder, family, spec)
    assert said.startswith(
        f"rollout.sampling: a sample has {tokens} tokens, which trainer.sequence_parallel = 2 does not"
    )


def test_stable_diffusion_takes_any_number_of_tokens(tmp_path: Path) -> None:
    accepts(2, checkpoint(tmp_path, 24), "stable_diffusion_3", StableDiffusion3Sampling(height=48, width=80))


def test_a_family_without_a_plan_is_refused_by_name(tmp_path: Path) -> None:
    family = msgspec.structs.replace(find_family("qwen_image"), name="mine", attention_heads=None)
    with pytest.raises(ConfigError, match="ranks cannot share the tokens of a 'mine' sample, got 2; use 1"):
        check_sequence(2, checkpoint(tmp_path, 24), family, {})


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "transformer" / "config.json").write_text('{"num_attention_heads": 4}')
    (tmp_path / "prompts.txt").write_text("a cat\n")
    sections = {
        "model": {"pipeline": "qwen_image", "path": "model"},
        "run": {"dir": str(tmp_path / "runs")},
        "data": {"prompts": "prompts.txt"},
        "rollout": {"engine": "diffusers", "group_size": 6, "sampling": {"height": 64, "width": 64}},
        "reward": {"scorers": [{"name": "jpeg_size"}]},
        "trainer": {"workers": 6, "sequence_parallel": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainer.sequence_parallel=3"], "3 ranks share a sequence, and do not divide the 4 attention heads of"),
        (["rollout.sampling.height=48", "rollout.sampling.width=16"], "rollout.sampling: a sample has 3 tokens, which"),
        (
            ["rollout.buckets=[{sampling: {height: 48, width: 16}}]"],
            "rollout.buckets.0.sampling: a sample has 3 tokens, which trainer.sequence_parallel = 2 does not divide",
        ),
        (["trainer.backend=plain"], "trainer.backend: 'plain' is one rank, got trainer.workers = 6; use 'fsdp2' or"),
        (["trainer.compile=true"], "trainer.compile: layers whose attention exchanges tokens are not compiled"),
    ],
)
def test_the_command_line_says_so_in_one_line_at_once(
    recipe: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    started = time.process_time()
    assert main(["check", str(recipe), *overrides]) == 2
    assert time.process_time() - started < 1
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err


def test_a_degree_that_fits_passes_and_no_torch_is_imported(recipe: Path) -> None:
    code = "import sys\nfrom omni_async.cli import main\nsys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    call = [sys.executable, "-c", code, "check", str(recipe)]
    done = subprocess.run([*call, "--no-probe"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([*call, "trainer.sequence_parallel=3"], capture_output=True).returncode == 2

"""Tests that every family passes `omni-async parity`, and that parity catches what is wrong with one or an engine."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omni_async_pipelines.qwen_image.policy import QwenImagePolicy
from omni_async_pipelines.stable_diffusion_3.policy import StableDiffusion3Policy
from omni_async_pipelines.wan2_2.policy import Wan22Policy

from omni_async.cli import main
from omni_async.commands.parity.case import Upstream
from omni_async.commands.parity.engine import check_engine
from omni_async.commands.parity.model import Subject, _idle, check_model
from omni_async.commands.parity.table import Row
from omni_async.data.image_files import read_prompt_image
from omni_async.diffusion.sde.schedules import linear
from omni_async.plugins.families import find_family
from omni_async.rollout.diffusers_engine import DiffusersEngine
from tests.pipelines.families import FAMILIES, NAMES, QWEN_IMAGE, SD3, WAN, Family

ALL = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)


def run_parity(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command on vLLM-Omni in a child process: an engine claims its process."""
    command = [sys.executable, "-m", "omni_async.cli", "parity", name, "--engine", "vllm_omni", "--json", "rows.json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


def engine_rows(subject: Subject, engine: DiffusersEngine | None = None) -> list[Row]:
    async def collect() -> list[Row]:
        started = engine or DiffusersEngine("diffusers", subject.policy, dtype=torch.float32, max_batch=8, device="cpu")
        await started.start()
        rows = [row async for row in check_engine(subject, started)]
        await started.close()
        return rows

    return asyncio.run(collect())


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Subject]:
    """Returns a function that makes a family's subject, once."""

    @cache
    def made(label: str) -> Subject:
        [family] = [family for family in FAMILIES if family.label == label]
        return family.subject(tmp_path_factory.mktemp(label))

    return lambda family: made(family.label)


@pytest.mark.sliced(floor=1)
@ALL
def test_families_compute_what_their_pipelines_do(family, subject_of):
    subject = subject_of(family)
    rows = [*check_model(subject), *engine_rows(subject)]
    assert [row for row in rows if not row.passed] == []
    assert len(rows) == 6 * len(family.specs) + 4 + any(spec.guided for spec in family.specs) + 8
    measured = {row.check: row for row in rows}
    assert "layers" in measured["adapters"].note and measured["gradient"].note.split()[0] != "0"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_vllm_omni_computes_what_the_trainer_does(name, tmp_path):
    done = run_parity(name, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [row for found in json.loads((tmp_path / "rows.json").read_text()).values() for row in found]
    assert sum(row["subject"] == "vllm_omni" for row in rows) == 8 * sum(family.name == name for family in FAMILIES)
    assert done.stdout.count("| ok     |") == len(rows) and "FAILED" not in done.stdout


@pytest.mark.slow
@pytest.mark.thorough
def test_vllm_omni_needs_no_libnuma(tmp_path):
    """z_image is the family whose transformer looks up an operator of vLLM's kernels, which link libnuma."""
    (tmp_path / "libnuma.so.1").touch()  # The loader finds this file first and cannot load it.
    hidden = {"LD_LIBRARY_PATH": str(tmp_path)}
    load = [sys.executable, "-c", "import ctypes; ctypes.CDLL('libnuma.so.1')"]
    assert subprocess.run(load, env=os.environ | hidden, capture_output=True).returncode != 0, "it is hidden"
    done = run_parity("z_image", tmp_path, **hidden)
    assert (done.returncode, done.stderr) == (0, "") and "FAILED" not in done.stdout


@ALL
def test_another_checkpoint_is_refused(family, subject_of, tmp_path):
    with pytest.raises(ValueError, match="is missing"):
        family.policy(str(tmp_path))
    index = json.loads((Path(subject_of(family).path) / "model_index.json").read_text())
    assert index["_class_name"] == find_family(family.name).model_index_class


def test_a_new_thread_rounds_as_this_one_does() -> None:
    """Engines compute in threads of a pool and are compared to the bit."""
    inputs, weights = torch.randn(7, 256), torch.randn(256, 256)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(torch.nn.functional.linear, inputs, weights).result()
    assert torch.equal(there, torch.nn.functional.linear(inputs, weights))


# ---- what it catches -------------------------------------------------------------------------------------------------


class WrongSign(StableDiffusion3Policy):
    def velocity(self, *args: Any, **options: Any) -> torch.Tensor:
        return -super().velocity(*args, **options)


class WrongTime(StableDiffusion3Policy):
    def inputs(self, latents: Any, sigma: Any, text: Any, spec: Any) -> dict[str, Any]:
        return super().inputs(latents, 1 - sigma, text, spec)


class WrongSchedule(StableDiffusion3Policy):
    def sigmas(self, num_inference_steps: int, spec: Any) -> torch.Tensor:
        return linear(num_inference_steps)


class WrongOrderOfGuidance(StableDiffusion3Policy):
    def combine(self, cond: Any, uncond: Any, scale: float, spec: Any) -> torch.Tensor:
        return super().combine(uncond, cond, scale, spec)


class WrongDtype(StableDiffusion3Policy):
    def velocity(self, components: Any, *args: Any, **options: Any) -> torch.Tensor:
        return super().velocity(components, *args, **options).to(next(components["transformer"].parameters()).dtype)


class PaddingTakesPart(QwenImagePolicy):
    def inputs(self, latents: Any, sigma: Any, text: Any, spec: Any) -> dict[str, Any]:
        return super().inputs(latents, sigma, text | {"mask": torch.ones_like(text["mask"])}, spec)


class DroppedComponent(Wan22Policy):
    def component_of(self, sigma: float) -> str:
        return self.components[0]


@pytest.mark.parametrize(
    ("family", "wrong", "caught", "because"),
    [
        (SD3, WrongSign, "noise-free samples, spec 1", "look at what is made of its output"),
        (SD3, WrongTime, "noise-free samples, spec 1", "argument 'transformer.timestep'"),
        (SD3, WrongSchedule, "schedule, spec 1", "sigmas"),
        (SD3, WrongOrderOfGuidance, "noise-free samples, guided", "guidance"),
        (SD3, WrongDtype, "float32 from bfloat16", "the velocity is torch.bfloat16"),
        (QWEN_IMAGE, PaddingTakesPart, "rows of a batch, spec 1", "different lengths"),
        (WAN, DroppedComponent, "gradient", "no gradient reaches ['transformer_2."),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_wrong_policies_are_caught(family, wrong, caught, because, subject_of):
    right = subject_of(family)
    subject = Subject(right.case, right.path, wrong(right.path))
    subject.upstream = right.upstream
    found = next(row for row in check_model(subject) if row.check == caught)
    assert not found.passed and because in found.note


def test_patterns_of_idle_parameters(subject_of):
    subject = subject_of(SD3)

    def listed(*idle: str) -> set[str]:
        return _idle(Subject(dataclasses.replace(subject.case, idle=idle), subject.path, subject.policy))

    assert listed("transformer.proj_out.*") == {"transformer.proj_out.weight", "transformer.proj_out.bias"}
    last = listed("transformer.transformer_blocks.{last}.attn.add_q_proj.*")
    assert last == {f"transformer.transformer_blocks.1.attn.add_q_proj.{kind}" for kind in ("weight", "bias")}


class Stale(DiffusersEngine):
    """Reports the new version, and keeps the weights of the old one."""

    def _swap_in(self, staged: Any) -> Any:
        self._version, self._digest = staged.manifest.version, staged.manifest.digest
        return self._report()


class Deaf(StableDiffusion3Policy):
    """Has an encoder that reads the same text in every prompt."""

    def load_codec(self, dtype: torch.dtype) -> Any:
        codec = super().load_codec(dtype)
        encode_text = codec.encode_text
        codec.encode_text = lambda text, spec: encode_text("the same", spec)  # type: ignore[method-assign]
        return codec


def test_wrong_engines_are_caught(subject_of):
    subject = subject_of(SD3)
    how: dict[str, Any] = {"dtype": torch.float32, "max_batch": 8, "device": "cpu"}
    rows = engine_rows(subject, Stale("stale", subject.policy, **how))
    wrong = {row.check: row.note for row in rows if not row.passed}
    assert [*wrong] == ["weights in mid-trajectory", "old weights come back", "adapters", "wrong weights are refused"]
    assert "old weights after a push" in wrong["old weights come back"]
    assert wrong["adapters"] == "adapters change nothing"
    assert "a version without one parameter" in wrong["wrong weights are refused"]


@pytest.mark.thorough
def test_an_encoder_that_reads_one_text_is_caught(subject_of):
    subject = subject_of(SD3)
    how: dict[str, Any] = {"dtype": torch.float32, "max_batch": 8, "device": "cpu"}
    rows = engine_rows(subject, DiffusersEngine("deaf", Deaf(subject.path), **how))
    assert [row.check for row in rows if not row.passed] == ["noise-free samples"]


def test_prompts_carry_the_images_of_a_case(tmp_path):
    bare = dataclasses.replace(SD3.case, image_sizes=((6, 4), None, (4, 8)))
    assert SD3.case.with_media(tmp_path) == SD3.case and not any(tmp_path.iterdir())
    case = bare.with_media(tmp_path)
    prompts = [case.request(case.specs[0], n).prompt for n in range(3)]
    found = [[read_prompt_image(image).image.shape for image in prompt.images] for prompt in prompts]
    assert found == [[(3, 4, 6)], [], [(3, 8, 4)]]
    assert case == bare.with_media(tmp_path), "the same pixels every time"
    asked = Upstream.arguments(SimpleNamespace(not_arguments=()), case.prompts[0], case.specs[0])
    assert asked["image"].size == (6, 4) and asked["prompt"] == case.prompts[0].text
    assert "image" not in Upstream.arguments(SimpleNamespace(not_arguments=()), case.prompts[1], case.specs[0])


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["no_such_family"], "expected one of"),
        (["wan2_2", "rollout.max_batch=1"], "only a recipe has values to override"),
        (["no_such_recipe.yaml"], "no_such_recipe.yaml"),
    ],
)
def test_wrong_usage_is_one_line(arguments, why, capsys):
    assert main(["parity", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_recipes_are_compared_by_their_own_settings(subject_of, tmp_path, capfd):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {subject_of(SD3).path}}}\ndata: {{prompts: none.txt}}\nreward: {{scorers: [{{name: ocr}}]}}\n"
    )
    small = ["rollout.sampling.height=32", "rollout.sampling.width=48", "rollout.sampling.max_sequence_length=32"]
    assert main(["parity", str(recipe), "--engine", "none", *small]) == 0
    shown = capfd.readouterr().out
    assert "noise-free samples, spec 1" in shown and "FAILED" not in shown

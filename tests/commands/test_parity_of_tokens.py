"""Tests `omni-async parity` for models that draw tokens: it passes, and catches wrong policies and engines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from omni_async_pipelines.qwen3_omni import FAMILY
from omni_async_pipelines.qwen3_omni.parity import CASES
from omni_async_pipelines.qwen3_omni.policy import Qwen3OmniPolicy

from omni_async.cli import main
from omni_async.commands.parity import tokens
from omni_async.commands.parity.tokens import TokenSubject, check_token_engine, check_token_policy
from omni_async.data.image_files import carried_image
from omni_async.rollout.base import Trajectory
from omni_async.rollout.transformers_engine import TransformersEngine
from omni_async.tokens.policy import Prepared
from omni_async.types import SampleRequest


class PlainPositions(Qwen3OmniPolicy):
    """Counts an image's tokens like those of a text."""

    def prepare(self, *args: Any) -> Prepared:
        found = super().prepare(*args)
        return replace(found, positions=torch.arange(len(found.ids)).expand(3, -1), next_position=len(found.ids))


class Stale(TransformersEngine):
    """Reports the new version, and keeps the weights of the old one."""

    def _swap_in(self, staged: Any) -> Any:
        self._version, self._digest = staged.manifest.version, staged.manifest.digest
        return self._report()


class LastIsNan(TransformersEngine):
    """Computes NaN for the last answer of a batch."""

    async def generate(self, request: SampleRequest) -> Trajectory:
        found = await super().generate(request)
        if request.sample_id == "s7":
            found.tensors["log_probs"] = torch.full_like(found.tensors["log_probs"], float("nan"))
        return found


def test_wrong_policies_and_engines_are_caught(tmp_path: Path) -> None:
    path = str(CASES[0].build(tmp_path / "tiny"))
    case = CASES[0].with_media(tmp_path)
    first, *others = case.prompts
    carried = carried_image(Path(first.images[0].path).read_bytes(), "an image")
    case = replace(case, prompts=(structs.replace(first, images=(carried,)), *others))
    subject = TokenSubject(case, path, PlainPositions(path), FAMILY)
    assert [row.check for row in check_token_policy(subject) if not row.passed] == ["log-probs of a row"]

    async def wrong(cls: type[TransformersEngine]) -> list[str]:
        right = TokenSubject(case, path, Qwen3OmniPolicy(path), FAMILY)
        engine = cls("wrong", right.policy, dtype=torch.float32, max_batch=8, device="cpu")
        await engine.start()
        found = [row.check async for row in check_token_engine(right, engine) if not row.passed]
        await engine.close()
        return found

    assert asyncio.run(wrong(Stale)) == ["log-probs after a push", "wrong weights are refused"]
    assert len(asyncio.run(wrong(LastIsNan))) == 4


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("family", ["qwen_omni", "qwen3_omni"])
def test_families_compute_what_transformers_does(family: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", family]) == 0
    shown = capfd.readouterr().out
    assert shown.count("| ok     |") == 8 and "FAILED" not in shown


@pytest.mark.slow
@pytest.mark.thorough
def test_vllm_computes_what_transformers_does(tmp_path: Path) -> None:
    """In a child process, because vLLM's engine sets variables of its process."""
    command = [sys.executable, "-m", "omni_async.cli", "parity", "qwen_omni", "--engine", "vllm"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| ok     | vllm ") == 4 and "FAILED" not in done.stdout


def test_an_engine_that_the_machine_cannot_run_is_no_failure(capfd, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tokens, "check_token_policy", lambda subject: iter(()))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    file = tmp_path / "rows.json"
    assert main(["parity", "qwen3_omni", "--engine", "vllm", "--json", str(file)]) == 0
    [line] = [line for line in capfd.readouterr().out.splitlines() if "| vllm " in line]
    assert line.startswith("| n/a    |") and "a mixture of experts; use rollout.engine: transformers" in line
    [[row]] = json.loads(file.read_text()).values()
    assert row["impossible"] and row["value"] is None


def test_engines_that_draw_something_else_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for family, engine, other in (("qwen3_omni", "diffusers", "transformers"), ("flux", "transformers", "diffusers")):
        assert main(["parity", family, "--engine", engine]) == 2
        assert f"'{engine}' does not; use '{other}'" in capsys.readouterr().err

"""Tests the probe of an accelerator on the CPU: every section at test size, and that no section ends another."""

from __future__ import annotations

import math
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_probe
from benchmarks.gpu_probe_bench import Bench
from benchmarks.gpu_probe_mismatch import by_flash_attention_3
from benchmarks.gpu_probe_model import guided_step
from benchmarks.gpu_probe_run import Results, Settings, run, to_markdown
from tests.benchmarks.probe_sections import section

TINY = Settings(layers=1, small=True, device="cpu")
# The first readings of every section, by the beginning of their names.
READINGS = {
    "machine": ("host", "packages", "host memory", "/dev/shm", "collective of one rank"),
    "attention": ("flash in bfloat16", "flash in float32", "cudnn in bfloat16"),
    "mismatch": ("one row at a time, guidance 1, step 0", "one row at a time, guidance 1, step 2"),
    "trainer": (
        "set-up",
        "proximal log-probs of 2",
        "micro-batch of 2",
        "optimizer step",
        "export",
        "digest",
        "proximal log-probs of 4",
        "micro-batch of 4",
    ),
    "optimizer": ("AdamW, foreach", "AdamW, fused"),
    "swap": ("adapters, base read from its file", "8 pieces joined on the host", "8 pieces copied into place"),
    "vae": ("decode 1", "decode 2"),
}
STEPS = (
    "transformer",
    *("eager, 2 rows", "eager, 1 rows", "eager, launch of one pass, 2", "eager, launch of one pass, 1"),
    *("compiled, 2 rows", "compiled, 1 rows", "compiled, launch of one pass, 2", "compiled, launch of one pass, 1"),
)
EVERY = [*READINGS.items(), pytest.param("steps", STEPS, marks=pytest.mark.thorough)]


@cache
def measured(name: str) -> list[dict[str, Any]]:
    module, _, function = gpu_probe.SECTIONS[name].function.partition(":")
    readings: list[dict[str, Any]] = []
    getattr(import_module(module), function)(TINY, readings.append)
    return readings


@pytest.mark.parametrize(("name", "expected"), EVERY)
def test_a_section_reports_every_reading_and_none_fails(name: str, expected: tuple[str, ...]) -> None:
    readings = measured(name)
    assert not [reading for reading in readings if "failed" in reading]
    assert all(reading["name"].startswith(e) for reading, e in zip(readings, expected, strict=False))
    assert len(readings) >= len(expected)
    assert all(value > 0 for reading in readings for value in (reading.get("seconds"), reading.get("tflops")) if value)
    assert not dist.is_initialized()


def test_nats_are_the_velocitys_error_times_the_steps_factor() -> None:
    found = {reading["name"]: reading for reading in measured("mismatch")}
    bench = Bench(TINY, lambda reading: None)
    elements = math.prod(bench.policy.latent_shape(bench.spec))
    for guidance in ("1", "4"):
        for step in (0, 2, 4):
            s, after, first = (float(bench.sigmas[k]) for k in (step, step + 1, 1))
            h, g2 = s - after, 1.2**2 * s / (1 - (first if s == 1 else s))
            factor = math.sqrt(elements) * (1 + g2 * (1 - s) / (2 * s)) * h / math.sqrt(g2 * h)
            reading = found[f"float32 arithmetic, guidance {guidance}, step {step}"]
            assert reading["std_nats"] == pytest.approx(reading["relative_error"] * factor, rel=1e-3)
            assert 0 < reading["largest_nats"] < 6 * reading["std_nats"]
            assert found[f"one row at a time, guidance {guidance}, step {step}"]["std_nats"] < reading["std_nats"]


@torch.no_grad()
def test_flash_attention_3_takes_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def flash_attn_func(*tensors: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Takes (B, L, heads, D), as the library does, and computes by hand."""
        q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
        calls.append(tuple(q.shape))
        return ((q @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(-1) @ v).transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    bench = Bench(TINY, lambda reading: None)
    step = guided_step(bench, dict(bench.policy.load_components(torch.float32)), 2, 4.0)
    expected = step()
    with by_flash_attention_3():
        assert torch.allclose(step(), expected, atol=1e-5)
    assert [shape[0] for shape in calls] == [2, 2]  # both branches of guidance, one layer each
    assert torch.equal(step(), expected)


def test_an_arm_that_does_not_fit_or_is_refused_leaves_the_next_one_to_run() -> None:
    readings: list[dict[str, Any]] = []
    bench = Bench(TINY, readings.append)
    for name, error in (("large", torch.OutOfMemoryError("no memory")), ("odd", RuntimeError("no kernel\nfor it"))):
        with bench.arm(name):
            raise error
    assert readings == [
        {"name": "large", "failed": "out of memory"},
        {"name": "odd", "failed": "RuntimeError: no kernel"},
    ]


def test_sections_survive_each_others_end_and_every_reading_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {name: section(name) for name in ("raises", "fills", "dies", "measures")}
    sections["hangs"] = section("hangs", limit_s=0.1)
    results = run(sections, Settings(3), Results({}), tmp_path / "probe.json")
    assert msgspec.json.decode((tmp_path / "probe.json").read_bytes(), type=Results) == results
    ends = {name: (outcome.status, outcome.error, outcome.gib) for name, outcome in results.sections.items()}
    assert ends == {
        "raises": ("failed", "ValueError: no such kernel", 1.0),
        "fills": ("out of memory", "OutOfMemoryError: tried to allocate 41 GiB", None),
        "dies": ("failed", "its process ended with exit code -9", None),
        "measures": ("done", None, 2.0),
        "hangs": ("stopped", "not done after 0.1 s", None),
    }
    assert results.sections["dies"].readings == [{"name": "before"}]
    assert "measures: layers: value 3, gib 2\n" in capsys.readouterr().out
    assert "| measures | half: seconds 0.5 |\n" in to_markdown(results)


def test_the_list_has_every_section_and_their_limits_leave_time_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_probe.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [*gpu_probe.SECTIONS]
    assert sum(10 + one.limit_s for one in gpu_probe.SECTIONS.values()) <= 600


@pytest.mark.timeout(900)  # eight processes, each of which imports torch
@pytest.mark.parametrize(
    "device",
    [
        pytest.param(("--device", "cpu"), marks=[pytest.mark.slow, pytest.mark.thorough]),
        pytest.param((), marks=pytest.mark.gpu),
    ],
)
def test_the_command_measures_all_of_a_tiny_model(tmp_path: Path, device: tuple[str, ...]) -> None:
    out = tmp_path / "probe.json"
    assert gpu_probe.main([*device, "--small", "--out", str(out)]) == 0
    results = msgspec.json.decode(out.read_bytes(), type=Results)
    assert not [one for outcome in results.sections.values() for one in outcome.readings if "failed" in one]
    assert {name: outcome.status for name, outcome in results.sections.items()} == dict.fromkeys(
        gpu_probe.SECTIONS, "done"
    )
    table = out.with_suffix(".md").read_text()
    assert all(f"| {name} | " in table for name in gpu_probe.SECTIONS)

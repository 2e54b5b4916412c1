"""Tests the probe of an accelerator on the CPU: every section at test size, and that no section ends another."""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from benchmarks import gpu_probe
from benchmarks.gpu_probe_bench import Bench
from benchmarks.gpu_probe_run import Results, Settings, run, to_markdown
from tests.benchmarks.probe_sections import section

TINY = Settings(layers=1, small=True, device="cpu")


@cache
def measured(name: str) -> list[dict[str, Any]]:
    module, _, function = gpu_probe.SECTIONS[name].function.partition(":")
    readings: list[dict[str, Any]] = []
    getattr(import_module(module), function)(TINY, readings.append)
    return readings


# Section `steps` compiles the model.
@pytest.mark.sliced(floor=3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "steps")) for name in gpu_probe.SECTIONS]
)
def test_no_reading_fails(name: str) -> None:
    readings = measured(name)
    assert readings and not [reading for reading in readings if "failed" in reading]
    assert all(value > 0 for reading in readings for value in (reading.get("seconds"), reading.get("tflops")) if value)
    assert not dist.is_initialized()


def test_nats_follow_from_velocity_errors() -> None:
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


def test_sections_survive_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.gpu
@pytest.mark.timeout(900)  # eight processes, each of which imports torch
def test_the_command_measures_everything(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    assert gpu_probe.main(["--small", "--out", str(out)]) == 0
    results = msgspec.json.decode(out.read_bytes(), type=Results)
    assert not [one for outcome in results.sections.values() for one in outcome.readings if "failed" in one]
    assert {name: one.status for name, one in results.sections.items()} == dict.fromkeys(gpu_probe.SECTIONS, "done")
    assert sum(10 + one.limit_s for one in gpu_probe.SECTIONS.values()) <= 600

"""Tests the weight benchmark on tiny models, and the transports between real Ray actors: one trainer, two engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omni_async_pipelines.qwen_image.tiny import build

from benchmarks import weights
from benchmarks.weights_model import SIZED, SizedPolicy, sized_config
from benchmarks.weights_report import Results
from omni_async.rollout.base import EngineError
from omni_async.weights.transport.base import TransportError

ray = pytest.importorskip("ray")
from benchmarks.weights_measure import hosts, ray_session  # noqa: E402 (imports ray)
from tests.support.fakes import load_model  # noqa: E402

_TINY_MB = 1.0


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_session(0):
        yield


@pytest.mark.parametrize("megabytes", [1.0, 10.0, 20.0, 21.0, 100.0])
def test_a_sized_model_has_about_its_size(megabytes: float) -> None:
    import torch

    with torch.device("meta"):
        model = load_model(SizedPolicy(repr(megabytes)))
    assert sum(p.numel() * 4 for p in model.parameters()) == pytest.approx(megabytes * 1e6, rel=0.21)


# ---- Ray -------------------------------------------------------------------------------------------------------------


async def carry(trainer: Any, engines: dict[str, Any], payload: str) -> None:
    """Publishes a changed version by every transport, and checks that every engine computes with it."""
    await asyncio.gather(*(engine.start() for engine in engines.values()))
    await trainer.start()
    before = {await engine.digest() for engine in engines.values()}
    assert len(before) == 1
    for transport in weights.TRANSPORTS:
        trained = await trainer.nudge(1e-2)
        times = await trainer.publish(transport)
        held = {await engine.digest() for engine in engines.values()}
        assert len(held) == 1 and held != before, transport
        assert payload == "lora" or held == {trained} == {times.digest}, transport
        before = held


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("payload", ["full", "lora"])
def test_every_transport_brings_two_engines_the_same_weights_update_after_update(
    local_ray: None, tmp_path: Path, payload: str
) -> None:
    config = sized_config(_TINY_MB, lora_rank=4 if payload == "lora" else None)

    async def main() -> None:
        with hosts(config, SIZED, weights.TRANSPORTS, 2, tmp_path) as (trainer, engines):
            await carry(trainer, engines, payload)
            if payload == "full":  # an engine that is gone ends the publish, and does not hold it up
                ray.kill(engines["rollout-1"]._actor)
                with pytest.raises((ray.exceptions.RayActorError, EngineError, TransportError)):
                    await trainer.publish("collective")

    asyncio.run(main())
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_tiny_run_measures_every_arm_and_leaves_its_numbers(
    local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_recipe: Path
) -> None:
    arguments = ["--sizes", "1", "100000", "--repeats", "2", "--window", "0.1", "--every", "0.05"]
    assert weights.main([*arguments, "--recipe", str(tiny_recipe), "--out", str(tmp_path)]) == 0
    results = msgspec.json.decode((tmp_path / "results.json").read_bytes(), type=Results)
    repeated = [(transport, repeat) for repeat in range(2) for transport in weights.TRANSPORTS]
    assert [(r.transport, r.repeat) for r in results.publishes] == repeated
    for record in results.publishes:
        assert 0 < record.blocked < record.swapped
        assert record.nbytes == 1_048_576 and min(record.copy_tensors, record.copy_blocks, record.copy_new) > 0
    arms = [(arm, repeat) for repeat in range(2) for arm in ("quiet", "periodic", "back_to_back")]
    assert [(r.arm, r.repeat) for r in results.throughput] == arms
    assert [r.publishes == 0 for r in results.throughput] == [True, False, False] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    shown = capsys.readouterr().out
    assert "left out: 100000 MB (--max-mb is 2000" in shown
    assert all(transport in shown for transport in weights.TRANSPORTS)


@pytest.fixture
def tiny_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the quickstart with a random model of one layer."""
    folder = tmp_path_factory.mktemp("recipe")
    quickstart = weights.RECIPE.read_text().replace("path: checkpoint", f"path: {build(folder / 'tiny', layers=1)}")
    for name in ("prompts_train.jsonl", "prompts_validation.jsonl"):
        (folder / name).write_bytes((weights.RECIPE.parent / name).read_bytes())
    (folder / "recipe.yaml").write_text(quickstart)
    return folder / "recipe.yaml"

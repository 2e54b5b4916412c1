from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from omni_async.config import with_spec
from omni_async.config.schema import Config, Placement
from omni_async.config.section import Resources
from omni_async.performance.profile import NOTHING, Profile
from omni_async.plugins.families import find_family
from omni_async.rollout.emulated import EmulatedEngine, ReplayedTimes
from omni_async.rollout.factory import build_engine
from tests.rollout.conftest import make_request
from tests.rollout.token_answers import make_request as token_request
from tests.support.configs import build
from tests.support.token_world import FAMILY, token_config, toy_prompt

READ_DIGITS = str(Path(__file__).parents[2] / "recipes/quickstart/read_digits/checkpoint")


def config(engine: str, path: str, **rollout: Any) -> Config:
    drawn = {"engine": engine, "emulated": {"step_s": 0.0}} | rollout
    return with_spec(build({"model": {"pipeline": "qwen_image", "path": path}, "rollout": drawn}))


@pytest.mark.parametrize("name", ["emulated", "diffusers"])
async def test_engines_share_shapes_and_schedule(name, checkpoint):
    engine = build_engine(config(name, checkpoint), "e0", find_family("qwen_image"))
    report = await engine.start()
    made = await engine.generate(make_request())
    await engine.close()
    assert (engine.name, report.engine, report.version) == ("e0", "e0", 0)
    assert made.tensors["latents"].shape == (4, 8, 64)


@pytest.mark.parametrize("engine", ["diffusers", "vllm_omni"])
@pytest.mark.parametrize("on", [True, False])
def test_engines_batch_and_offload_as_configured(engine, on, checkpoint):
    rollout = {"batching": "step" if on else "request", "offload": on}
    built: Any = build_engine(config(engine, checkpoint, **rollout), "e0", find_family("qwen_image"))
    assert (built._stepwise, built._offload) == (on, on)
    if engine == "vllm_omni":
        assert not built._trains_here, "a run's store copies its results"


def test_token_families_that_vllm_loads_run_on_it():
    family = find_family("qwen_omni")
    options = {"max_model_len": 64}
    config = token_config(rollout__engine="vllm", weights__kv="recompute", rollout__engine_args=options)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=READ_DIGITS))
    engine: Any = build_engine(config, "e0", family)
    assert (engine._recompute, engine._engine_args, engine._policy.path) == (True, options, READ_DIGITS)
    for gpus, devices in ((0, 1), (0.5, 1), (2, 2)):
        placed = msgspec.structs.replace(config, placement=Placement(rollout=Resources(gpus=gpus)))
        assert build_engine(placed, "e0", family)._devices == devices  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'toy_tokens' does not run on 'vllm'; use 'transformers'"):
        build_engine(config, "e0", FAMILY)


async def test_token_families_run_on_transformers():
    config = token_config(weights__kv="recompute", rollout__batching="request", rollout__conditioning_cache="1MiB")
    engine: Any = build_engine(config, "e0", FAMILY)
    assert (engine._recompute, engine._stepwise, engine._prompts.most_bytes) == (True, False, 2**20)
    await engine.start()
    made = await engine.generate(token_request(toy_prompt(0), config.rollout.sampling))
    await engine.close()
    assert made.media.parts == ("text",)
    with pytest.raises(ValueError, match="'toy_tokens' draws tokens, and 'emulated' does not; use 'transformers'"):
        build_engine(token_config(rollout__engine="emulated"), "e0", FAMILY)
    with pytest.raises(ValueError, match="'qwen_image' draws latents, and 'transformers' does not; use 'diffusers'"):
        build_engine(config, "e0", find_family("qwen_image"))


def test_profiles_are_replayed_and_families_without_a_vllm_pipeline_refused(checkpoint):
    profile = Profile(name="p", source="a test", generate=NOTHING, score=NOTHING, train=NOTHING)
    engine = build_engine(config("vllm_omni", "no/checkpoint"), "e0", find_family("qwen_image"), profile)
    assert isinstance(engine, EmulatedEngine) and engine.name == "e0"
    assert isinstance(engine._times, ReplayedTimes)
    family = msgspec.structs.replace(find_family("qwen_image"), vllm_pipeline=None)
    with pytest.raises(ValueError, match="use 'diffusers'"):
        build_engine(config("vllm_omni", checkpoint), "e0", family)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_engines_do_not_run_on_the_cpu_instead(checkpoint):
    placed = msgspec.structs.replace(config("diffusers", checkpoint), placement=Placement(rollout=Resources(gpus=1)))
    expected = r"placement\.rollout\.gpus: 1 asked for, but torch \S+ sees no accelerator here"
    with pytest.raises(RuntimeError, match=expected):
        build_engine(placed, "e0", find_family("qwen_image"))

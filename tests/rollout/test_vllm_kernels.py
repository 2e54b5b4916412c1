"""Tests attention kernels of vLLM-Omni engines, on a pretended accelerator, and arguments that are passed through."""

from __future__ import annotations

import sys
import types
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
import torch

if find_spec("vllm_omni") is None:  # its import takes seconds in each process that collects this file
    pytest.skip("vllm_omni is not installed", allow_module_level=True)

from omni_async.config.engine_args import SET_BY_THE_RUN
from omni_async.plugins.families import find_family
from omni_async.rollout import vllm_omni_engine
from omni_async.rollout.base import EngineError
from omni_async.rollout.factory import build_engine
from omni_async.rollout.vllm_omni_engine import VllmOmniEngine
from tests.rollout.test_factory import config


def engine(checkpoint: str, dtype: str = "float32", **rollout: Any) -> VllmOmniEngine:
    given = config("vllm_omni", checkpoint, **rollout)
    given = msgspec.structs.replace(given, model=msgspec.structs.replace(given.model, dtype=dtype))
    built = build_engine(given, "e0", find_family("qwen_image"))
    assert isinstance(built, VllmOmniEngine)
    return built


@pytest.mark.parametrize("scipy", [False, True])
def test_vllm_does_not_find_packages_that_transformers_did_not_look_for(checkpoint, tmp_path, monkeypatch, scipy):
    fake = "from importlib.util import find_spec\nfound = find_spec('unneeded')\nAsyncOmni = None\n"
    (tmp_path / "unneeded.py").touch()
    (tmp_path / "vllm_omni.py").write_text(fake)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_omni"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(vllm_omni_engine, "_UNUSED", ("unneeded",))
    monkeypatch.setattr("transformers.utils.import_utils.is_scipy_available", lambda: scipy)
    with pytest.raises(ModuleNotFoundError, match=r"vllm_omni\.diffusion"):
        engine(checkpoint)._build()
    assert (sys.modules.pop("vllm_omni").found is not None) == scipy and find_spec("unneeded") is not None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provides vLLM-Omni's CUDA platform as on an H100 with flash kernels."""
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from vllm.platforms.interface import DeviceCapability
    from vllm_omni.diffusion.envs import PACKAGES_CHECKER
    from vllm_omni.platforms.cuda.platform import CudaOmniPlatform

    capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    monkeypatch.setattr(CudaOmniPlatform, "get_device_capability", capability)
    monkeypatch.setattr(PACKAGES_CHECKER, "get_packages_info", lambda: {"has_flash_attn": True})
    return CudaOmniPlatform


@pytest.mark.parametrize(
    ("dtype", "asked", "kernels"),
    [
        ("float32", "auto", "SDPABackend"),
        ("bfloat16", "auto", "FlashAttentionBackend"),
        ("bfloat16", "TORCH_SDPA", "SDPABackend"),
    ],
)
def test_attention_of_float32_weights(hopper, checkpoint, dtype, asked, kernels):
    from omni_async.rollout.vllm_cpu import CpuOmniPlatform

    chosen = engine(checkpoint, dtype, attention_backend=asked)._chosen_attention()
    for head_size in (24, 64, 128):
        assert hopper.get_diffusion_attn_backend_cls(chosen, head_size).endswith(f".{kernels}")
    chosen = {engine(checkpoint, dtype)._chosen_attention() for dtype in ("float32", "bfloat16")}
    assert len({CpuOmniPlatform.get_diffusion_attn_backend_cls(one, 64) for one in chosen}) == 1


@pytest.mark.parametrize(
    ("asked", "accelerator", "eager"),
    [("auto", False, True), ("auto", True, False), ("on", False, False), ("off", True, True)],
)
def test_vllm_omni_gets_the_keys_of_the_recipe(monkeypatch, checkpoint, asked, accelerator, eager):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    monkeypatch.setattr("vllm_omni.AsyncOmni", lambda **arguments: arguments)
    given = engine(checkpoint, compile=asked, engine_args={"vae_use_tiling": True})._build()
    assert {*given} - {"vae_use_tiling"} == {*SET_BY_THE_RUN} - {"diffusion_attention_config"}
    assert given["enforce_eager"] is eager
    assert (given["diffusion_attention_backend"], given["vae_use_tiling"]) == ("TORCH_SDPA", True)


@pytest.mark.parametrize(
    ("rollout", "key"),
    [
        ({"engine_args": {"no_such": 1}}, r"rollout\.engine_args"),
        ({"attention_backend": "NO"}, r"rollout\.attention_b"),
    ],
)
@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_refused_arguments_are_named(monkeypatch, checkpoint, rollout, key, error):
    def refuse(**arguments: Any) -> None:
        raise error("Unknown diffusion\nconfig field(s)")

    monkeypatch.setattr("vllm_omni.AsyncOmni", refuse)
    with pytest.raises(EngineError, match=f"^e0: vLLM-Omni refuses to start, see {key}.*: Unknown diffusion config fi"):
        engine(checkpoint, **rollout)._build()


def test_rotations_on_a_cpu_are_those_of_vllm_omni_in_one_multiplication(monkeypatch):
    from vllm_omni.diffusion.layers.rope import RotaryEmbedding

    from omni_async.rollout.vllm_cpu_rope import specialise

    rope, neox = RotaryEmbedding(), RotaryEmbedding(is_neox_style=True)
    before, calls = neox._forward_method, []
    specialise([rope, neox])
    assert neox._forward_method == before, "it does not rotate adjacent pairs"
    x, angles = torch.randn(2, 5, 3, 8), torch.randn(5, 4)
    native = rope.forward_native
    monkeypatch.setattr(rope, "forward_native", lambda *args: calls.append(1) or native(*args))
    for one, tables in ((x, angles), (x[0], angles), (x, angles.expand(2, 5, 4))):
        expected = native(one, tables.cos(), tables.sin())
        torch.testing.assert_close(rope(one, tables.cos(), tables.sin()), expected, rtol=1e-6, atol=1e-6)
    assert not calls
    part, low = (x, angles[:, :3]), (x.bfloat16(), angles.bfloat16())
    for one, tables in (part, low):
        assert torch.equal(rope(one, tables.cos(), tables.sin()), native(one, tables.cos(), tables.sin()))
    assert len(calls) == 2, "a part of the features, and other dtypes, are vLLM-Omni's to rotate"

"""Tests that encoders are in host memory while an engine draws. The device is torch's `meta`, which has no memory."""

from typing import Any

import numpy as np
import pytest
import torch
from omni_async_pipelines.ltx_2.tiny import build as build_ltx_2
from omni_async_pipelines.qwen_image.policy import QwenImagePolicy
from tensordict import TensorDict
from torch import nn

from omni_async.diffusion.policy import HasEncoders, load_policy
from omni_async.plugins.families import find_family
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.rollout.offload import Offloaded
from omni_async.types import Prompt
from tests.rollout.conftest import assert_same, make_request


def places(model: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}


def test_models_move_and_host_memory_is_untouched():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.full((1,), 2.0))

    model = Tied()
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    offloaded = Offloaded([model], "meta")
    assert places(model) == {"cpu"}
    for _ in range(2):
        with torch.inference_mode():
            offloaded.bring()
            offloaded.bring()
        assert places(model) == {"meta"} and model.head.weight is model.embed.weight
        offloaded.release()
        after = model.state_dict(keep_vars=True)
        assert all(after[name] is tensor and tensor.data_ptr() == where for name, (tensor, where) in before.items())
        assert places(model) == {"cpu"}


def test_a_full_device_keeps_nothing(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    offloaded = Offloaded([model], "meta")
    to, room = torch.Tensor.to, 2

    def full(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal room
        if room == 0:
            raise torch.OutOfMemoryError
        room -= 1
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError):
        offloaded.bring()
    assert places(model) == {"cpu"}
    room = 4
    offloaded.bring()
    assert places(model) == {"meta"}


def test_host_memory_is_few_blocks():
    allocated = list[int]()

    def allocate(nbytes: int) -> np.ndarray:
        allocated.append(nbytes)
        return np.empty(nbytes, np.uint8)

    one, other = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)), nn.Linear(5, 7, bias=False, dtype=torch.bfloat16)
    one.register_parameter("tied", other.weight)
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    offloaded = Offloaded([one, other], "meta", allocate)
    for _ in range(2):
        offloaded.bring()
        assert places(one) == places(other) == {"meta"}
        offloaded.release()
    assert len(allocated) == 1 and one.tied is other.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())
    first, last = (tensor.data_ptr() for tensor in (one[0].weight, one[1].num_batches_tracked))
    assert abs(first - last) < allocated[0]  # in the block


async def test_encoders_are_on_the_device_for_new_prompts_alone(policy, monkeypatch):
    seen: list[tuple[str, set[str]]] = []
    known = policy.load_codec(torch.float32)

    class Watched(QwenImagePolicy):
        def load_codec(self, dtype: torch.dtype) -> Any:
            codec = super().load_codec(dtype)
            [self.encoder] = codec.encoders

            def encode(prompt: Prompt, spec: Any) -> TensorDict:
                seen.append((prompt.text, places(self.encoder)))
                return known.encode(prompt, spec)

            monkeypatch.setattr(codec, "encode", encode)
            return codec

        def velocity(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(("step", places(self.encoder)))
            return super().velocity(*args, **kwargs)

    made = []
    for offload in (False, True):
        seen.clear()
        engine = DiffusersEngine(
            "e", Watched(policy.path), dtype=torch.float32, max_batch=4, device="cpu", offload=offload
        )
        await engine.start()
        if offload:
            assert engine._conditioning._encoders is not None
            engine._conditioning._encoders._device = "meta"
        made.append([await engine.generate(make_request(i)) for i in (0, 0, 1)])
        await engine.close()
    first, second = (make_request(i).prompt.text for i in (0, 1))
    steps = [("step", {"cpu"})] * 6
    assert seen == [(first, {"meta"}), *steps, *steps, (second, {"meta"}), *steps]
    for one, other in zip(*made, strict=True):
        assert_same(one, other, 0)


def test_what_decodes_is_no_encoder(tmp_path):
    codec = load_policy(find_family("ltx_2"), str(build_ltx_2(tmp_path))).load_codec(torch.float32)
    assert isinstance(codec, HasEncoders)
    assert codec.encoders == [codec.text_encoder, codec.connectors]  # type: ignore[attr-defined]

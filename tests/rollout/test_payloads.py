"""Tests how the bytes of a published version get into an engine's parameters, and how often they are copied."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from omni_async.rollout import base_weights
from omni_async.rollout.payloads import Staged
from omni_async.rollout.upload import Upload
from tests.rollout.conftest import adapters, parameters
from tests.support.copied_bytes import CopiedBytes
from tests.support.fakes import load_model
from tests.support.packing import pack
from tests.weights.test_shards import copied, joined


def staged(tensors: dict[str, torch.Tensor], ranks: int) -> Staged:
    """Returns the version that so many ranks published, each with rows of every tensor."""
    snapshot = joined(copied(tensors, ranks, bucket_bytes=256))
    return Staged(snapshot.manifest(), snapshot.buckets, 0.0)


def weights() -> dict[str, torch.Tensor]:
    return {"t.a": torch.randn(12, 5), "t.b": torch.randn(7), "t.c": torch.tensor(3.0), "t.d": torch.empty(0, 4)}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_payloads_are_copied_once(ranks, dtype):
    new = weights()
    live = {name: torch.nn.Parameter(torch.zeros_like(tensor, dtype=dtype), False) for name, tensor in new.items()}
    version = staged(new, ranks)
    with CopiedBytes() as copies:
        for name, weight in version.weights(new, live, Upload("cpu")):
            live[name].copy_(weight)
    assert copies.count == sum(parameter.nbytes for parameter in live.values())
    assert all(torch.equal(live[name], new[name].to(dtype)) for name in new)
    other_shape = {"t.a": torch.zeros(24, 5)}
    with CopiedBytes() as copies:
        yielded = dict(version.weights(new, other_shape, Upload("cpu")))
    assert copies.count <= (ranks > 1) * sum(tensor.nbytes for tensor in new.values())
    assert all(torch.equal(yielded[name], new[name]) for name in new)
    assert not other_shape["t.a"].any()


def test_versions_that_do_not_fit_write_nothing():
    new = weights()
    live = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
    manifest, buckets = pack([("t.a", new["t.a"])], version=1, payload="full", bucket_bytes=256)
    with pytest.raises(ValueError, match=r"'t\.b' is absent, expected \(7,\)"):
        Staged(manifest, buckets, 0.0).weights(new, live, Upload("cpu"))
    assert not live["t.a"].any()


class Elsewhere(Upload):
    """An upload to a device that reads a buffer only when it is waited for."""

    def __init__(self, buffer_bytes: int) -> None:
        super().__init__("meta", buffer_bytes)
        self.allocated = 0
        self.started = 0
        self.pending = set[int]()

    def _allocate(self) -> torch.Tensor:
        self.allocated += 1
        return torch.zeros(self._buffer_bytes, dtype=torch.uint8)

    def _transfer(self, into: torch.Tensor, filled: torch.Tensor) -> Callable[[], Any]:
        self.started = number = self.started + 1
        self.pending.add(number)

        def wait() -> None:
            if number in self.pending:
                self.pending.remove(number)
                into.copy_(filled)

        return wait


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_reused_once_read(dtype):
    upload, source = Elsewhere(64), torch.randn(9, 11)
    for _ in range(2):
        target = torch.zeros(9, 11, dtype=dtype)
        upload.copy(target, source)
        assert len(upload.pending) == 2  # the rest was waited for, when its buffer was needed
        for wait in upload._waits:
            wait()
        assert torch.equal(target, source.to(dtype)) and not upload.pending
    assert upload.allocated == 2


def test_nothing_on_the_device_is_loaded_again():
    here = torch.randn(3)
    assert Upload("cpu").load(here).data_ptr() == here.data_ptr()
    there = torch.empty(3, device="meta")
    assert Elsewhere(64).load(there) is not here and Elsewhere(64).load(there).device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 3])
def test_on_an_accelerator_every_byte_arrives(ranks):
    device = torch.accelerator.current_accelerator(check_available=True)
    assert device is not None
    new = {"t.a": torch.randn(700, 1000), "t.b": torch.randn(7), "t.q": torch.randn(300, 1000)}
    live = {name: torch.zeros_like(new[name], device=device) for name in ("t.a", "t.b")}
    upload = Upload(device, 2**20)
    for _ in range(3):
        yielded = dict(staged(new, ranks).weights(new, live, upload))
        assert all(torch.equal(yielded[name].cpu(), new[name]) for name in new)
        assert all(torch.equal(live[name].cpu(), new[name]) for name in live)
        assert torch.equal(upload.load(new["t.a"]).cpu(), new["t.a"])


def test_base_files_are_opened_once(policy, monkeypatch):
    opened = list[str]()

    def counting(path: Any, framework: str) -> Any:
        opened.append(str(path))
        return safe_open(path, framework)

    monkeypatch.setattr(base_weights, "safe_open", counting)
    base = base_weights.BaseWeights(Path(policy.path), ["transformer"])
    published = adapters(policy, seed=1)
    manifest, buckets = pack(published.items(), version=1, payload="lora", bucket_bytes=2**20, lora={"scale": 2.0})
    places = list[dict[str, int]]()
    for _ in range(2):
        merged = dict(Staged(manifest, buckets, 0.0).weights(base, {}, Upload("cpu")))
        places.append({name: base[name].data_ptr() for name in merged})
    assert merged and places[0] == places[1] and len(opened) == 1
    assert set(base) == set(parameters(load_model(policy)))

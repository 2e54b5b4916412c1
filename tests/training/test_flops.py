"""Holds the operations that the trainer reports to counts by hand, and to torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from omni_async.training import flops
from omni_async.training.engine import TrainEngine
from omni_async.training.flops import FlopMeter, peak_tflops
from tests.training.training_world import LORA, group_of, make_config, started, step_on, update

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """An attention and a linear layer of known sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, WIDTH)
        return x + self.up(attended)[..., :WIDTH]


def by_hand(rows: int, tokens: int) -> int:
    """Counts a multiplication and an addition: of (rows x tokens, in) @ (in, out), of scores, and of values."""
    linear = 2 * rows * tokens * WIDTH * (3 * WIDTH + 2 * WIDTH)
    attention = 2 * (2 * rows * tokens * tokens * WIDTH)
    return linear + attention


def metered(depth: int = 2, backward: int = 2, **options: Any) -> tuple[nn.Module, FlopMeter]:
    stack = nn.Sequential(*(Block() for _ in range(depth)))
    return stack, FlopMeter({"transformer": stack}, backward, **options)


@pytest.mark.parametrize(("backward", "passes"), [(2, 3), (1, 2)])
def test_a_trained_pass_counts_its_backward_and_one_without_gradient_only_itself(backward: int, passes: int) -> None:
    stack, meter = metered(backward=backward)
    for _ in range(2):  # counted, and known
        with torch.no_grad():
            stack(torch.randn(3, 10, WIDTH))
        assert meter.take() == 2 * by_hand(3, 10)
        stack(torch.randn(3, 10, WIDTH))
        assert meter.take() == passes * 2 * by_hand(3, 10)
    assert meter.take() == 0


@torch.no_grad()
def test_a_shape_whose_first_pass_failed_is_counted_by_its_next() -> None:
    stack, meter = metered()
    failing = stack[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stack(torch.randn(3, 10, WIDTH))
    failing.remove()
    assert meter.take() == 0
    stack(torch.randn(3, 10, WIDTH))
    assert meter.take() == 2 * by_hand(3, 10)


def test_what_checkpointing_computes_again_does_not_count() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)

    module = Checkpointed()
    meter = FlopMeter({"transformer": module}, backward=2)
    for _ in range(2):
        module(torch.randn(3, 10, WIDTH)).sum().backward()
        assert meter.take() == 3 * by_hand(3, 10)


@pytest.mark.thorough
def test_layers_that_are_compiled_still_are_after_their_operations_were_counted() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    stack, meter = metered(compiled=True)
    for layer in stack:
        layer.compile(backend=backend)
    with torch.no_grad():
        for _ in range(3):
            stack(torch.randn(3, 10, WIDTH))
            assert meter.take() == 2 * by_hand(3, 10)
    assert compiled


def counted(config: Any) -> tuple[float, int]:
    """Returns the operations of an update, and what torch counts of its forward and backward passes."""
    engine = started(config)
    group = group_of(engine)
    with FlopCounterMode(display=False, custom_mapping={OF_CPU: flops.sdpa_flop}) as counter:
        step_on(engine, group)
    reported = engine.operations()["flops/sum"]
    return reported, counter.get_total_flops()


def operations_of(engine: TrainEngine) -> dict[str, float]:
    update(engine)
    return engine.operations()


OF_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def test_an_update_has_the_operations_of_its_passes() -> None:
    """torch counts the backward passes that really ran, without those of inputs that need no gradient."""
    reported, passes = counted(make_config())
    assert 0.8 * reported < passes <= reported
    frozen, _ = counted(make_config(lora=LORA))
    assert 0.6 * reported < frozen < 0.8 * reported, "two passes of three, and the adapters"


def test_operations_are_those_since_the_last_step() -> None:
    engine = started(make_config())
    first = operations_of(engine)["flops/sum"]
    assert operations_of(engine)["flops/sum"] == first
    engine.accumulate(group_of(engine), 1.0)
    engine.discard()
    assert engine.operations()["flops/sum"] == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA Something New", None),
    ],
)
def test_a_peak_is_that_of_a_known_device(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda", 0), torch.bfloat16) == peak
    assert peak_tflops(torch.device("cuda", 0), torch.float32) is None


def test_a_cpu_has_no_peak_unless_the_recipe_says_one() -> None:
    assert peak_tflops(torch.device("cpu"), torch.bfloat16) is None
    assert "peak_tflops" not in operations_of(started(make_config()))
    assert operations_of(started(make_config(**{"trainer.peak_tflops": 0.5})))["peak_tflops"] == 0.5

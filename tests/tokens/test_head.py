"""Tests that log-probs in chunks are those of the whole logits."""

import pytest
import torch
from torch import Tensor

from omni_async.tokens.head import log_probs_of


def whole(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ weight.T).double() / temperature
    return logits.log_softmax(1).gather(1, targets[:, None])[:, 0]


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 8, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(50, (23,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 7, 23, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_log_probs_and_gradients_of_whole_logits(chunk: int, temperature: float) -> None:
    hidden, weight, targets = drawn(torch.float32)
    got = log_probs_of(hidden, weight, targets, temperature, chunk)
    expected = whole(hidden, weight, targets, temperature)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-6)
    scale = torch.linspace(-1, 1, len(targets))
    ours = torch.autograd.grad((got * scale).sum(), [hidden, weight])
    theirs = torch.autograd.grad((expected * scale).sum(), [hidden, weight])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_only_the_product_has_the_dtype_of_its_factors() -> None:
    hidden, weight, targets = drawn(torch.bfloat16)
    got = log_probs_of(hidden, weight, targets, 1.0)
    logits = (hidden @ weight.T).double()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), logits.log_softmax(1).gather(1, targets[:, None])[:, 0], rtol=0, atol=2e-6)

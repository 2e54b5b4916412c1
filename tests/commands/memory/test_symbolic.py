"""Tests that model code runs without values, and reads values from tensors of few elements."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from omni_async.commands.memory.live import LiveBytes
from omni_async.commands.memory.symbolic import symbolic


def test_few_values_are_kept_and_many_are_not():
    with symbolic():
        mask = torch.tensor([True, True, False]).to("meta")
        assert not bool(mask.all())
        states = torch.zeros(3, 5000)
        assert states.is_meta
        assert states[mask].shape == (2, 5000)
        assert states[~mask].shape == (1, 5000)
        schedule = torch.linspace(1.0, 0.0, 11, device="meta")
        assert float(schedule[-1]) == 0.0


def test_a_value_without_one_is_1_and_a_copy_to_the_host_has_none():
    with symbolic():
        large = torch.zeros(5000)
        assert large.sum().item() == 1.0
        assert bool((large == 0).all())
        assert large.cpu().is_meta


def test_values_and_none_mix():
    weight = torch.empty(8, 4, device="meta", requires_grad=True)
    with symbolic():
        result = F.linear(torch.ones(2, 4), weight) * torch.ones(8)
        assert result.is_meta
        result.sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_meta


def test_attention_keeps_no_matrix_of_scores():
    query = torch.empty(2, 4, 1000, 16, device="meta", requires_grad=True)
    with LiveBytes("meta") as live, symbolic():
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert live.peak < 2 * 4 * 1000 * 1000
    assert query.grad is not None
    assert query.grad.shape == query.shape


def test_afterwards_torch_is_as_before():
    with symbolic():
        pass
    assert not torch.zeros(5000).is_meta
    assert F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3).tolist() == torch.ones(1, 1, 2, 4).tolist()


def test_a_mask_of_several_dimensions_is_refused():
    with symbolic(), pytest.raises(ValueError, match="its memory is not known: a mask of several dimensions"):
        torch.empty(2, 3, device="meta")[torch.ones(2, 3, dtype=torch.bool, device="meta")]

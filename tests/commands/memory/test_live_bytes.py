"""Tests that live bytes are those of storages: views, results in place and what is freed count as they should."""

from __future__ import annotations

import torch

from omni_async.commands.memory.live import LiveBytes


def test_a_storage_counts_once_and_until_it_is_freed():
    before = torch.zeros(100)
    with LiveBytes("cpu") as live:
        first = torch.ones(1000)  # 4000 bytes
        first.view(10, 100).add_(1)  # a view, and a result in place
        before.view(10, 10).mul_(2)  # from before
        del first
        torch.ones(500)  # 2000 bytes, at another time
    assert live.peak == 4000


def test_what_the_gradient_needs_is_live():
    weight = torch.ones(1000, requires_grad=True)
    with LiveBytes("cpu") as live:
        squared = weight * weight  # kept for exp's gradient
        grown = squared.exp()
        del squared
        total = grown.sum()
        del grown
        total.backward()
    assert live.peak >= 2 * 4000  # of exp its result alone is kept, and in backward there are two gradients


def test_other_devices_do_not_count():
    with LiveBytes("meta") as live:
        torch.ones(1000)
        torch.empty(10, device="meta")
    assert live.peak == 40

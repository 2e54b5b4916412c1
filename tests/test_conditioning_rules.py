"""Tests that conditioning is stacked by the rule of its key."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from omni_async.diffusion.components import stack_rows


def row(length: int) -> TensorDict:
    generator = torch.Generator().manual_seed(length)
    tensors = {
        "embeds": torch.randn(length, 3, generator=generator),
        "mask": torch.ones(length, dtype=torch.bool),
        "pooled": torch.randn(4, generator=generator),
        "tokens": torch.arange(length),
    }
    return TensorDict(tensors, batch_size=[])


RULES = {"embeds": "pad", "mask": "pad", "pooled": "same", "tokens": "jagged"}


def test_padding_and_stacking() -> None:
    rows = [row(2).exclude("tokens"), row(5).exclude("tokens")]
    stacked = stack_rows(rows, RULES)
    assert stacked.batch_size == (2,) and stacked["embeds"].shape == (2, 5, 3)
    assert torch.equal(stacked["embeds"][0, :2], rows[0]["embeds"]) and not stacked["embeds"][0, 2:].any()
    assert stacked["mask"].sum(1).tolist() == [2, 5] and stacked["mask"].dtype == torch.bool
    assert torch.equal(stacked["pooled"], torch.stack([one["pooled"] for one in rows]))
    assert rows[0]["embeds"].shape == (2, 3), "what is stacked stays as it was"


def test_jagged_rows_and_keys_without_a_rule() -> None:
    rows = [row(2), row(5), row(3)]
    chosen = stack_rows(rows, RULES).to("cpu")[[0, 2]]
    assert [tokens.tolist() for tokens in chosen.get("tokens", as_list=True)] == [[0, 1], [0, 1, 2]]
    assert chosen["embeds"].shape == (2, 5, 3) and torch.equal(chosen["pooled"][1], rows[2]["pooled"])
    with pytest.raises(ValueError, match=r"'tokens' has no rule to stack it by"):
        stack_rows([row(2)], {key: rule for key, rule in RULES.items() if key != "tokens"})

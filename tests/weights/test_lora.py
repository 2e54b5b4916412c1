"""Tests adapter names and merging."""

import pytest
import torch

from omni_async.weights.lora import diffusers_name, is_injected_adapter, merged_weights


@pytest.mark.parametrize(
    ("injected", "diffusers"),
    [
        ("transformer_blocks.0.attn.to_q.lora_A.default.weight", "transformer_blocks.0.attn.to_q.lora_A.weight"),
        (
            "transformer_blocks.0.attn.to_out.0.lora_B.default.weight",
            "transformer_blocks.0.attn.to_out.0.lora_B.weight",
        ),
        ("transformer_blocks.0.attn.to_q.base_layer.bias", "transformer_blocks.0.attn.to_q.bias"),
        ("proj_out.weight", "proj_out.weight"),
    ],
)
def test_injected_names_become_diffusers_names(injected, diffusers):
    assert diffusers_name(injected) == diffusers
    assert is_injected_adapter(injected) == ("lora_" in injected)


def test_merging_adds_the_scaled_product_in_float32_and_leaves_the_rest():
    base = {"q.weight": torch.randn(6, 4).bfloat16(), "q.bias": torch.randn(6), "k.weight": torch.randn(6, 4)}
    adapters = {"q.lora_A.weight": torch.randn(2, 4), "q.lora_B.weight": torch.randn(6, 2)}
    merged = dict(merged_weights(base, adapters, scale=0.5))
    expected = (base["q.weight"].float() + 0.5 * adapters["q.lora_B.weight"] @ adapters["q.lora_A.weight"]).bfloat16()
    assert list(merged) == list(base)
    assert torch.equal(merged["q.weight"], expected)
    assert torch.equal(merged["k.weight"], base["k.weight"])


def test_an_adapter_that_fits_nothing_is_an_error():
    half = {"q.lora_A.weight": torch.ones(1, 1)}
    whole = {**half, "q.lora_B.weight": torch.ones(1, 1)}
    with pytest.raises(ValueError, match=r"lacks 'q\.lora_B\.weight'"):
        list(merged_weights({"q.weight": torch.ones(1, 1)}, half, 1.0))
    with pytest.raises(ValueError, match=r"does not have: q\.weight"):
        list(merged_weights({"k.weight": torch.ones(1, 1)}, whole, 1.0))

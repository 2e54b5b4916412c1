"""Tests the names and places of experts in a checkpoint."""

from omni_async.weights.experts import checkpoint_parts

FUSED = (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))


def test_experts_are_separate_in_a_checkpoint():
    found = checkpoint_parts("thinker.layers.0.mlp.experts.gate_up_proj", (2, 6, 5), FUSED)
    assert found == [
        ("thinker.layers.0.mlp.experts.0.gate_proj.weight", (0, slice(0, 3))),
        ("thinker.layers.0.mlp.experts.0.up_proj.weight", (0, slice(3, 6))),
        ("thinker.layers.0.mlp.experts.1.gate_proj.weight", (1, slice(0, 3))),
        ("thinker.layers.0.mlp.experts.1.up_proj.weight", (1, slice(3, 6))),
    ]


def test_other_weights_keep_their_names():
    for name in ("visual.mlp.down_proj.weight", "layers.0.mlp.down_proj", "layers.0.mlp.experts.router"):
        assert checkpoint_parts(name, (4, 4), FUSED) == [(name, ...)]
    assert checkpoint_parts("experts.down_proj", (4, 4, 4), ()) == [("experts.down_proj", ...)]

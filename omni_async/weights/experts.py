"""Maps a model's tensors of all experts to the tensors of a checkpoint, which has one per expert.

transformers computes with tensors of all experts of a layer. Trainers hold and publish these; checkpoints, exports and
vLLM have a matrix for each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

Fused = Sequence[tuple[str, tuple[str, ...]]]  # `PipelineFamily.fused`
At = EllipsisType | tuple[int, slice]


def checkpoint_parts(name: str, shape: Sequence[int], fused: Fused) -> list[tuple[str, At]]:
    """Return the tensors of a checkpoint that one of the model's consists of, each by its name and its place in it.

    A tensor that is not fused is itself.

    Args:
        name: of the model's tensor, such as `thinker.model.layers.0.mlp.experts.gate_up_proj`.
        shape: (experts, rows, columns) of a fused tensor.
        fused: which tensors are."""
    module, _, last = name.rpartition(".")
    parts = dict(fused).get(last)
    if parts is None or not module.endswith(".experts"):
        return [(name, ...)]
    rows = shape[1] // len(parts)
    return [
        (f"{module}.{expert}.{part}.weight", (expert, slice(number * rows, (number + 1) * rows)))
        for expert in range(shape[0])
        for number, part in enumerate(parts)
    ]

"""Maps the names of LoRA payloads, and merges adapters into full weights.

Two naming schemes meet here, both after the component's name (`transformer.`):
  injected    as peft leaves them in the module tree: `blocks.0.attn.to_q.base_layer.weight`,
              `blocks.0.attn.to_q.lora_A.default.weight`
  diffusers   as in files and in our payloads: `blocks.0.attn.to_q.weight`, `blocks.0.attn.to_q.lora_A.weight`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import torch

ADAPTER = "default"

_INJECTED = re.compile(rf"^(?P<module>.+)\.(?P<matrix>lora_[AB])\.{ADAPTER}\.weight$")
_ADAPTER = re.compile(r"^(?P<module>.+)\.(?P<matrix>lora_[AB])\.weight$")


def is_injected_adapter(name: str) -> bool:
    """Return whether `name` is a parameter that peft added."""
    return _INJECTED.match(name) is not None


def diffusers_name(name: str) -> str:
    """Map `...to_q.base_layer.weight` -> `...to_q.weight`; `...lora_A.default.weight` -> `...lora_A.weight`.

    Other names are unchanged."""
    match = _INJECTED.match(name)
    return f"{match['module']}.{match['matrix']}.weight" if match else name.replace(".base_layer.", ".")


def merged_weights(
    base: Mapping[str, torch.Tensor],
    adapters: Mapping[str, torch.Tensor],
    scale: float,
    load: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    load_adapter: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda product, stored: product,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `base` in its order, with `scale * B @ A` added to weights with an adapter.

    The sum is computed in float32 and keeps base's dtype.

    The product is always computed whole, so that every rank's rows equal a single rank's bit by bit.

    Args:
        base: Stored weights, by diffusers names.
        adapters: Stored matrices A and B, by diffusers names.
        scale: Factor of the product.
        load: Returns the part of a stored weight to yield: all of it, or some rows of a weight that ranks share. Called
            in base's order; after a weight, `load_adapter` is called for its A and B.
        load_adapter: Returns the whole of a stored matrix.
        rows: Selects from a whole product the rows that `load` returned of the stored weight.

    Raises:
        ValueError: An adapter fits no base weight, or lacks its other half.
    """
    pairs = _pairs(adapters)
    unknown = sorted(set(pairs) - set(base))
    if unknown:
        raise ValueError(f"adapters for weights the model does not have: {', '.join(unknown[:3])}")
    for name, stored in base.items():
        weight = load(stored)
        if name in pairs:
            down, up = (load_adapter(adapters[key]).float() for key in pairs[name])
            weight = (weight + rows((up @ down).mul_(scale), stored)).to(weight.dtype)  # float32 if one of them is
        yield name, weight


def _pairs(adapters: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, str]]:
    """Map base weight names to the names of their A and B."""
    pairs = {}
    for name in adapters:
        match = _ADAPTER.match(name)
        if match is None:
            raise ValueError(f"not a LoRA adapter name: {name!r}")
        module = match["module"]
        names = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
        missing = [n for n in names if n not in adapters]
        if missing:
            raise ValueError(f"adapter {module!r} lacks {missing[0]!r}")
        pairs[f"{module}.weight"] = names
    return pairs

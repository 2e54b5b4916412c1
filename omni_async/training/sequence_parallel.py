"""Lets the ranks of a sequence group compute each row together, every one a part of its tokens.

Activations of long videos and large images then fit, and a row takes a part of the time.

Between attentions a rank has some tokens and all heads, in an attention all tokens and some heads (Ulysses). A denoiser
goes in whole and its velocity comes out whole, the same on every rank of the group; a rank's gradient is that of its
tokens. FSDP2 averages over all ranks, of a group and of others alike, so the engine's factor for that average makes the
sum that both want.

Each denoiser waits, in every attention, for the other ranks of the group, which call it with the same rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from omni_async.layout import ParallelLayout
from omni_async.policy import SequencePlan
from omni_async.training.errors import TrainingError
from omni_async.training.token_exchange import TokenGroup, install


def enable(
    components: Mapping[str, nn.Module], plan: SequencePlan | None, layout: ParallelLayout, device: torch.device
) -> None:
    """Make the denoisers compute rows together with the other ranks of this rank's sequence group.

    Collective over all ranks. Call it after adapters and gradient checkpointing, and before `fully_shard` over all
    ranks.

    Raises ValueError for a denoiser that has no plan of how to; one whose attention does not follow its plan is refused
    in its first forward, with a TrainingError."""
    mesh = init_device_mesh(
        device.type, (layout.data_size, 1, layout.sequence), mesh_dim_names=("data", "ring", "ulysses")
    )
    counts = init_device_mesh("cpu", (layout.data_size, layout.sequence), mesh_dim_names=("data", "sequence"))
    ranks = TokenGroup(mesh["ulysses"].get_group(), counts["sequence"].get_group())
    for denoiser in components.values():
        if plan is None or (plan.exchange is None and getattr(denoiser, "_cp_plan", None) is None):
            raise ValueError(
                f"trainer.sequence_parallel: {type(denoiser).__name__} has no plan of how ranks share its tokens, got"
                f" {layout.sequence}; use 1"
            )
        if plan.exchange is None:
            _follow_plan_of_diffusers(denoiser, mesh["ring", "ulysses"])
        else:
            install(denoiser, plan.exchange, ranks)
        denoiser.forward = _with_whole_text(_watched(denoiser), plan.masked_text, layout.sequence)


def _follow_plan_of_diffusers(denoiser: Any, mesh: DeviceMesh) -> None:
    from diffusers import ContextParallelConfig

    # It warns that it is experimental, and of every time that it has no need to split.
    for name in ("diffusers.models.modeling_utils", "diffusers.hooks.context_parallel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    denoiser.enable_parallelism(config=ContextParallelConfig(ulysses_degree=mesh["ulysses"].size(), mesh=mesh))


def _with_whole_text(forward: Callable[..., Any], masked_text: Mapping[str, str], multiple: int) -> Callable[..., Any]:
    """Pad texts to a multiple of the ranks and mask the padding. It stands at the end, where it moves no position."""

    @functools.wraps(forward)
    def padded(*args: Any, **kwargs: Any) -> Any:
        for name, mask_name in masked_text.items():
            kwargs[name], kwargs[mask_name] = _pad(kwargs[name], kwargs.get(mask_name), multiple)
        return forward(*args, **kwargs)

    return padded


def _pad(text: Tensor, mask: Tensor | None, multiple: int) -> tuple[Tensor, Tensor | None]:
    missing = -text.shape[1] % multiple
    if not missing:
        return text, mask
    mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device) if mask is None else mask
    return F.pad(text, (0, 0, 0, missing)), F.pad(mask, (0, missing))


def _watched(denoiser: nn.Module) -> Callable[..., Any]:
    """Return the denoiser's forward, which the first time is watched."""
    forward, name, seen = denoiser.forward, type(denoiser).__name__, False

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if seen:
            return forward(*args, **kwargs)
        text = kwargs.get("encoder_hidden_states")
        with _Watch(None if text is None else text.shape[1]) as watch:
            found = forward(*args, **kwargs)
        watch.require_exchanges(name)
        seen = True
        return found

    return watched


class _Watch(TorchFunctionMode):
    """Counts self-attentions with and without an exchange of tokens before them.

    A denoiser whose attention ignores its plan fails nowhere: each rank attends to its own tokens, and the loss is a
    little wrong. Attention to the `text` tokens alone, of which every rank has all, needs no exchange."""

    def __init__(self, text: int | None) -> None:
        super().__init__()
        self._text = text
        self._attentions = self._alone = 0
        self._exchanges = 0  # since the last attention
        self._needed = 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "all_to_all_single" in str(func):
            self._exchanges += 1
        elif func is F.scaled_dot_product_attention:
            query, key = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key")))
            self._count(itself=query.shape[-2] == key.shape[-2] != self._text)
        return func(*args, **kwargs)

    def _count(self, itself: bool) -> None:
        exchanged = self._exchanges >= self._needed
        self._attentions += itself
        self._alone += itself and not exchanged
        self._exchanges, self._needed = 0, 2 if exchanged else 1  # one exchange brings an attention's tokens back

    def require_exchanges(self, name: str) -> None:
        """TrainingError unless there were self-attentions, and tokens were exchanged for each."""
        if self._alone or not self._attentions:
            raise TrainingError(
                f"trainer.sequence_parallel: {self._alone} of {self._attentions} self-attentions of {name} see the"
                " tokens of one rank only, so it cannot share them; use 1"
            )

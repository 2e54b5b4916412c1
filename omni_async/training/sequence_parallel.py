"""Lets the ranks of a sequence group compute each row together, each a part of its tokens (Ulysses).

Activations of long videos and large images then fit, and a row takes a part of the time.

Between attentions a rank has some tokens and all heads; in an attention it has all tokens and some heads. A denoiser's
input and its velocity are whole, and the same on every rank of the group. A rank's gradient covers its own tokens.
FSDP2 averages over all ranks, inside and outside the group. The engine's factor for that average turns both into sums,
as needed. diffusers has context-parallel plans for some denoisers. Others have an `OwnExchange`, whose ranks may have
different numbers of tokens, so it needs no padding and no mask.

In every attention, each rank waits for the other ranks of the group. They compute the same rows, so the wait ends.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from omni_async.config.layout import ParallelLayout
from omni_async.diffusion.policy import OwnExchange, SequencePlan
from omni_async.training import TrainingError


def enable(
    components: Mapping[str, nn.Module], plan: SequencePlan | None, layout: ParallelLayout, device: torch.device
) -> None:
    """Make the denoisers compute rows together with the other ranks of this rank's sequence group.

    Collective over all ranks. Call it after adapters and gradient checkpointing, and before `fully_shard` over all
    ranks. A denoiser whose attention does not follow its plan raises a TrainingError in its first forward.

    Args:
        components: the denoisers by component; they are modified.
        plan: the policy's `sequence_plan`.
        layout: this rank's place among all ranks.
        device: this rank's device.

    Raises:
        ValueError: a denoiser has no plan."""
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

    # diffusers warns that this is experimental, and whenever it does not need to split.
    for name in ("diffusers.models.modeling_utils", "diffusers.hooks.context_parallel"):
        logging.getLogger(name).setLevel(logging.ERROR)
    denoiser.enable_parallelism(config=ContextParallelConfig(ulysses_degree=mesh["ulysses"].size(), mesh=mesh))


def _with_whole_text(forward: Callable[..., Any], masked_text: Mapping[str, str], multiple: int) -> Callable[..., Any]:
    """Pad texts at the end, where padding moves no position, to a multiple of the ranks, and mask the padding."""

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
    """Return the denoiser's forward, with a check of its first call."""
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

    A denoiser whose attention ignores its plan raises no error: each rank attends to its own tokens, and the loss is
    slightly wrong. Attention to the `text` tokens alone needs no exchange, since every rank has all text tokens."""

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
        """Raise TrainingError unless there were self-attentions, and tokens were exchanged for each."""
        if self._alone or not self._attentions:
            raise TrainingError(
                f"trainer.sequence_parallel: {self._alone} of {self._attentions} self-attentions of {name} see the"
                " tokens of one rank only, so it cannot share them; use 1"
            )


class TokenGroup:
    """The ranks that share the tokens of a row.

    `group` exchanges tensors on the device; `counts` exchanges numbers on the CPU, so that no accelerator waits.
    """

    def __init__(self, group: dist.ProcessGroup, counts: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self._counts = counts

    def part(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of tokens (B, L, C), at most one token more than another rank's."""
        return tokens.tensor_split(self.size, dim=1)[self.rank]

    def whole(self, part: Tensor) -> Tensor:
        """Return all tokens (B, L, C) of every rank's `part`.

        All ranks compute the same loss, so the gradient of a part is its own slice. The gradient of parameters is the
        sum over ranks."""
        whole: Tensor = _Whole.apply(part, self.lengths(part.shape[1]), self)  # type: ignore[no-untyped-call]
        return whole

    def lengths(self, own: int) -> list[int]:
        """Return each rank's number of tokens. A rank cannot compute it: of 4 or 5 tokens, the second of two has 2."""
        found = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([own]), group=self._counts)
        return [int(length) for length in found]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute self-attention of all tokens, and return this rank's part, (B, H, L, D) of its L tokens.

        Args:
            query, key, value: (B, H, L, D) of this rank's L tokens; the number of ranks divides H.
            options: further options of torch's `scaled_dot_product_attention`."""
        lengths = self.lengths(query.shape[2])
        query, key, value = self._to_heads(torch.cat([query, key, value]), lengths).chunk(3)
        return self._to_tokens(F.scaled_dot_product_attention(query, key, value, **options), lengths)

    def _to_heads(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Turn (B, H, own tokens, D) into (B, H / ranks, all tokens, D)."""
        sent = x.unflatten(1, (self.size, -1)).movedim(1, 0)
        _, batch, heads, own, width = sent.shape
        each = batch * heads * width
        arrived = self._exchange(sent, [each * length for length in lengths], [each * own] * self.size)
        return torch.cat([part.view(batch, heads, -1, width) for part in arrived], dim=2)

    def _to_tokens(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Invert `_to_heads`."""
        batch, heads, _, width = x.shape
        each = batch * heads * width
        sent = torch.cat([part.flatten() for part in x.split(lengths, dim=2)])
        own = lengths[self.rank]
        arrived = self._exchange(sent, [each * own] * self.size, [each * length for length in lengths])
        return torch.cat([part.view(batch, heads, own, width) for part in arrived], dim=1)

    def _exchange(self, sent: Tensor, arriving: list[int], leaving: list[int]) -> tuple[Tensor, ...]:
        """Return the flat tensors that the ranks sent to this rank; `arriving` has their numbers of elements."""
        return all_to_all_single_autograd(sent.flatten(), arriving, leaving, self.group).split(arriving)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, lengths: list[int], ranks: TokenGroup) -> Tensor:
        ctx.lengths, ctx.rank = lengths, ranks.rank
        padded = F.pad(part, (0, 0, 0, max(lengths) - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=ranks.group)
        return torch.cat([one[:, :length] for one, length in zip(parts, lengths, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].split(ctx.lengths, dim=1)[ctx.rank], None, None


class _Exchanging(TorchFunctionMode):
    """Sends the tokens of every attention to the ranks that share them."""

    def __init__(self, ranks: TokenGroup) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if attn_mask is not None or is_causal or not query.shape == key.shape == value.shape:
            raise TrainingError(
                "trainer.sequence_parallel: tokens are exchanged for plain self-attention, without mask"
            )
        return self._ranks.attend(query, key, value, dropout_p=dropout_p, **options)


def install(denoiser: nn.Module, plan: OwnExchange, ranks: TokenGroup) -> None:
    """Make the repeated layers of `denoiser` compute this rank's part of the tokens.

    Recomputation in backward repeats the exchange.

    Args:
        denoiser: the whole denoiser; it is modified.
        plan: the modules at which it is cut.
        ranks: the ranks that share a row's tokens."""
    layers = list(denoiser.get_submodule(plan.layers).children())
    for layer in layers:
        layer.forward = _exchanging(layer.forward, ranks)
    layers[0].forward = _split(layers[0].forward, plan.tokens, ranks)
    output = denoiser.get_submodule(plan.output)
    output.register_forward_hook(lambda _module, _inputs, part: ranks.whole(part))


def _exchanging(forward: Callable[..., Any], ranks: TokenGroup) -> Callable[..., Any]:
    @functools.wraps(forward)
    def exchanging(*args: Any, **kwargs: Any) -> Any:
        with _Exchanging(ranks):
            return forward(*args, **kwargs)

    return exchanging


def _split(forward: Callable[..., Any], names: tuple[str, ...], ranks: TokenGroup) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def split(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in names:
            bound.arguments[name] = ranks.part(bound.arguments[name])
        return forward(*bound.args, **bound.kwargs)

    return split

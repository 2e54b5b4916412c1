"""Computes attention over all tokens of rows whose tokens are spread over ranks (Ulysses).

For denoisers that diffusers has no plan of: each rank gets all tokens of a part of the heads, attends, and gives the
tokens back.

Ranks need not have equally many tokens, so nothing is padded and nothing has to be masked. Each waits for the ranks of
its group, in every attention; all of them compute the same rows, so they meet.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from omni_async.policy import OwnExchange
from omni_async.training.errors import TrainingError


class TokenGroup:
    """The ranks that share the tokens of a row.

    `group` carries tensors of the device, `counts` those of the CPU, so that an accelerator need not wait for a number.
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

        All ranks compute the same loss of them, so the gradient of a part is its own slice, and parameters get theirs
        as the sum over ranks."""
        whole: Tensor = _Whole.apply(part, self.lengths(part.shape[1]), self)  # type: ignore[no-untyped-call]
        return whole

    def lengths(self, own: int) -> list[int]:
        """Return how many tokens each rank brings. No rank can know: of 5 tokens and of 4 the last of two has 2."""
        found = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([own]), group=self._counts)
        return [int(length) for length in found]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Compute self-attention of all tokens; all (B, H, L, D) of this rank's L tokens."""
        lengths = self.lengths(query.shape[2])
        query, key, value = self._to_heads(torch.cat([query, key, value]), lengths).chunk(3)
        return self._to_tokens(F.scaled_dot_product_attention(query, key, value, **options), lengths)

    def _to_heads(self, x: Tensor, lengths: list[int]) -> Tensor:
        """Turn (B, H, own tokens, D) to (B, H / ranks, all tokens, D)."""
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
        """Return what each rank sent to this one, flat, of the numbers of elements in `arriving`."""
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

    What is computed again in backward exchanges again."""
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

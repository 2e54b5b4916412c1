"""Finds a rank's own rows of parameters that FSDP2 spreads over ranks: in the order of the ranks they are the whole
tensor. What no mesh spreads, every rank holds; then rank 0 has all of its rows, and the others none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def whole(tensor: Tensor) -> Tensor:
    """Gathers all of a possibly sharded tensor. Collective: the ranks that share a copy of the weights call it for the
    same tensors in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor, rank: int) -> Tensor:
    """Returns the rows of `tensor` that `rank`, which this process is, holds; shares their memory. ValueError if it is
    not rows that are spread."""
    held = tensor.detach()
    if isinstance(held, DTensor):
        local: Tensor = held.to_local()
        return local if _spread_over(held) is not None or rank == 0 else _no_rows(local)
    return held if rank == 0 else _no_rows(held)


def rows_like(made: Tensor, stored: Tensor, rank: int) -> Tensor:
    """Returns those rows of the whole tensor `made` that `own_rows` returns of `stored`."""
    dimension = _spread_over(stored) if isinstance(stored, DTensor) else None
    if dimension is None or not isinstance(stored, DTensor):
        return made if rank == 0 else _no_rows(made)
    mesh = stored.device_mesh
    chunks, mine = torch.chunk(made, mesh.size(dimension), 0), mesh.get_local_rank(dimension)  # as FSDP2 cuts
    return chunks[mine] if mine < len(chunks) else _no_rows(made)


def _spread_over(tensor: DTensor) -> int | None:
    """Returns the dimension of the mesh over which the rows are spread, or None if they are not."""
    spread = [(i, by) for i, by in enumerate(tensor.placements) if not isinstance(by, Replicate)]
    if len(spread) > 1 or any(type(by) is not Shard or by.dim != 0 for _, by in spread):
        raise ValueError(
            f"a weight of shape {tuple(tensor.shape)} is spread as {tensor.placements}: only rows, spread over one"
            " dimension of the mesh, can be published"
        )
    return spread[0][0] if spread else None


def _no_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:0] if tensor.dim() == 0 else tensor[:0]

"""Finds a rank's own rows of parameters that FSDP2 spreads over ranks.

In the order of the ranks, the rows are the whole tensor. Every rank has a whole copy of an unspread tensor; then rank 0
counts as the owner of all its rows, and the others own none."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def whole(tensor: Tensor) -> Tensor:
    """Gather all of a possibly sharded tensor.

    Collective: the ranks that share a copy of the weights call it for the same tensors in the same order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor, rank: int) -> Tensor:
    """Return the rows that `rank`, this process, owns, in their memory. ValueError if it is not spread by rows."""
    held = tensor.detach()
    if isinstance(held, DTensor):
        local: Tensor = held.to_local()
        return local if _is_spread(held) or rank == 0 else _no_rows(local)
    return held if rank == 0 else _no_rows(held)


def rows_like(made: Tensor, stored: Tensor, rank: int) -> Tensor:
    """Return the rows of a whole tensor that `own_rows` returns of a stored one.

    Args:
        made: the whole tensor, of the shape of all of `stored`.
        stored: a parameter, spread over ranks or not.
        rank: this process's."""
    if not isinstance(stored, DTensor) or not _is_spread(stored):
        return made if rank == 0 else _no_rows(made)
    own: Tensor = made[own_slices(stored)]
    return own


def own_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return the position of this rank's part in the whole tensor."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + n) for at, n in zip(offsets, shape, strict=True))


def _is_spread(tensor: DTensor) -> bool:
    """Return whether the rows are spread over ranks."""
    spread = [by for by in tensor.placements if not isinstance(by, Replicate)]
    if len(spread) > 1 or any(type(by) is not Shard or by.dim != 0 for by in spread):
        raise ValueError(
            f"a weight of shape {tuple(tensor.shape)} is spread as {tensor.placements}: only rows, spread over one"
            " dimension of the mesh, can be published"
        )
    return bool(spread)


def _no_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:0] if tensor.dim() == 0 else tensor[:0]

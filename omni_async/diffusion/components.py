"""Computes rows of samples: their stacked conditioning, and velocities by different components of a policy.

Conditioning is stacked by a rule for every key, which the family defines. A policy has trained components
(`transformer`, `transformer_2`, ...). Each row of a batch needs one component, by its sigma. Rows are computed
component by component, in the policy's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.diffusion.policy import Policy


def named_parameters(components: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter as `component.name`, its name in messages and files."""
    for component, module in components.items():
        for name, parameter in module.named_parameters():
            yield f"{component}.{name}", parameter


def compute_velocity(
    policy: Policy,
    components: Mapping[str, nn.Module],
    latents: Tensor,
    sigma: Tensor,
    conditioning: TensorDict,
    spec: Any,
    needs: Sequence[str],
    *,
    calls: Sequence[str] | None = None,
    unconditional_gradient: bool = True,
) -> Tensor:
    """Compute the policy's velocity, float32, of rows (B, ...); row i needs the component `needs[i]`.

    Args:
        policy, components, latents, sigma, conditioning, spec, unconditional_gradient: as in `Policy.velocity`.
        needs: the component of each row.
        calls: the components to call, in the policy's order, including components without a row: under FSDP2 all ranks
            must call the same components. Such a call adds nothing to the velocity and zeros to the gradient. Rows that
            need none of `calls` (padding) are computed by a called component, at a sigma of that component. Default:
            the needed components."""
    calls = [name for name in policy.components if name in set(needs)] if calls is None else calls

    def velocity(name: str, rows: Any, at: Tensor) -> Tensor:
        return policy.velocity(
            components, latents[rows], at, conditioning[rows], spec, unconditional_gradient=unconditional_gradient
        )

    if set(needs) == set(calls) and len(calls) == 1:
        return policy.velocity(
            components, latents, sigma, conditioning, spec, unconditional_gradient=unconditional_gradient
        )
    found = torch.zeros(latents.shape, dtype=torch.float32, device=latents.device)
    for name in calls:
        rows = [row for row, needed in enumerate(needs) if needed == name]
        if rows:
            found = found.index_put((torch.tensor(rows, device=found.device),), velocity(name, rows, sigma[rows]))
            continue
        its_own = torch.full_like(sigma, _sigma_of(policy, name))
        if any(needed not in calls for needed in needs):
            found = velocity(name, slice(None), its_own)
        else:
            found = found + 0.0 * velocity(name, [0], its_own[:1]).sum()
    return found


def _sigma_of(policy: Policy, component: str) -> float:
    """Return a sigma at which rows need the component."""
    for step in range(1001):
        if policy.component_of(1 - step / 1000) == component:
            return 1 - step / 1000
    raise ValueError(f"no sigma in [0, 1] needs the component {component!r}")


# ---- conditioning ----------------------------------------------------------------------------------------------------

Rule = Literal["same", "pad", "jagged"]


def stack_rows(rows: Sequence[TensorDict], rules: Mapping[str, Rule]) -> TensorDict:
    """Stack conditioning of batch size [] into a TensorDict of batch size [B]. The rules:

    same    tensors of one shape
    pad     tensors (L, ...) of different lengths L, padded at the end with zeros (False)
    jagged  tensors (L, ...) of different lengths, unchanged: `stacked.get(key, as_list=True)` lists them

    Raises ValueError for a key without a rule."""
    keys = {str(key) for row in rows for key in row.keys()}  # noqa: SIM118 - a TensorDict iterates over its rows
    if unknown := sorted(keys - rules.keys()):
        raise ValueError(f"conditioning {unknown[0]!r} has no rule to stack it by; there are rules for {sorted(rules)}")
    longest = {key: max(len(row[key]) for row in rows) for key in keys if rules[key] == "pad"}
    padded = [row.copy().update({key: _pad(row[key], length) for key, length in longest.items()}) for row in rows]
    if any(rules[key] == "jagged" for key in keys):
        return TensorDict.lazy_stack(padded)
    stacked: TensorDict = torch.stack(padded)  # type: ignore[arg-type, assignment]
    return stacked


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    if len(tensor) == length:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])

"""Tests that every family computes on its device alone, without a device: on a pretended NPU, in torch's fake mode.

Fake tensors have shapes, dtypes and devices but no values. An operator that gets tensors of two devices raises, as on
a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from omni_async.diffusion.components import compute_velocity
from tests.pipelines.families import FAMILIES, NAMES, Family
from tests.support.pretend_npu import pretend
from tests.support.ranks import on_ranks
from tests.training.drawn import conditioning_of

SIGMA = 0.9
# Its mask gives a tensor whose length depends on values.
DYNAMIC = "hunyuan_video_15"


class Faked(FakeTensorMode):
    """Fake mode that makes no real tensor on the pretended device, which has no operators."""

    avoid_device_init = True  # type: ignore[assignment]


@torch.no_grad()
def compute(family: Family, folder: Path) -> None:
    """Computes the velocity of two rows of every spec, and decodes them."""
    policy = family.policy(family.build(folder))
    components, codec = dict(policy.load_components(torch.bfloat16)), policy.load_codec(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    drawn = {spec: [conditioning_of(policy, spec, row, generator) for row in range(2)] for spec in family.specs}
    with Faked(allow_non_fake_inputs=True) as mode:

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return mode.from_tensor(tensor.detach()).to("npu")

        for module in (*components.values(), *codec.models):  # type: ignore[attr-defined]
            module._apply(there)
        for spec, rows in drawn.items():
            conditioning = policy.stack_conditioning([row.apply(there) for row in rows])
            latents = torch.empty(2, *policy.latent_shape(spec), device="npu")
            sigma, needs = torch.full((2,), SIGMA, device="npu"), [policy.component_of(SIGMA)] * 2
            velocity = compute_velocity(policy, components, latents, sigma, conditioning, spec, needs)
            assert (velocity.device, velocity.shape) == (latents.device, latents.shape)
            codec.decode(latents, spec)


def work(rank: int, ranks: int, init_method: str, families: list[str]) -> list[str]:
    pretend(1)
    FakeTensor.__bool__ = lambda self: True  # type: ignore[method-assign]  # masks without padding
    FakeTensor.item = lambda self: SIGMA  # type: ignore[method-assign, assignment]
    done = []
    for family in FAMILIES:
        if family.name in families:
            with tempfile.TemporaryDirectory() as folder:
                compute(family, Path(folder) / "model")
            done.append(family.label)
    return done


@pytest.mark.thorough
def test_velocities_and_decoders_of_all_families_stay_on_their_device() -> None:
    names = [name for name in NAMES if name != DYNAMIC]
    [done] = on_ranks(1, work, names)
    assert done == [family.label for family in FAMILIES if family.name in names]

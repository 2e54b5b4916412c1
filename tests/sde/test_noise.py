import pytest
import torch

from omni_async.rollout.stepping import InFlight, check_request, take_steps
from omni_async.sde.noise import initial_noise, step_noise
from omni_async.sde.schedules import linear
from omni_async.types import SdeWindow
from tests.rollout.conftest import make_request

SHAPE = (16, 64)


def test_noise_depends_on_seed_purpose_and_step_alone():
    torch.manual_seed(0)
    first = step_noise(7, 3, SHAPE)
    torch.randn(5)
    assert torch.equal(first, step_noise(7, 3, SHAPE))
    others = [initial_noise(7, SHAPE), step_noise(7, 4, SHAPE), step_noise(8, 3, SHAPE)]
    assert all(abs((first * other).mean()) < 0.15 for other in others)
    assert first.dtype == torch.float32
    assert abs(first.mean()) < 0.15
    assert abs(first.std() - 1) < 0.1


def test_shared_initial_noise_leaves_step_noise_apart():
    a, b = (InFlight(make_request(seed=seed, initial_seed=5), linear(6), SHAPE) for seed in (1, 2))
    assert torch.equal(a.latents, b.latents)
    take_steps([a, b], torch.zeros(2, *SHAPE), 0)
    assert not torch.equal(a.latents, b.latents)


def test_samples_at_different_steps_of_different_kinds_move_as_if_alone():
    def samples() -> list[InFlight]:
        made = [
            InFlight(make_request(i, sde_kind=kind, window=window, num_inference_steps=steps), linear(steps), SHAPE)
            for i, (kind, window, steps) in enumerate(
                [
                    ("flow", SdeWindow(start=0, size=2), 6),
                    ("cps", SdeWindow(start=1, size=3), 5),
                    ("dance", None, 4),
                    ("dance", SdeWindow(start=0, size=1), 6),
                ]
            )
        ]
        take_steps(made[:2], torch.zeros(2, *SHAPE), 0)
        return made

    velocity = torch.randn(4, *SHAPE)
    batch, alone = samples(), samples()
    for _ in range(3):
        moved = take_steps(batch, velocity, 1)
        for row, sample in enumerate(alone):
            own = take_steps([sample], velocity[row : row + 1], 1)
            assert torch.equal(own[0], moved[row])
            assert (sample.step, sample.versions) == (batch[row].step, batch[row].versions)
    for sample, other in zip(alone, batch, strict=True):
        for name, value in sample.tensors().items():
            assert torch.equal(value, other.tensors()[name])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"window": SdeWindow(start=3, size=3)}, "trained steps"),
        ({"sde_kind": "euler"}, "sde_kind"),
        ({"noise_level": 0.0}, "noise_level"),
        ({"sde_kind": "cps", "noise_level": 2.5}, "noise_level"),
        ({"num_inference_steps": 1}, "num_inference_steps"),
        ({"fields": ("velocities",)}, "velocities"),
    ],
)
def test_impossible_requests_are_refused_by_name(changes, names):
    with pytest.raises(ValueError, match=names):
        check_request(make_request(**changes))

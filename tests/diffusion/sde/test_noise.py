"""Tests noise: all bits of a seed count, and a sample's noise depends on nothing else."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from omni_async.algorithms.objectives.forward import draw_sigmas
from omni_async.config.algorithm import Forward
from omni_async.control.seeds import derive
from omni_async.diffusion.sde.noise import generator_of, initial_noise, standard_normal, step_noise
from omni_async.diffusion.sde.schedules import linear
from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.training.forward_loss import make_draws
from omni_async.training.transition_rows import trained_steps
from tests.rollout.conftest import make_request

SEED = 12345
SHAPE = (16, 64)


@pytest.mark.parametrize("other", [SEED + (7 << 32), SEED ^ (1 << 32), SEED ^ (1 << 62)])
def test_seeds_that_differ_in_high_bits_draw_other_numbers(other: int) -> None:
    drawn = {
        "initial": lambda seed: initial_noise(seed, SHAPE),
        "step": lambda seed: step_noise(seed, 3, SHAPE),
        "forward": lambda seed: make_draws(seed, SHAPE, linear(10), Forward(), 1.0).noises,
        "sigmas": lambda seed: make_draws(seed, SHAPE, linear(40), Forward(), 1.0).sigmas,
        "trained": lambda seed: torch.tensor(trained_steps(seed, 40, 0.5, calls=2)),
        "engine": lambda seed: InFlight(make_request(seed=seed), linear(6), SHAPE).latents,
    }
    for name, draw in drawn.items():
        assert not torch.equal(draw(SEED), draw(other)), name
        assert torch.equal(draw(SEED), draw(SEED)), name
    assert abs((initial_noise(SEED, SHAPE) * initial_noise(other, SHAPE)).mean()) < 4 / math.sqrt(1024)


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [SEED, *(SEED ^ (1 << bit) for bit in range(63))]
    assert len({initial_noise(seed, (4,)).numpy().tobytes() for seed in seeds}) == 64
    assert len({step_noise(seed, 1, (4,)).numpy().tobytes() for seed in seeds}) == 64


def require_normal(values: torch.Tensor) -> None:
    """Compares with the normal distribution by the test of Kolmogorov and Smirnov, at a level of 1e-3."""
    n = len(values)
    expected = torch.special.ndtr(values.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    assert max((steps[1:] - expected).max(), (expected - steps[:-1]).max()) < 1.95 / math.sqrt(n)


def test_noise_is_standard_normal() -> None:
    values = torch.cat([step_noise(derive("sample", 0, number), 1, (50_000,)) for number in range(20)]).double()
    n = len(values)
    assert abs(values.mean()) < 4 / math.sqrt(n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)
    require_normal(values)
    assert 4.4 < abs(values).max() < 6.5


def test_the_first_numbers_of_neighbouring_seeds_are_standard_normal() -> None:
    values = torch.stack([initial_noise(seed, (2,)) for seed in range(20_000)]).double()
    require_normal(values[:, 0])
    require_normal(values[:, 1])
    assert abs((values[:-1, 0] * values[1:, 0]).mean()) < 4 / math.sqrt(20_000)
    assert abs((values[:, 0] * values[:, 1]).mean()) < 4 / math.sqrt(20_000)


def test_noise_never_changes() -> None:
    """Compares with recorded bits. Others change every run at S = 0, and belong into the changelog."""

    def digest(*tensors: torch.Tensor) -> str:
        return hashlib.blake2b(b"".join(t.numpy().tobytes() for t in tensors), digest_size=8).hexdigest()

    draws = make_draws(SEED, (5, 7), linear(10), Forward(), 0.5)
    logit_normal = draw_sigmas(linear(10), Forward(sigmas="logit_normal"), 1.0, generator_of(SEED, "x"))
    found = [
        digest(initial_noise(SEED, (16, 33))),
        digest(initial_noise(2**63 - 1, (16, 33))),
        digest(step_noise(SEED, 3, (16, 33))),
        digest(draws.sigmas, draws.noises),
        [round(value, 6) for value in logit_normal.tolist()][:3],
        trained_steps(SEED, 10, 0.4, calls=2),
    ]
    assert found == [
        "66694d97c6052c12",
        "12dde3131fa32fab",
        "0ab2d86c41217687",
        "f6fe9bde7732aa0e",
        [0.875452, 0.567602, 0.95424],
        [0, 1, 2, 6, 10, 13, 18, 19],
    ]


def test_noise_depends_on_neither_threads_nor_batch() -> None:
    expected = [initial_noise(seed, (64, 1024)) for seed in range(4)]
    torch.set_num_threads(4)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda seed: initial_noise(seed, (64, 1024)), range(4)))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(found[seed], expected[seed]) for seed in range(4))

    def moved(seeds: tuple[int, ...]) -> torch.Tensor:
        samples = [InFlight(make_request(seed=seed), linear(6), SHAPE) for seed in seeds]
        for _ in range(3):
            take_steps(samples, torch.zeros(len(samples), *SHAPE), 0)
        return samples[seeds.index(5)].latents

    assert torch.equal(moved((5,)), moved((9, 5, 2**40 + 5)))


def test_a_longer_draw_begins_with_a_shorter_one_and_shapes_do_not_matter() -> None:
    long = initial_noise(SEED, (4, 100))
    assert torch.equal(long.flatten()[:100], initial_noise(SEED, (100,)))
    assert standard_normal(generator_of(SEED, "initial"), (0, 3)).shape == (0, 3)
    assert long.dtype == torch.float32 and long.is_contiguous()

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.diffusion.sde.schedules import linear, resolution_mu, scheduler_sigmas, static_shift
from omni_async.diffusion.sde.transitions import ode_step

QWEN_IMAGE = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
CONFIGS = {
    "qwen_image": QWEN_IMAGE,
    "no_terminal": {**QWEN_IMAGE, "shift_terminal": None},
    "defaults_missing": {"use_dynamic_shifting": True},
    "linear_time_shift": {**QWEN_IMAGE, "time_shift_type": "linear"},
    "static": {"shift": 3.0},
    "static_with_terminal": {"shift": 3.1, "shift_terminal": 0.1},
    "empty": {},
}


def diffusers_sigmas(steps, seq_len, config, linspace=np.linspace):
    """Does what QwenImagePipeline's __call__ does with the scheduler; ZImagePipeline's has torch's `linspace`."""
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    base_len, base_shift = config.get("base_image_seq_len", 256), config.get("base_shift", 0.5)
    m = (config.get("max_shift", 1.15) - base_shift) / (config.get("max_image_seq_len", 4096) - base_len)
    mu = seq_len * m + (base_shift - m * base_len)
    scheduler.set_timesteps(sigmas=linspace(1.0, 1 / steps, steps).tolist(), mu=mu)
    return scheduler.sigmas


@pytest.mark.parametrize("name", CONFIGS)
@given(steps=st.integers(2, 60), seq_len=st.integers(1, 10_000))
@settings(max_examples=20, deadline=None)
def test_scheduler_sigmas_are_diffusers_bits(name, steps, seq_len):
    config = CONFIGS[name]
    got = scheduler_sigmas(steps, seq_len, config)
    assert got.dtype == torch.float32
    assert torch.equal(got, diffusers_sigmas(steps, seq_len, config))
    torchs = scheduler_sigmas(steps, seq_len, config, torch_spacing=True)
    assert torch.equal(torchs, diffusers_sigmas(steps, seq_len, config, torch.linspace))
    assert got[0] == 1
    assert got[-1] == 0
    assert (got.diff() < 0).all()


def test_a_single_step_works_where_no_stretching_is_asked_for():
    assert torch.equal(scheduler_sigmas(1, 64, {"use_dynamic_shifting": True}), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="1 step"):
        scheduler_sigmas(1, 64, QWEN_IMAGE)


@pytest.mark.parametrize("shift", [1.0, 3.0, 3.17])
@pytest.mark.parametrize("steps", [1, 2, 10, 28])
def test_the_double_shift_is_diffusers_set_timesteps(shift, steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    assert torch.equal(static_shift(shift, steps), scheduler.sigmas)


def test_the_ode_step_is_diffusers_euler_step_to_the_bit():
    scheduler = FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.1, 10), mu=0.6)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 4, generator=generator)
    for step, timestep in enumerate(scheduler.timesteps):
        v = torch.randn(2, 6, 4, generator=generator)
        ours = ode_step(x, v, scheduler.sigmas[step].expand(2), scheduler.sigmas[step + 1].expand(2))
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
        assert torch.equal(ours, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(0), "num_inference_steps must be >= 1, got 0"),
        (lambda: static_shift(0.0, 4), "shift must be > 0, got 0.0"),
        (lambda: scheduler_sigmas(4, 16, {"shift_terminal": 1.5}), "got 1.5"),
        (lambda: scheduler_sigmas(4, 16, {**QWEN_IMAGE, "time_shift_type": "cubic"}), "got 'cubic'"),
        (lambda: resolution_mu(0, {}), "image_seq_len must be >= 1, got 0"),
        (lambda: scheduler_sigmas(4, 16, {"use_karras_sigmas": True}), "use_karras_sigmas=True"),
        (lambda: scheduler_sigmas(4, 16, {"max_shift": None}), "max_shift must be a number, got None"),
        (lambda: resolution_mu(16, {"base_image_seq_len": 4096}), "must differ"),
    ],
)
def test_wrong_input_is_refused_with_its_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()

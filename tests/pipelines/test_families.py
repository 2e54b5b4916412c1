"""Tests that every family computes what diffusers' pipeline of it does, and that its policy keeps the contract."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch.testing import assert_close

from omni_async.components import compute_velocity
from omni_async.families import find_family
from omni_async.media import Media, require_media
from omni_async.sde.noise import initial_noise
from omni_async.types import Prompt
from tests.fakes import load_model
from tests.pipelines import families
from tests.pipelines.families import FAMILIES, PROMPTS, STEPS, euler, parameters


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.label)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    case = request.param
    path = case.build(tmp_path_factory.mktemp(case.name))
    policy = case.policy(path)
    pipeline = DiffusionPipeline.from_pretrained(path, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    if shift := pipeline.scheduler.config.get("flow_shift"):  # Wan's multistep solver has no steps to add noise to
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    model, codec = load_model(policy), policy.load_codec(torch.float32)
    return SimpleNamespace(case=case, policy=policy, pipeline=pipeline, model=model, codec=codec)


def test_noise_free_samples_are_the_pipelines_and_so_are_schedule_and_pixels(family):
    policy, pipeline = family.policy, family.pipeline
    for spec in family.case.specs:
        noise = initial_noise(3, policy.latent_shape(spec))[None]
        call = {"prompt": PROMPTS[1], "num_inference_steps": STEPS, **families.call(spec)}
        expected = pipeline(**call, latents=noise.clone(), output_type="latent", return_dict=False)[0]
        assert torch.equal(policy.sigmas(STEPS, spec), pipeline.scheduler.sigmas)
        final = euler(policy, family.model, noise, family.codec.encode(Prompt(0, PROMPTS[1]), spec), spec)
        assert_close(final, expected, rtol=0, atol=1e-4)
        pixels = pipeline(**call, latents=noise.clone(), output_type="pt", return_dict=False)[0][0]
        (made,) = family.codec.decode(final, spec)
        (shape,) = spec.media()
        assert (getattr(made, shape.part).float() - (pixels * 255).round()).abs().max() <= 1


def test_rows_of_a_batch_do_not_know_of_each_other(family):
    policy = family.policy
    for spec in family.case.specs:
        rows = [family.codec.encode(Prompt(0, text), spec) for text in PROMPTS]
        x = torch.randn(3, *policy.latent_shape(spec), generator=torch.Generator().manual_seed(0))
        sigma = torch.tensor([1.0, 0.5, 0.02])
        with torch.no_grad():
            needs = [policy.component_of(value) for value in sigma.tolist()]
            components = dict(family.model.items())
            batch = compute_velocity(policy, components, x, sigma, policy.stack_conditioning(rows), spec, needs)
            assert batch.dtype == torch.float32
            for i, row in enumerate(rows):
                stacked = policy.stack_conditioning([row])
                alone = policy.velocity(family.model, x[i : i + 1], sigma[i : i + 1], stacked, spec)
                assert_close(batch[i : i + 1], alone, rtol=0, atol=1e-5)


def test_guidance_needs_its_conditioning_and_lets_gradients_through_both_branches_or_one(family):
    policy, (plain, guided) = family.policy, family.case.specs
    x, sigma = torch.randn(1, *policy.latent_shape(guided)), torch.tensor([0.5])
    unguided = policy.stack_conditioning([family.codec.encode(Prompt(0, "7"), plain)])
    with pytest.raises(ValueError, match="negative prompt"):
        policy.velocity(family.model, x, sigma, unguided, guided)
    conditioning = policy.stack_conditioning([family.codec.encode(Prompt(0, PROMPTS[1]), guided)])
    found = []
    for both in (True, False):
        family.model.zero_grad()
        v = policy.velocity(family.model, x, sigma, conditioning, guided, unconditional_gradient=both)
        v.square().mean().backward()
        found.append(torch.cat([p.grad.flatten() for p in family.model.parameters() if p.grad is not None]))
    family.model.zero_grad()
    assert all(gradient.abs().max() > 0 for gradient in found) and not torch.equal(*found)


def test_blank_conditioning_has_the_keys_and_types_of_a_prompts(family):
    for spec in family.case.specs:
        blank, real = family.policy.blank_conditioning(spec), family.codec.encode(Prompt(0, "7"), spec)
        assert {k: (v.dtype, v.ndim) for k, v in blank.items()} == {k: (v.dtype, v.ndim) for k, v in real.items()}
        family.policy.stack_conditioning([blank, blank])


def test_what_was_decoded_is_encoded_to_latents_of_its_own_shape(family):
    for spec in family.case.specs:
        media = family.codec.decode(initial_noise(1, family.policy.latent_shape(spec))[None], spec)
        require_media(media, spec)
        latents = family.codec.encode_media(media, spec)
        assert tuple(latents.shape[1:]) == family.policy.latent_shape(spec) and latents.isfinite().all()
        with pytest.raises(ValueError, match=r"expected (image|video)"):
            family.codec.encode_media([Media(image=torch.zeros(3, 16, 16, dtype=torch.uint8))], spec)


def test_a_model_in_half_precision_takes_and_returns_float32(family):
    spec = family.case.specs[0]
    model = load_model(family.policy, torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in parameters(model).values())
    conditioning = family.policy.stack_conditioning([family.codec.encode(Prompt(0, "7"), spec)])
    x = torch.randn(1, *family.policy.latent_shape(spec))
    with torch.no_grad():
        assert family.policy.velocity(model, x, torch.tensor([0.5]), conditioning, spec).dtype == torch.float32


def test_another_checkpoint_is_refused(family, tmp_path):
    with pytest.raises(ValueError, match="is missing"):
        family.case.policy(str(tmp_path))
    assert find_family(family.case.name).model_index_class == type(family.pipeline).__name__
    with pytest.raises(ValueError, match=family.case.name):
        find_family("no_such_family")

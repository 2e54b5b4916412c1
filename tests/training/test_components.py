"""Tests policies of several components: rows meet the component they need, and ranks call the same ones."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_async_pipelines.hunyuan_video_15 import tiny as hunyuan_video_15
from omni_async_pipelines.stable_diffusion_3 import tiny

from omni_async.config import load
from omni_async.diffusion.components import compute_velocity
from omni_async.training.groups import MicroBatch, Needs, micro_batches
from omni_async.training.transition_loss import sample_drifts
from tests.support.fakes import TinyPolicy, TwoExperts, load_model, tiny_group
from tests.support.patience import PATIENCE
from tests.support.places import ROOT
from tests.training.training_world import group_of, make_config, started, step_on, trainable

HIGH, LOW = TwoExperts.components


def batch(config: Any, rows: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    samples = [t["conditioning"] for t in tiny_group(TwoExperts(), config).trajectories[:rows]]
    spec = config.rollout.sampling
    latents = torch.randn(rows, *TwoExperts().latent_shape(spec), generator=generator)
    return latents, torch.tensor([0.9, 0.2, 0.8, 0.1][:rows]), TwoExperts().stack_conditioning(samples), spec


def test_every_row_is_computed_by_its_component():
    policy, model = TwoExperts(), load_model(TwoExperts())
    latents, sigma, conditioning, spec = batch(make_config(), 4)
    needs = [policy.component_of(s) for s in sigma.tolist()]
    found = compute_velocity(policy, dict(model.items()), latents, sigma, conditioning, spec, needs)
    for i, name in enumerate((HIGH, LOW, HIGH, LOW)):
        other = {HIGH: model[name], LOW: model[name]}
        alone = policy.velocity(other, latents[i : i + 1], sigma[i : i + 1], conditioning[i : i + 1], spec)
        torch.testing.assert_close(found[i : i + 1], alone, rtol=0, atol=1e-6)


def test_a_component_without_rows_is_called_and_gets_a_gradient_of_zeros():
    policy, model = TwoExperts(), load_model(TwoExperts())
    latents, _, conditioning, spec = batch(make_config(), 2)
    arguments = (policy, dict(model.items()), latents, torch.tensor([0.9, 0.8]), conditioning, spec, [HIGH, HIGH])
    found = compute_velocity(*arguments, calls=(HIGH, LOW))
    assert torch.equal(found, compute_velocity(*arguments))
    found.sum().backward()
    assert any(p.grad.abs().max() > 0 for p in model[HIGH].parameters() if p.grad is not None)
    assert all(p.grad is None or not p.grad.any() for p in model[LOW].parameters())
    assert any(p.grad is not None for p in model[LOW].parameters())
    padding = compute_velocity(*arguments, calls=(LOW,))
    assert padding.isfinite().all() and padding.any(), "a rank without a row of its own pads with any"


@pytest.mark.parametrize(("window", "trained"), [(range(1, 2), HIGH), (range(2, 3), LOW)])
def test_the_optimizer_leaves_a_component_without_rows_as_it_is(window, trained):
    """With AdamW: weight decay and moments move parameters whose gradient is zero, and none without one."""
    config = make_config(**{"trainer.optimizer.weight_decay": 0.1, "rollout.sde.window": {"size": 1, "range": [0, 3]}})
    engine = started(config, TwoExperts())
    before = trainable(engine)
    step_on(engine, group_of(engine, window=window))
    moved = {name.partition(".")[0] for name, p in engine._model.trainable.items() if not torch.equal(p, before[name])}
    assert moved == {trained}


def plans(needs: list[list[str]], size: int, unit: int, components: tuple[str, ...]) -> list[list[MicroBatch]]:
    """Returns the micro-batches of several ranks, which agree through one exchange."""
    barrier, said = threading.Barrier(len(needs), timeout=PATIENCE), {}

    def plan(rank: int) -> list[MicroBatch]:
        def largest(values: list[int]) -> list[int]:
            said[rank] = values
            barrier.wait()
            return [max(column) for column in zip(*said.values(), strict=True)]

        return list(micro_batches(needs[rank], size, unit, max(map(len, needs)), components, largest))

    with ThreadPoolExecutor(len(needs)) as pool:
        return list(pool.map(plan, range(len(needs))))


@settings(deadline=None)
@given(st.data())
def test_all_ranks_call_the_same_components_and_every_row_counts_once(data):
    components = data.draw(st.sampled_from([("a",), ("a", "b"), ("a", "b", "c")]))
    unit, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    rows = st.integers(1, 4).flatmap(
        lambda n: st.lists(st.sampled_from(components), min_size=n * unit, max_size=n * unit)
    )
    needs = data.draw(st.lists(rows, min_size=1, max_size=3))
    ranks = plans(needs, size, unit, components)
    assert len({tuple(one.calls for one in batches) for batches in ranks}) == 1
    for its, batches in zip(needs, ranks, strict=True):
        assert sorted(row for one in batches if one.counts for row in one.rows) == list(range(len(its)))
        for one in batches:
            assert len(one.rows) and len(one.rows) % unit == 0 and len(one.rows) <= max(size, unit)
            if one.counts:
                assert {its[row] for row in one.rows} <= set(one.calls)
            if unit == 1:
                assert len(one.calls) == 1


def test_a_policy_of_one_component_needs_no_exchange():
    found = list(micro_batches(["transformer"] * 5, 2, 1, 6, TinyPolicy.components, pytest.fail))
    assert [(list(one.rows), one.counts) for one in found] == [([0, 1], True), ([2, 3], True), ([4], True)]


SIGMA = torch.tensor([0.9383])


def times_embedded(recipe: str, path: Any, backend: str, embedder: str) -> list[torch.Tensor]:
    """Returns the times that reach the module `embedder` of a trainer's denoiser in bfloat16, at `SIGMA`."""
    settings = [f"model.path={path}", "model.dtype=bfloat16", f"trainer.backend={backend}"]
    config = load(ROOT / "recipes" / "tiny" / recipe, settings)
    engine, spec = started(config), config.rollout.sampling
    policy = engine.policy
    seen: list[torch.Tensor] = []
    module = engine._model.components[HIGH].get_submodule(embedder)
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
    conditioning = policy.stack_conditioning([policy.blank_conditioning(spec)])
    with torch.no_grad():
        latents = torch.randn(1, *policy.latent_shape(spec))
        engine._model.velocity(latents, SIGMA, conditioning, spec, Needs([HIGH], (HIGH,)))
    return seen


@pytest.mark.parametrize(
    ("recipe", "build", "backend", "embedder", "expected"),
    [
        ("sd35.yaml", tiny.build, "fsdp2", "time_text_embed.time_proj", SIGMA * 1000),  # in bfloat16 it were 940
        *(
            ("hunyuan_video_15.yaml", hunyuan_video_15.build, one, "time_embed.time_proj", (SIGMA * 1000).bfloat16())
            for one in ("plain", "fsdp2")
        ),
    ],
)
def test_the_time_reaches_a_denoiser_as_engines_give_it(recipe, build, backend, embedder, expected, tmp_path):
    seen = times_embedded(recipe, build(tmp_path), backend, embedder)
    assert seen and all(torch.equal(time, expected) and time.dtype == expected.dtype for time in seen)


def test_drifts_are_those_of_their_samples_whatever_the_order_of_rows():
    found = sample_drifts([(1, 0), (0, 0), (1, 1), (0, 1)], [0, 0, 1, 1], torch.tensor([1.0, 2.0, 3.0, 4.0]), None, 4)
    assert [[*drift.log_ratio] for drift in found] == [[2.0, 4.0], [1.0, 3.0]]

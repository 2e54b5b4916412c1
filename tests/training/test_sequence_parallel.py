"""Tests that ranks which share the tokens of a row train what one rank trains, on real architectures."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.tensor import DTensor, distribute_tensor

from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import SequencePlan
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from tests.support.fakes import share
from tests.training import training_world as world
from tests.training.drawn import random_group

LORA = {"lora": {"rank": 2, "alpha": 4.0}}
CHECKPOINTING = {"checkpointing": True}


@dataclass(frozen=True)
class Case:
    """A training on some family's tiny checkpoint by `workers` ranks, of which `sequence` share a row."""

    family: str
    sampling: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    variant: str = ""
    workers: int = 2
    sequence: int = 2


# 6 tokens of an image, and of text 109: one rank of two has a token more, of four as well. Ragged prompts of 3 to 9
# tokens, and negative ones of 1 or 3, are odd, so that they are padded.
QWEN = {"height": 48, "width": 32}
SD3 = {"height": 48, "width": 32, "max_sequence_length": 32}
WAN = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 7}
TI2V = {**WAN, "height": 64, "guidance_scale": 3.0}
CASES = {
    "qwen": Case("qwen_image", QWEN),
    "qwen guided": Case("qwen_image", {**QWEN, "true_cfg_scale": 3.0}, CHECKPOINTING),
    "qwen lora": Case("qwen_image", {**QWEN, "true_cfg_scale": 3.0}, {**LORA, "unconditional_gradient": False}),
    "edit": Case("qwen_image_edit", {**QWEN, "true_cfg_scale": 3.0}, CHECKPOINTING),
    "sd3": Case("stable_diffusion_3", {**SD3, "guidance_scale": 2.0}, CHECKPOINTING),
    "sd3 lora": Case("stable_diffusion_3", SD3, {**LORA, **CHECKPOINTING}),
    "wan": Case("wan2_2", {**WAN, "guidance_scale": 4.0, "guidance_scale_2": 2.0}, CHECKPOINTING),
    "wan lora": Case("wan2_2", WAN, LORA),
    "wan i2v": Case("wan2_2_i2v", {**WAN, "guidance_scale": 2.0}),
    "ti2v": Case("wan2_2", TI2V, CHECKPOINTING, variant="ti2v"),
    "qwen 2 x 2": Case("qwen_image", {**QWEN, "true_cfg_scale": 3.0}, {**LORA, **CHECKPOINTING}, workers=4),
    "sd3 2 x 2": Case("stable_diffusion_3", {**SD3, "guidance_scale": 2.0}, {**LORA, **CHECKPOINTING}, workers=4),
    "sd3 4": Case("stable_diffusion_3", {**SD3, "guidance_scale": 2.0}, CHECKPOINTING, workers=4, sequence=4),
    "wan 2 x 2": Case("wan2_2", {**WAN, "guidance_scale": 2.0}, {**LORA, **CHECKPOINTING}, workers=4),
}

REFUSED = "sd3 refused"


@torch.no_grad()
def fill_adapters(engine: TrainEngine) -> None:
    """Draws adapters, of which one half is zero and would leave the other half without gradient."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in engine._adapters.items():
        value = 0.1 * torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        assert parameter.requires_grad, name
        parameter.copy_(value)


def train(config: Config, group: GroupBatch | None, rank: int) -> dict[str, Any]:
    """Returns log-probs of this rank's samples, and the gradients of all. Without a group a group is made."""
    engine = world.started(config, rank=rank)
    fill_adapters(engine)
    made = group if group is not None else random_group(engine.policy, config)
    mine = share(made, engine.layout)
    recomputed = world.log_probs(engine, mine)
    if group is None:
        for sample, recorded in zip(made.trajectories, recomputed, strict=True):
            sample["log_probs"] = recorded
    engine.accumulate(mine, 1 / 8)
    return {"log_probs": recomputed, "gradients": world.gradients(engine), "group": made}


def refusals(config: Config, rank: int) -> list[str]:
    """Returns the errors of Stable Diffusion 3 without a plan, and with a plan that its attention does not know."""
    sampling = replace(config.rollout.sampling, max_sequence_length=33)
    config = replace(config, rollout=replace(config.rollout, sampling=sampling))  # diffusers cuts text into equal parts
    from diffusers import SD3Transformer2DModel
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    tokens = ContextParallelInput(split_dim=1, expected_dims=3)
    plan = {
        "transformer_blocks.0": {"hidden_states": tokens, "encoder_hidden_states": tokens},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }
    said = []
    for cp_plan in (None, plan):
        policy = world.policy_of(config)
        policy.sequence_plan = SequencePlan()
        SD3Transformer2DModel._cp_plan = cp_plan
        with pytest.raises((ValueError, TrainingError)) as refused:
            world.log_probs(world.started(config, policy, rank), random_group(policy, config))
        said.append(str(refused.value))
    SD3Transformer2DModel._cp_plan = None
    return said


def work(rank: int, jobs: dict[str, tuple[Config, GroupBatch | None]]) -> dict[str, Any]:
    found: dict[str, Any] = {REFUSED: refusals(jobs.pop(REFUSED)[0], rank)} if REFUSED in jobs else {}
    return found | {name: {**train(config, group, rank), "group": None} for name, (config, group) in jobs.items()}


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], str]:
    """Returns a function that builds a case's checkpoint, once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def build(family: str, variant: str) -> str:
        options = {} if family.startswith("qwen") else {"heads": 4}
        tiny = import_module(f"omni_async_pipelines.{family}.tiny")
        return str(tiny.build(folder / (family + variant), layers=2, **options, **{variant: True} if variant else {}))

    return lambda case: build(case.family, case.variant)


def config_of(case: Case, path: str, alone: bool) -> Config:
    ranks = {} if alone else {"workers": case.workers, "trainer.sequence_parallel": case.sequence}
    changes = {
        "model.pipeline": case.family,
        "model.path": path,
        "sampling": case.sampling,
        "size": 4,
        "clip_range": None,
        "algorithm.clip_range_nats": 100.0,
    }
    return world.make_config(**{**changes, **case.changes, **ranks})


def assert_ranks_train_what_one_trains(
    path_of: Callable[[Case], str], count: int, cases: dict[str, Case]
) -> list[dict[str, Any]]:
    """Returns what every rank found, by case."""
    alone = {name: train(config_of(case, path_of(case), alone=True), None, 0) for name, case in cases.items()}
    jobs: dict[str, tuple[Config, GroupBatch | None]] = {
        name: (config_of(case, path_of(case), alone=False), alone[name]["group"]) for name, case in cases.items()
    }
    sd3 = CASES["sd3"]
    refused = {REFUSED: (config_of(sd3, path_of(sd3), alone=False), None)} if count == 2 else {}
    ranks = world.on_ranks(count, work, refused | jobs)
    for name, (config, _) in jobs.items():
        wanted = alone[name]["gradients"]
        largest = max(gradient.abs().max().item() for gradient in wanted.values())
        assert {weight.partition(".")[0] for weight in wanted} == set(world.policy_of(config).components), name
        for rank, results in enumerate(ranks):
            layout = ParallelLayout.of(config.trainer, rank)
            its = alone[name]["log_probs"][layout.data_rank :: layout.data_size]
            torch.testing.assert_close(results[name]["log_probs"], its, rtol=0, atol=1e-5, msg=name)
            world.assert_close(results[name]["gradients"], wanted, atol=3e-6 * largest)
    return ranks


def cases_of(count: int) -> list[tuple[str, Case]]:
    return [(name, case) for name, case in CASES.items() if case.workers == count]


def test_two_ranks_that_share_tokens_train_what_one_trains(path_of, some_of):
    cases = dict(some_of("cases of two ranks that share tokens", cases_of(2), 2))
    key = "trainer.sequence_parallel: "
    for found in assert_ranks_train_what_one_trains(path_of, 2, cases):
        without, ignored = found[REFUSED]
        assert without == f"{key}SD3Transformer2DModel has no plan of how ranks share its tokens, got 2; use 1"
        said = f"{key}3 of 3 self-attentions of SD3Transformer2DModel see the tokens of one rank only"
        assert ignored.startswith(said)


@pytest.mark.thorough
def test_two_pairs_and_four_that_share_tokens_train_what_one_trains(path_of):
    assert_ranks_train_what_one_trains(path_of, 4, dict(cases_of(4)))

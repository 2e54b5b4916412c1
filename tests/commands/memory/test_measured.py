"""Tests estimates against runs with memory: a rank's micro-batch and an engine's decoding, of tiny checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omni_async_pipelines.qwen_image.tiny import build as build_tiny

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import find_objective
from omni_async.commands.memory import trainer as trainer_module
from omni_async.commands.memory.engine import MeasuredEngine
from omni_async.commands.memory.live import LiveBytes
from omni_async.commands.memory.modules import Layers
from omni_async.commands.memory.trainer import MeasuredTrainer
from omni_async.config import Config, with_spec
from omni_async.config.layout import ParallelLayout
from omni_async.diffusion.policy import Policy, load_policy
from omni_async.plugins.families import find_family
from omni_async.training.metrics import Metrics
from omni_async.training.model import PlainBackend
from tests.pipelines.families import first_of
from tests.support.configs import build

TOKENS = 40
CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("qwen_image"), layers=4))


def recipe(checkpoint: str, **changes: Any) -> Config:
    sampling = {"height": 128, "width": 128, "true_cfg_scale": 2.0}
    return with_spec(
        build(
            {
                "model": {"pipeline": "qwen_image", "path": checkpoint, "lora": changes.get("lora")},
                "rollout": {"sampling": sampling, "group_size": 4, "max_batch": 3},
                "trainer": {
                    "micro_batch_size": 3,
                    "gradient_checkpointing": changes.get("checkpointing", False),
                },
            }
        )
    )


def policy_of(config: Config) -> Policy:
    return load_policy(find_family("qwen_image"), config.model.path)


def peak_with_memory(config: Config, policy: Policy) -> int:
    """Returns the most bytes that lived in a micro-batch with values, as a lone rank on the CPU computes it."""
    objective, layout = find_objective(config.algorithm.name), ParallelLayout()
    model = PlainBackend(config, objective, policy, CPU, layout)
    for parameter in model.trainable.values():
        parameter.register_post_accumulate_grad_hook(trainer_module._forget)
    loss = find_kind(objective.kind).load_loss()(config, objective, policy, model, Metrics(layout), layout)
    group = trainer_module._group(config, policy, TOKENS)
    for _ in range(2):  # the first fills the model's caches
        with LiveBytes("cpu") as live:
            rows, counts = next(iter(loss.batches(group)))
            model.backward(loss.losses(group, rows, counts), 1.0)
    return live.peak


OTHERS = [pytest.param(lora, c, marks=pytest.mark.thorough) for lora, c in ((None, False), (None, True), (LORA, False))]


@pytest.mark.parametrize(("lora", "checkpointing"), [(LORA, True), *OTHERS])
def test_a_micro_batch_takes_what_is_estimated(checkpoint, lora, checkpointing):
    config = recipe(checkpoint, lora=lora, checkpointing=checkpointing)
    policy = policy_of(config)
    estimated, found = MeasuredTrainer(config, policy, TOKENS).peak, peak_with_memory(config, policy)
    assert estimated == pytest.approx(found, rel=0.1)


@pytest.mark.thorough
def test_a_micro_batch_of_video_takes_what_is_estimated(tmp_path):
    family = first_of("wan2_2")
    sampling = {"height": 128, "width": 128, "num_frames": 9, "guidance_scale": 2.0}
    tree = {
        "model": {"pipeline": "wan2_2", "path": family.build(tmp_path)},
        "rollout": {"sampling": sampling, "group_size": 4},
        "trainer": {"micro_batch_size": 3, "gradient_checkpointing": True},
    }
    config = with_spec(build(tree))
    policy = family.policy(config.model.path)
    estimated, found = MeasuredTrainer(config, policy, TOKENS).peak, peak_with_memory(config, policy)
    assert estimated == pytest.approx(found, rel=0.1)


def test_decoding_takes_what_is_estimated(checkpoint):
    config = recipe(checkpoint)
    policy = policy_of(config)
    [spec] = config.rollout.specs
    codec = policy.load_codec(torch.float32)
    with torch.no_grad(), LiveBytes("cpu") as live:
        codec.decode(torch.zeros(3, *policy.latent_shape(spec)), spec)
    assert MeasuredEngine(config, policy, TOKENS).decode == pytest.approx(live.peak, rel=0.1)


@pytest.mark.thorough
def test_a_few_layers_stand_for_all(checkpoint, monkeypatch):
    config = recipe(checkpoint, lora=LORA)
    policy = policy_of(config)
    few = MeasuredTrainer(config, policy, TOKENS).peak
    monkeypatch.setattr(Layers, "_KEPT", 4)
    assert MeasuredTrainer(config, policy, TOKENS).peak == few


def test_layers_are_put_back():
    component = torch.nn.Module()
    component.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(4)] + [torch.nn.Linear(2, 3)])
    before = [*component.blocks]
    lengths = []

    def measure() -> int:
        lengths.append(len(component.blocks))
        return 10 + 7 * len(component.blocks)

    assert Layers([component]).extrapolated(measure) == 10 + 7 * 5
    assert lengths == [3, 3, 4]  # two of the four, and the one of another shape
    assert [*component.blocks] == before

"""Tests that two ranks train transformers' thinkers as one rank does, where the ranks differ in images and sounds.

Towers are frozen and whole on every rank. A rank without an image does not call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.plugins.entry_points import load_named
from omni_async.plugins.families import find_family
from omni_async.tokens.policy import TokenPolicy, load_token_policy
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch, joined
from omni_async.types import Prompt
from tests.support.token_world import token_config, token_group, token_share
from tests.training import training_world as world

LORA = {"rank": 2, "alpha": 8.0, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
ADAPTERS = {"model.lora": LORA, "algorithm.kl_coef": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "all weights": {
        "algorithm.answers.mean": "token",
        "algorithm.kl_coef": 0.1,
        "trainer.gradient_checkpointing": True,
    },
    "gathered once": {"trainer.gather": "step", "algorithm.correction.mode": "decoupled"},
    "adapters": ADAPTERS,
    "adapters, recomputed": {**ADAPTERS, "trainer.gradient_checkpointing": True},
}


def config_of(path: str, family: str, setting: dict[str, Any], workers: int = 1, size: int = 3) -> Config:
    """Groups share micro-batches, whose rows have one or two answers."""
    changes = {
        **{"model.pipeline": family, "model.path": path, "rollout.group_size": size, "trainer.workers": workers},
        **{"trainer.optimizer.name": "sgd", "trainer.optimizer.lr": 0.1, "trainer.micro_batch_tokens": 48},
        **{"trainer.groups_per_micro_batch": 4},
    }
    return token_config(find_family(family).sampling(max_tokens=6), **changes, **setting)


def policy_of(config: Config) -> TokenPolicy:
    return load_token_policy(find_family(config.model.pipeline), config.model.path)


def groups_of(config: Config, prompts: list[Prompt]) -> list[GroupBatch]:
    """Draws a group of each prompt by weights that differ from the checkpoint's."""
    policy = policy_of(config)
    drawing = policy.load_components(torch.float32)
    world.move(drawing["thinker"].parameters(), 0.02)
    return [token_group(policy, config, n, 1, components=drawing, prompt=one) for n, one in enumerate(prompts)]


def train(engine: TrainEngine, groups: list[GroupBatch]) -> dict[str, Any]:
    size = groups[0].size
    shares = [token_share(group, engine.layout, size * number) for number, group in enumerate(groups)]
    media = [sorted(rows.packed.media) for rows, _ in engine._loss.batches(joined(shares))]
    drifts = []
    if engine.config.algorithm.correction.mode == "decoupled":
        drifts = [one.log_ratio.tolist() for share in shares for one in engine.recompute_proximal(share)]
    for share in shares:
        engine.accumulate(share, 1 / (size * len(groups)))
    gradients: dict[str, torch.Tensor] = {}
    with engine._model.optimizer.register_step_pre_hook(lambda *_: gradients.update(world.gradients(engine))):
        metrics = engine.step()
    exported = world.export(engine, 1)
    published = None if exported is None else [one.name for one in exported[0].tensors]
    return {
        **{"media": media, "metrics": metrics, "gradients": gradients, "weights": world.trainable(engine)},
        **{"digest0": engine.digest0, "published": published, "drifts": drifts},
    }


def work(rank: int, configs: list[Config], groups: list[GroupBatch]) -> list[dict[str, Any]]:
    return [train(world.started(config, policy_of(config), rank), groups) for config in configs]


def check(family: str, settings: list[dict[str, Any]], prompts: list[Prompt], path: str, size: int) -> Any:
    """Compares two ranks with one. Returns the media of each rank's rows."""
    groups = groups_of(config_of(path, family, {}, size=size), prompts)
    found = world.on_ranks(2, work, [config_of(path, family, setting, 2, size) for setting in settings], groups)
    for number, setting in enumerate(settings):
        config = config_of(path, family, setting, 1, size)
        expected = train(world.started(config, policy_of(config)), groups)
        ranks = [rank[number] for rank in found]
        for rank in ranks:
            world.assert_gradients(rank["gradients"], expected["gradients"])
            world.assert_close(rank["weights"], expected["weights"], atol=1e-6)
        assert not any(name.startswith(policy_of(config).frozen) for name in expected["gradients"])
        got, wanted = ranks[0]["metrics"], expected["metrics"]
        assert got.keys() == wanted.keys()
        for key in wanted.keys() - {"flops/sum"}:
            assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=2e-6), (setting, key)
        for key in ("digest0", "published"):
            assert ranks[0][key] == expected[key]
        if expected["drifts"]:
            shares = [rank["drifts"] for rank in ranks]
            both = ParallelLayout(0, 2).in_order(shares, size * len(groups))
            for ours, theirs in zip(both, expected["drifts"], strict=True):
                assert ours == pytest.approx(theirs, abs=2e-6)
    return [rank[0]["media"] for rank in found]


def world_of(family: str, folder: Path) -> tuple[list[Prompt], str]:
    """Returns prompts of an image, of text, of an image and sound, and of sound; and a checkpoint."""
    [case] = load_named(find_family(family).parity or "")
    return list(case.with_media(folder).prompts), str(case.build(folder / "tiny"))


@pytest.mark.thorough
def test_a_rank_without_media_trains_with_one_that_has_them(tmp_path: Path) -> None:
    """Group by group, an answer of text is on one rank, and an answer to an image and sound on the other."""
    prompts, path = world_of("qwen_omni", tmp_path)
    media = check("qwen_omni", [ADAPTERS], [prompts[1], prompts[2]], path, size=1)
    assert media == [[[]], [["audio_lengths", "image_grid_thw", "input_features", "pixel_values"]]]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen_omni", "qwen3_omni"])
def test_two_ranks_train_what_one_trains(family: str, tmp_path: Path) -> None:
    prompts, path = world_of(family, tmp_path)
    ours, theirs = check(family, [*SETTINGS.values()], prompts, path, size=3)
    assert len(ours) == len(theirs) > 2
    for tower in ("pixel_values", "input_features"):
        called = [(tower in one, tower in other) for one, other in zip(ours, theirs, strict=True)]
        assert any(one != other for one, other in called), f"the ranks call the tower of {tower} together"

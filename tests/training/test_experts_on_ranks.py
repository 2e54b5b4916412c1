"""Tests that the two experts of Wan2.2 get the same gradients from two ranks as from one, under FSDP2 over gloo,
whichever expert a rank has rows for."""

from pathlib import Path

import msgspec
import torch
from torch import Tensor

from omni_async.config import Config, load
from omni_async.layout import ParallelLayout
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.types import SdeWindow
from omni_async.weights.shards import whole
from pipelines.wan2_2 import tiny
from pipelines.wan2_2.policy import Wan22Policy
from tests.fakes import share
from tests.training.drawn import drawn
from tests.training.ranks import on_ranks

CPU = torch.device("cpu")
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny" / "wan22.yaml"
SETTINGS = {"both": [], "a draw of the steps": ["algorithm.timestep_fraction=0.4"]}


def gradients(config: Config, group: GroupBatch, rank: int, world: int) -> dict[str, Tensor]:
    layout = ParallelLayout(rank, world)
    engine = TrainEngine(config, Wan22Policy(config.model.path), layout, device=CPU)
    engine.setup()
    engine.accumulate(share(group, layout), 1 / 6)
    return {name: whole(p.grad) for name, p in engine._model.trainable.items() if p.grad is not None}


def work(rank: int, jobs: dict[str, tuple[Config, GroupBatch]]) -> dict[str, dict[str, Tensor]]:
    return {name: gradients(config, group, rank, 2) for name, (config, group) in jobs.items()}


def test_two_ranks_have_the_gradients_of_one_for_both_experts(tmp_path):
    path = tiny.build(tmp_path / "wan")
    common = [f"model.path={path}", "rollout.group_size=3", "trainer.micro_batch_size=2"]
    configs = {name: load(RECIPE, [*common, *settings]) for name, settings in SETTINGS.items()}
    policy, window = Wan22Policy(str(path)), SdeWindow(0, 4)
    group = drawn(policy, configs["both"], window)
    assert {policy.component_of(float(group.trajectories[0]["sigmas"][i])) for i in window.steps} == set(
        policy.components
    )
    jobs = {name: (config, group) for name, config in configs.items()}
    ranks = on_ranks(2, tmp_path, work, jobs)
    for name, (config, _) in jobs.items():
        trainer = msgspec.structs.replace(config.trainer, workers=1)
        expected = gradients(msgspec.structs.replace(config, trainer=trainer), group, 0, 1)
        assert {weight.partition(".")[0] for weight in expected} == {"transformer", "transformer_2"}
        for found in (results[name] for results in ranks):
            assert found.keys() == expected.keys()
            for weight, gradient in expected.items():
                assert gradient.isfinite().all()
                torch.testing.assert_close(found[weight], gradient, rtol=0, atol=3e-6, msg=f"{name}: {weight}")

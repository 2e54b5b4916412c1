"""Tests updates on answers of several lengths: a real rank, and groups that its own weights have drawn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni_async.algorithms.correction import Drift, correct, loss_factor, normaliser, padded
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.control.seeds import derive
from omni_async.roles.rank import Rank
from omni_async.store import LocalStore
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.types import ReadyGroup, ReadySample, Score, VersionSpans
from tests.roles.actor_world import make_update
from tests.support.token_world import ToySampling, ToyTokenPolicy, alone, token_config, token_group
from tests.training import training_world as world

POLICY = ToyTokenPolicy()
SPEC = ToySampling(max_tokens=6)
REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.25, 1.0, 1.0, 0.0]]
TEMPERED = {"algorithm.correction.mode": "decoupled", "algorithm.correction.weights": "tempered"}


def config_of(**changes: Any) -> Config:
    sgd = {"name": "sgd", "lr": 0.5, "weight_decay": 0, "max_grad_norm": None}
    return token_config(SPEC, **{"trainer.groups_per_update": 2, "trainer.optimizer": sgd, **changes})


def ready(config: Config) -> list[ReadyGroup]:
    """Makes two groups that other weights than the rank's have drawn, one version before."""
    drawing = POLICY.load_components(torch.float32)
    world.move(drawing["thinker"].parameters(), 0.1)
    groups = []
    for number, rewards in enumerate(REWARDS):
        drawn = token_group(POLICY, config, number, images=number, components=drawing)
        assert drawn.prompts is not None
        samples = tuple(
            ReadySample(f"g{number}.s{i}", one, Score(reward), VersionSpans.same(3, len(one["tokens"])))
            for i, (one, reward) in enumerate(zip(drawn.trajectories, rewards, strict=True))
        )
        groups.append(ReadyGroup(number, drawn.prompts[0], None, 3, samples))
    return groups


@dataclass
class Made:
    """An update's metrics, its weights after the step, and the groups that its engine was given."""

    metrics: dict[str, float]
    weights: dict[str, Tensor]
    groups: list[GroupBatch]


def update(config: Config, groups: list[ReadyGroup]) -> Made:
    engine = TrainEngine(config, POLICY, ParallelLayout(), torch.device("cpu"))
    given: list[GroupBatch] = []
    accumulate = engine.accumulate

    def watched(group: GroupBatch, row_weight: float) -> None:
        given.append(group)
        accumulate(group, row_weight)

    engine.accumulate = watched  # type: ignore[method-assign]

    async def main() -> dict[str, float]:
        rank = Rank(ParallelLayout(), lambda: engine, LocalStore())
        await rank.setup(None, None)
        made = make_update(config, [rank], version=4)
        for group in groups:
            await made.add(group)
        return await made.finish()

    return Made(asyncio.run(main()), world.trainable(engine), given)


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
@pytest.mark.parametrize("std", ["global", "group"])
def test_streaming_trains_answers_as_collecting_does(std: str, mean: str) -> None:
    changes = {"algorithm.advantage.std": std, "algorithm.answers": {"mean": mean, "overlong": "mask"}}
    streamed, collected = (config_of(**changes, **{"trainer.streaming": how}) for how in ("on", "off"))
    groups = ready(streamed)
    one, other = update(streamed, groups), update(collected, groups)
    loaded = dict(nn.ModuleDict(POLICY.load_components(torch.float32)).named_parameters())
    assert any(not torch.equal(one.weights[name], loaded[name]) for name in one.weights)
    world.assert_close(one.weights, other.weights, atol=1e-6)
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], abs=1e-6)
    for group, its in zip(groups, one.groups, strict=True):
        assert its.prompts == [group.prompt] * 4 and its.staleness[0][0] == 1
        assert list(its.seeds) == [derive("train", streamed.run.seed, one.sample_id) for one in group.samples]


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
def test_weights_of_an_update_are_of_its_tokens_alone(mean: str) -> None:
    """Answers have several lengths, and padding would lower the exponent that the effective sample size needs."""
    config = config_of(**TEMPERED, **{"algorithm.answers.mean": mean, "algorithm.correction.ess_target": 0.99})
    groups = ready(config)
    made = update(config, groups)
    thinker = POLICY.load_components(torch.float32)["thinker"]
    log_ratios, lengths = list[Tensor](), list[int]()
    for group in groups:
        prepared = POLICY.prepare(group.prompt, SPEC)
        for sample in group.samples:
            tokens = sample.trajectory["tokens"]
            value = alone(thinker, prepared, tokens).detach().double()
            log_ratios.append(value - sample.trajectory["log_probs"].double())
            lengths.append(len(tokens))
    assert len(set(lengths)) > 1
    of_tokens = torch.tensor(lengths)
    rows, valid = padded(torch.cat(log_ratios), of_tokens)
    corrected = correct(Drift(rows, valid=valid), config.correction, 1)
    divisors = {"sequence": of_tokens, "token": torch.ones(8), "constant": torch.full((8,), 6.0)}
    every, left = normaliser(corrected, config.correction, (1 / divisors[mean].double())[:, None].expand(rows.shape))
    factor = loss_factor(8.0, 8.0 + left - every) if mean == "constant" else loss_factor(every, left)
    expected = (corrected.weight * factor)[valid].tolist()
    got = [value for group in made.groups for row in group.weights or () for value in row]
    assert got == pytest.approx(expected, rel=1e-4)
    assert 0 < made.metrics["gamma"] < 1 and made.metrics["ess"] < 0.99
    assert made.metrics["gamma"] == pytest.approx(corrected.gamma[valid].mean().item(), rel=1e-3)

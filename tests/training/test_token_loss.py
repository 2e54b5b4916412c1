"""Tests the losses of answers against loops over answers and tokens in float64, and the refusal of wrong answers."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.config.schema import Config
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.token_loss import TokenLoss
from omni_async.types import SampleDrift
from tests.support.token_world import END, ToySampling, ToyTokenPolicy, alone, token_config, token_group
from tests.training import training_world as world

POLICY = ToyTokenPolicy()
SPEC = ToySampling(max_tokens=5, temperature=0.9)
IMPORTANCE = {"algorithm.correction.weights": "importance", "algorithm.correction.cap": 1.02}
Answer = tuple[Tensor, TensorDict, float, int]  # its log-probs with gradient, fields, advantage and staleness


def started(spec: ToySampling = SPEC, **changes: Any) -> TrainEngine:
    return world.started(token_config(spec, **{"trainer.micro_batch_tokens": 24, **changes}), POLICY)


def groups_of(config: Config) -> list[GroupBatch]:
    """Two groups, one with an image, whose tokens are one and three versions old."""
    return [token_group(POLICY, config, seed, staleness=1 + 2 * seed, images=seed) for seed in (0, 1)]


def answers_of(engine: TrainEngine, groups: list[GroupBatch], thinker: nn.Module) -> list[Answer]:
    found = []
    for group in groups:
        assert group.prompts is not None
        for number, trajectory in enumerate(group.trajectories):
            prepared = POLICY.prepare(group.prompts[number], group.spec)
            value = alone(thinker, prepared, trajectory["tokens"], group.spec.temperature)
            found.append((value, trajectory, group.advantages[number], group.staleness[number][0]))
    return found


def surrogate(config: Config, answer: Answer) -> Tensor:
    """Returns the weighted losses (T,) of PPO's clip at 0.2, token by token."""
    value, trajectory, advantage, age = answer
    mode, weighted = config.correction.mode, config.correction.weights == "importance"
    losses = []
    for t, recorded in enumerate(trajectory["log_probs"].double().tolist()):
        now = value[t].item()
        proximal = recorded + age / (age + 1) * (now - recorded) if mode == "interpolated" else now
        ratio = (value[t] - (recorded if mode == "bypass" else proximal)).exp()
        clipped = ratio.clamp(0.8, 1.2)
        weight = min(math.exp(proximal - recorded), config.correction.cap or math.inf) if weighted else 1.0
        losses.append(weight * torch.maximum(-advantage * ratio, -advantage * clipped))
    return torch.stack(losses)


def mean_of(config: Config, answers: list[Answer], losses: list[Tensor]) -> Tensor:
    """Returns the mean over tokens and answers, without answers that the recipe masks."""
    token, most = config.algorithm.answers, config.rollout.sampling.most_tokens
    kept = [i for i, one in enumerate(answers) if token.overlong == "train" or one[1]["tokens"][-1] == END]
    if token.mean == "token":
        return torch.cat([losses[i] for i in kept]).mean()
    divided = [losses[i].sum() / (len(losses[i]) if token.mean == "sequence" else most) for i in kept]
    return torch.stack(divided).mean()


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
@pytest.mark.parametrize("overlong", ["train", "mask"])
@pytest.mark.parametrize(
    "correction",
    [
        {"algorithm.correction.mode": "bypass"},
        {"algorithm.correction.mode": "none"},
        {"algorithm.correction.mode": "decoupled", **IMPORTANCE},
        {"algorithm.correction.mode": "interpolated", **IMPORTANCE},
    ],
    ids=["bypass", "none", "decoupled", "interpolated"],
)
def test_every_mode_and_mean_trains_what_a_loop_over_tokens_does(correction: Any, overlong: str, mean: str) -> None:
    engine = started(**correction, **{"algorithm.answers.mean": mean, "algorithm.answers.overlong": overlong})
    groups = groups_of(engine.config)
    world.nudge(engine)
    thinker = world.model_of(engine)["thinker"]
    answers = answers_of(engine, groups, thinker)
    overlong_share = sum(one[1]["tokens"][-1] != END for one in answers) / len(answers)
    assert 0 < overlong_share < 1
    expected = mean_of(engine.config, answers, [surrogate(engine.config, one) for one in answers])
    gradients = world.gradients_of(expected, nn.ModuleDict({"thinker": thinker}))
    metrics, got = world.trained(engine, *groups)
    world.assert_gradients(got, {name: grad for name, grad in gradients.items() if "tower" not in name})
    assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["overlong"] == overlong_share
    lengths = [len(one[0]) for one in answers]
    assert metrics["answer_tokens/mean"] == sum(lengths) / len(lengths) and metrics["answer_tokens/max"] == max(lengths)


@pytest.mark.parametrize("mean", ["sequence", "token", "constant"])
def test_masked_tokens_and_answers_leave_the_average(mean: str) -> None:
    """Of k1 alone: a token outside the band takes its part out of the divisor."""
    band = (0.97, 1.03)
    changes = {"algorithm.correction.mode": "decoupled", "algorithm.correction.k1": list(band)}
    engine = started(**changes, **{"algorithm.answers.mean": mean, "algorithm.answers.overlong": "mask"})
    groups = groups_of(engine.config)
    world.nudge(engine)
    thinker = world.model_of(engine)["thinker"]
    total, divisor, masked, tokens, most = torch.zeros(()).double(), 0.0, 0, 0, SPEC.max_tokens
    for value, trajectory, advantage, _ in answers_of(engine, groups, thinker):
        parts = {"sequence": 1 / len(value), "token": 1.0, "constant": 1 / most}
        for t, recorded in enumerate(trajectory["log_probs"].double().tolist()):
            outside = not band[0] <= math.exp(value[t].item() - recorded) <= band[1]
            masked, tokens = masked + outside, tokens + 1
            if trajectory["tokens"][-1] != END:
                continue
            divisor -= parts[mean] * outside
            total = total - parts[mean] * advantage * (value[t] - value[t].item()).exp() * (not outside)
        divisor += (len(value) if mean == "token" else 1.0) * (trajectory["tokens"][-1] == END).item()
    gradients = world.gradients_of(total / divisor, nn.ModuleDict({"thinker": thinker}))
    metrics, got = world.trained(engine, *groups)
    assert 0 < masked < tokens and metrics["masked/k1"] == pytest.approx(masked / tokens)
    world.assert_gradients(got, {name: grad for name, grad in gradients.items() if "tower" not in name})


@pytest.mark.parametrize("most", [1, 24, 1000])
def test_rows_of_any_length_give_the_same_gradients(most: int) -> None:
    engine = started(**{"trainer.micro_batch_tokens": most, "algorithm.answers.mean": "token"})
    groups = groups_of(engine.config)
    rows = sum(1 for group in groups for _ in engine._loss.batches(group))
    assert rows == {1: 8, 1000: 2}.get(most, rows)
    metrics, got = world.trained(engine, *groups)
    lone = started(**{"trainer.micro_batch_tokens": 1, "algorithm.answers.mean": "token"})
    expected_metrics, expected = world.trained(lone, *groups)
    world.assert_gradients(got, expected, rtol=1e-5, atol=1e-7)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


def test_groups_that_share_rows_train_as_alone() -> None:
    alone_, shared = (
        started(**{"trainer.groups_per_micro_batch": n, "trainer.micro_batch_tokens": 500}) for n in (1, 2)
    )
    groups = groups_of(alone_.config)
    metrics, expected = world.trained(alone_, *groups)
    shared_metrics, got = world.trained(shared, *groups)
    world.assert_gradients(got, expected, rtol=1e-5, atol=1e-7)
    assert shared_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_a_proximal_pass_returns_the_drift_of_every_token_and_is_the_ratios_denominator() -> None:
    changes = {"algorithm.correction.mode": "decoupled", "trainer.steps_per_update": 2, **IMPORTANCE}
    engine = started(**changes)
    (group, _) = groups_of(engine.config)
    world.nudge(engine)
    thinker = world.model_of(engine)["thinker"]
    before = [value.detach() for value, *_ in answers_of(engine, [group], thinker)]
    drifts = engine.recompute_proximal(group)
    for drift, value, trajectory in zip(drifts, before, group.trajectories, strict=True):
        expected = (value - trajectory["log_probs"].double()).tolist()
        assert isinstance(drift, SampleDrift) and drift.log_ratio == pytest.approx(expected, abs=2e-6)
        assert isinstance(drift.log_ratio, array), "8 bytes a token on the way, and no objects"
        assert drift.kappa is None and drift.num_elements == 1 and drift.steps == range(len(value))
    world.step_on(engine, group)
    world.nudge(engine, 0.05)
    after = [value.detach() for value, *_ in answers_of(engine, [group], world.model_of(engine)["thinker"])]
    deviation = [(new - old).expm1().abs().mean().item() for new, old in zip(after, before, strict=True)]
    metrics = world.step_on(engine, group)
    assert metrics["ratio_deviation"] == pytest.approx(sum(deviation) / len(deviation), rel=1e-4)
    assert "engine_mismatch" not in metrics  # in the second step the policy has moved on purpose


def test_weights_of_the_update_replace_those_of_a_group() -> None:
    engine = started(**{"algorithm.correction.mode": "none"})
    group, _ = groups_of(engine.config)
    weights = [[0.5 + t for t in range(len(one["tokens"]))] for one in group.trajectories]
    thinker = world.model_of(engine)["thinker"]
    answers = answers_of(engine, [group], thinker)
    losses = [
        (-a[2] * (a[0] - a[0].detach()).exp() * torch.tensor(w).double()).mean()
        for a, w in zip(answers, weights, strict=True)
    ]
    expected = world.gradients_of(losses, nn.ModuleDict({"thinker": thinker}))
    _, got = world.trained(engine, replace(group, weights=weights))
    world.assert_gradients(got, {name: grad for name, grad in expected.items() if "tower" not in name})


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0, "target_modules": ["qkv", "out"]}])
def test_the_reference_policy_is_the_loaded_one(lora: Any) -> None:
    engine = started(**{"algorithm.kl_coef": 0.5, "model.lora": lora})
    assert not any("tower" in name for name in engine._model.trainable)
    group, _ = groups_of(engine.config)
    metrics = world.step_on(engine, group)
    assert metrics["kl_ref"] == pytest.approx(0.0, abs=1e-9)
    world.nudge(engine, 0.1)
    loaded = POLICY.load_components(torch.float64)["thinker"]
    moved = [value.detach() for value in _values(engine, group)]
    kl = []
    for value, (ref, *_) in zip(moved, answers_of(engine, [group], loaded), strict=True):
        gap = ref.detach() - value
        kl.append((gap.expm1() - gap).mean().item())
    assert world.step_on(engine, group)["kl_ref"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)


def _values(engine: TrainEngine, group: GroupBatch) -> list[Tensor]:
    loss = engine._loss
    assert isinstance(loss, TokenLoss)
    found: dict[int, Tensor] = {}
    for rows, _ in loss.batches(group):
        values = loss._log_probs(group, rows).split(rows.lengths.tolist())
        found |= dict(zip(rows.samples, values, strict=True))
    return [found[sample] for sample in sorted(found)]


def test_only_answers_of_the_trainers_version_alone_show_the_mismatch() -> None:
    engine = started()
    group = token_group(POLICY, engine.config, 0, staleness=0)
    ages = [[0] * len(one["tokens"]) for one in group.trajectories]
    for one in group.trajectories[1:]:
        one["log_probs"] = one["log_probs"] + 0.3
    mixed = replace(group, staleness=[ages[0], *([1, *its[1:]] for its in ages[1:])])
    metrics = world.step_on(engine, mixed)
    assert metrics["engine_mismatch"] < 1e-6 and metrics["engine_mismatch_nats"] < 1e-6
    assert metrics["fresh_fraction"] == 0.25 and metrics["log_ratio_nats/absmax"] == pytest.approx(0.3, abs=1e-5)
    whole = world.step_on(started(), group)
    assert whole["engine_mismatch_nats"] == pytest.approx(0.3, abs=1e-5) and whole["fresh_fraction"] == 1


def test_answers_that_are_all_masked_change_no_weight() -> None:
    changes = {"algorithm.answers.overlong": "mask", "trainer.optimizer.weight_decay": 0}
    engine = started(ToySampling(max_tokens=1), **changes)
    group = token_group(POLICY, engine.config, 0)
    for one in group.trajectories:
        one["tokens"] = torch.tensor([3], dtype=torch.int32)
    before = world.weights(engine)
    assert world.step_on(engine, group)["overlong"] == 1
    assert torch.equal(world.weights(engine), before)


def test_frozen_weights_are_not_trained_saved_or_published(tmp_path: Path) -> None:
    engine = started()
    names = set(engine._model.trainable)
    thinker: Any = engine._model.components["thinker"]
    tower = thinker.tower.out.weight
    before = tower.clone()
    group = token_group(POLICY, engine.config, 1, images=1)
    _, gradients = world.trained(engine, group)
    assert gradients and not tower.requires_grad and torch.equal(tower, before)
    assert not any("tower" in name for name in names | set(engine._model.base()))
    exported = world.export(engine, 1)
    assert exported is not None and {one.name for one in exported[0].tensors} == names
    world.save(engine, tmp_path)
    assert world.read_trained(tmp_path).keys() == names
    changed = ToyTokenPolicy()
    loaded: dict[str, Any] = {**changed.load_components(torch.float32)}
    loaded["thinker"].tower.out.weight.data.zero_()
    changed.load_components = lambda dtype: loaded  # type: ignore[method-assign]
    assert world.started(engine.config, changed).digest0 == engine.digest0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": None}, r"the fields \['tokens'\] are missing"),
        ({"tokens": [1, END]}, r"log_probs must be torch.float32 of shape \(2,\), got torch.float32 of shape"),
        ({"tokens": [float(END)]}, r"tokens must be torch.int32 of shape \(1,\), got torch.float32"),
        ({"log_probs": [math.nan] * 5}, "log_probs has values that are not finite"),
        ({"log_probs": [-math.inf] * 5}, "log_probs has values that are not finite"),
        ({"tokens": [], "log_probs": []}, r"it has 0 tokens, expected 1 to 5"),
        ({"tokens": [1] * 6, "log_probs": [-1.0] * 6}, r"it has 6 tokens, expected 1 to 5"),
        ({"tokens": [1, -1, 1, 1, 1]}, "-1 is no token"),
        ({"tokens": [1, 2], "log_probs": [-1.0] * 2}, r"it ends after 2 of 5 tokens without a stop token \[10\]"),
        ({"tokens": [1, END, 1, 1, 1]}, "token 1 is the stop token 10, and 3 follow"),
        ({"prompt": [1, 1]}, r"the engine's prompt differs from the trainer's at token 1: 1 of 2 tokens, expected 0"),
        (
            {"prompt": [1, 0, 5]},
            r"the engine's prompt differs from the trainer's at token 2: 5 of 3 tokens, expected n",
        ),
    ],
)
def test_an_unusable_answer_is_refused_before_any_gradient(change: dict[str, Any], reason: str) -> None:
    engine = started()
    group = token_group(POLICY, engine.config, 0)
    wrong = group.trajectories[2].clone()
    wrong["tokens"] = torch.full((5,), 1, dtype=torch.int32)
    wrong["log_probs"] = torch.full((5,), -1.0)
    dtypes = {"log_probs": torch.float32}
    for name, values in change.items():
        if values is None:
            del wrong[name]
        else:
            dtype = torch.float32 if any(isinstance(one, float) for one in values) else torch.int32
            wrong[name] = torch.tensor(values, dtype=dtypes.get(name, dtype))
    trajectories = [*group.trajectories[:2], wrong, group.trajectories[3]]
    length = len(wrong.get("tokens", torch.empty(5)))
    staleness = [*group.staleness[:2], [0] * length, group.staleness[3]]
    bad = replace(group, trajectories=trajectories, staleness=staleness)
    with pytest.raises(ValueError, match=f"answer 2 of 4: {reason}"):
        engine.accumulate(bad, 0.25)
    assert not world.gradients(engine)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec": ToySampling(max_tokens=3)}, "which is not one of the recipe's"),
        ({"prompts": None}, "group 0 came without its prompt"),
        ({"staleness": [[0]] * 4}, r"answer \d of 4: \d tokens have versions of 1"),
        ({"advantages": [math.nan] * 4}, "answer 0 of 4: the advantage is nan"),
        ({"weights": [[1.0] * 9] * 4}, r"an answer of \d tokens has 9 weights"),
    ],
)
def test_an_unusable_group_is_refused(changes: dict[str, Any], reason: str) -> None:
    engine = started()
    group = token_group(POLICY, engine.config, 0)
    with pytest.raises(ValueError, match=reason):
        engine.accumulate(replace(group, **changes), 0.25)


def test_log_probs_of_another_shape_name_the_policy() -> None:
    policy = ToyTokenPolicy()
    policy.log_probs = lambda components, packed, temperature: torch.zeros(1)  # type: ignore[method-assign]
    engine = world.started(token_config(SPEC), policy)
    with pytest.raises(TrainingError, match=r"ToyTokenPolicy.log_probs returned shape \(1,\) for \d+ tokens"):
        engine.accumulate(token_group(POLICY, engine.config, 0), 0.25)


def test_recomputed_activations_change_no_gradient() -> None:
    plain, recomputed = started(), started(**{"trainer.gradient_checkpointing": True})
    group = token_group(POLICY, plain.config, 0, images=1)
    (_, expected), (_, got) = world.trained(plain, group), world.trained(recomputed, group)
    world.assert_close(got, expected)


def test_operations_are_counted_for_every_shape_of_rows() -> None:
    engine = started(**{"trainer.micro_batch_tokens": 1000})
    counts = []
    for seed in (0, 1, 0):
        world.step_on(engine, token_group(POLICY, engine.config, seed))
        counts.append(engine.operations()["flops/sum"])
    assert counts[0] == counts[2] != counts[1] and min(counts) > 0

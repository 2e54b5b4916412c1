"""Tests what a checkpoint states of itself, and which changes of a recipe are free, named or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_async.checkpoint.statement import AGAIN, FREE, NAMED, REFUSED, TRACKED, Change, changes_since, stated
from omni_async.config import Config
from omni_async.config.describe import annotation_at
from tests.runtime.runtime_world import write_world

LORA = {"rank": 4, "alpha": 64, "target_modules": ["to_q", "to_k"]}
_SCORER = {"name": "jpeg_size"}


def changes(
    folder: Path, before: dict[str, Any], now: dict[str, Any], tracked: bool = False, **contents: str
) -> list[Change]:
    first, second = write_world(folder, **before), write_world(folder, **now)
    return changes_since(stated(first, dict.fromkeys(contents, "1")), second, contents, tracked)


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("model.lora", {"model": {"lora": LORA}}, {}),
        ("model.lora.alpha", {"model": {"lora": LORA}}, {"model": {"lora": {**LORA, "alpha": 8}}}),
        ("model.lora.rank", {"model": {"lora": LORA}}, {"model": {"lora": {**LORA, "rank": 8}}}),
        (
            "model.lora.target_modules",
            {"model": {"lora": LORA}},
            {"model": {"lora": {**LORA, "target_modules": ["to_q"]}}},
        ),
        ("algorithm.name", {}, {"algorithm": {"name": "grpo_guard"}}),
        ("trainer.optimizer.name", {}, {"trainer": {"optimizer": {"name": "sgd"}}}),
        ("trainer.steps_per_update", {}, {"trainer": {"steps_per_update": 2}}),
        ("trainer.ema", {}, {"trainer": {"ema": {"decay": 0.9}}}),
        ("algorithm", {}, {"algorithm": {"kl_coef": 0.1}}),
    ],
)
def test_another_meaning_of_tensors_is_refused(
    tmp_path: Path, key: str, before: dict[str, Any], now: dict[str, Any]
) -> None:
    [refused] = [one for one in changes(tmp_path, before, now) if one.why_not is not None]
    assert refused.key == key and f"{key}: the checkpoint has " in str(refused) and "; keep " in str(refused)
    assert changes(tmp_path, now, now) == []
    if key == "model.lora.alpha":
        assert str(refused) == (
            "model.lora.alpha: the checkpoint has 64, the recipe 8; keep 64 (the policy would jump by the factor 0.125)"
        )


@pytest.mark.parametrize(
    ("line", "again", "now"),
    [
        ("trainer.optimizer.lr: 0.0003 -> 0.001", False, {"trainer": {"optimizer": {"lr": 0.001}}}),
        (
            "trainer.optimizer.betas: [0.9,0.999] -> [0.8,0.999]",
            False,
            {"trainer": {"optimizer": {"betas": [0.8, 0.999]}}},
        ),
        ("trainer.groups_per_update: 2 -> 3", False, {"trainer": {"groups_per_update": 3}}),
        ("staleness.max_updates: 2 -> 1", False, {"staleness": {"max_updates": 1}}),
        ("buffer.window: 1 -> 3", False, {"buffer": {"window": 3}}),
        ("algorithm.clip_range_nats: null -> 2", False, {"algorithm": {"clip_range_nats": 2.0}}),
        ('model.dtype: "float32" -> "bfloat16"', False, {"model": {"dtype": "bfloat16"}}),
        ("data.shuffle: true -> false", False, {"data": {"shuffle": False}}),
        ("run.seed: 0 -> 5", True, {"run": {"seed": 5}}),
        ("rollout.sampling.height: 32 -> 64", True, {"rollout": {"sampling": {"height": 64, "width": 32}}}),
        ("rollout.sde.noise_level: 0.7 -> 0.5", True, {"rollout": {"sde": {"noise_level": 0.5}}}),
        ('reward.combine: "sum" -> "product"', True, {"reward": {"combine": "product", "scorers": [_SCORER]}}),
        ("reward.scorers.0.weight: 1 -> 2", True, {"reward": {"scorers": [{**_SCORER, "weight": 2}]}}),
    ],
)
def test_what_changes_numbers_is_named(tmp_path: Path, line: str, again: bool, now: dict[str, Any]) -> None:
    [one] = changes(tmp_path, {}, now)
    assert (str(one), one.why_not, one.again) == (line, None, again)


def test_free_and_longer_settings(tmp_path: Path) -> None:
    now = {
        "run": {"name": "other", "dir": "elsewhere"},
        "rollout": {"max_batch": 3, "workers": 2},
        "reward": {"workers": 2, "batch": 3, "scorers": [{**_SCORER, "batch": 2}]},
        "trainer": {"updates": 9, "micro_batch_size": 8, "gradient_checkpointing": True},
        "tracking": {"images_every": 7},
        "checkpoint": {"every": 3},
    }
    assert changes(tmp_path, {}, now) == []
    decays = {"schedule": "cosine"}
    before, after = ({"trainer": {"ema": {"decay": decay}}} for decay in (0.9, 0.5))
    assert [*map(str, changes(tmp_path, before, after))] == ["trainer.ema.decay: 0.9 -> 0.5"]
    [longer] = changes(tmp_path, {"trainer": {"optimizer": decays}}, {"trainer": {"optimizer": decays, "updates": 9}})
    assert str(longer) == "trainer.updates: 4 -> 9", "the learning rate decays over them"


def test_files_are_compared_by_content(tmp_path: Path) -> None:
    def refused(key: str, content: str, tracked: bool = False, **now: Any) -> Change:
        (tmp_path / "validation.txt").write_text("a cat\n")
        [one] = changes(tmp_path, now, now, tracked, **{key: content})
        return one

    prompts = refused("data.prompts", "2")
    assert str(prompts) == "data.prompts: the content that the checkpoint states -> other content"
    assert prompts.why_not is None
    model = refused("model.path/transformer", "2")
    assert str(model).startswith("model.path/transformer: its content is not what the checkpoint states (")
    assert str(model).endswith("was trained from another model; name that one as model.path)")
    tracking = {"algorithm": {"advantage": {"track_prompts": True}}}
    statistics = refused("data.prompts", "2", tracked=True, **tracking)
    assert statistics.why_not is not None and "algorithm.advantage.track_prompts=false" in str(statistics)
    assert refused("data.prompts", "2", tracked=False, **tracking).why_not is None, "there are none yet"


def test_every_rule_is_of_a_key_that_exists() -> None:
    for pattern in {*FREE, *AGAIN, *REFUSED, *NAMED, *TRACKED}:
        path = [part.replace("*", "0") for part in pattern.removesuffix(".*").split(".")]
        assert annotation_at(Config, path) is not None, pattern


def test_emulated_devices_have_no_tensors_that_could_mean_something_else(tmp_path: Path) -> None:
    emulation = {"emulation": {"profile": "qwen_image_lora_h800"}}
    before, now = {**emulation, "model": {"lora": LORA}}, {**emulation, "model": {"lora": {**LORA, "alpha": 8}}}
    [one] = changes(tmp_path, before, now)
    assert (one.key, one.why_not) == ("model.lora.alpha", None)


def test_a_statement_holds_no_secret_and_is_plain(tmp_path: Path) -> None:
    config = write_world(tmp_path, tracking={"wandb": {"api_key": "0123456789abcdef"}, "mlflow": {"enabled": False}})
    written = msgspec.json.encode(stated(config, {"data.prompts": "1"}))
    assert b"0123456789abcdef" not in written
    assert msgspec.json.decode(written, type=type(stated(config, {}))) == stated(config, {"data.prompts": "1"})

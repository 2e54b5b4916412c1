"""Tests which changes of a recipe since a checkpoint are free, named or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from omni_async.checkpoint.statement import AGAIN, FREE, NAMED, REFUSED, TRACKED, Change, changes_since, stated
from omni_async.config import Config
from omni_async.config.describe import annotation_at
from tests.runtime.runtime_world import write_world

LORA = "model.lora={rank: 4, alpha: 64, target_modules: [to_q, to_k]}"


def changes(
    folder: Path, before: Sequence[str], now: Sequence[str], tracked: bool = False, **contents: str
) -> list[Change]:
    first, second = (write_world(folder, overrides=tuple(overrides)) for overrides in (before, now))
    return changes_since(stated(first, dict.fromkeys(contents, "1")), second, contents, tracked)


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("model.lora", [LORA], []),
        ("model.lora.alpha", [LORA], [LORA, "model.lora.alpha=8"]),
        ("model.lora.rank", [LORA], [LORA, "model.lora.rank=8"]),
        ("model.lora.target_modules", [LORA], [LORA, "model.lora.target_modules=[to_q]"]),
        ("algorithm.name", [], ["algorithm.name=grpo_guard"]),
        ("trainer.optimizer.name", [], ["trainer.optimizer.name=sgd"]),
        ("trainer.steps_per_update", [], ["trainer.steps_per_update=2"]),
        ("trainer.ema", [], ["trainer.ema={decay: 0.9}"]),
        ("algorithm", [], ["algorithm.kl_coef=0.1"]),
    ],
)
def test_another_meaning_of_tensors_is_refused(tmp_path, key, before, now):
    [refused] = [one for one in changes(tmp_path, before, now) if one.why_not is not None]
    assert refused.key == key and f"{key}: the checkpoint has " in str(refused) and "; keep " in str(refused)
    assert changes(tmp_path, now, now) == []
    if key == "model.lora.alpha":
        assert str(refused) == (
            "model.lora.alpha: the checkpoint has 64, the recipe 8; keep 64 (the policy would jump by the factor 0.125)"
        )


@pytest.mark.parametrize(
    ("line", "again"),
    [
        ("trainer.optimizer.lr: 0.0003 -> 0.001", False),
        ("trainer.optimizer.betas: [0.9,0.999] -> [0.8,0.999]", False),
        ("trainer.groups_per_update: 2 -> 3", False),
        ("staleness.max_updates: 2 -> 1", False),
        ("buffer.window: 1 -> 3", False),
        ("algorithm.clip_range_nats: null -> 2", False),
        ('model.dtype: "float32" -> "bfloat16"', False),
        ("data.shuffle: true -> false", False),
        ("run.seed: 0 -> 5", True),
        ("rollout.sampling.height: 32 -> 64", True),
        ("rollout.sde.noise_level: 0.7 -> 0.5", True),
        ('reward.combine: "sum" -> "product"', True),
        ("reward.scorers.0.weight: 1 -> 2", True),
    ],
)
def test_what_changes_numbers_is_named(tmp_path, line, again):
    key, value = line.split(": ")[0], line.split(" -> ")[1]
    [one] = changes(tmp_path, [], [f"{key}={value}"])
    assert (str(one), one.why_not, one.again) == (line, None, again)


def test_free_and_longer_settings(tmp_path):
    free = ["run.name=other", "run.dir=elsewhere", "rollout.max_batch=3", "rollout.workers=2", "reward.workers=2"]
    free += ["reward.batch=3", "reward.scorers.0.batch=2", "trainer.updates=9", "trainer.micro_batch_size=8"]
    free += ["trainer.gradient_checkpointing=true", "tracking.images_every=7", "checkpoint.every=3"]
    assert changes(tmp_path, [], free) == []
    before, after = ([f"trainer.ema={{decay: {decay}}}"] for decay in (0.9, 0.5))
    assert [*map(str, changes(tmp_path, before, after))] == ["trainer.ema.decay: 0.9 -> 0.5"]
    decays = ["trainer.optimizer.schedule=cosine"]
    [longer] = changes(tmp_path, decays, [*decays, "trainer.updates=9"])
    assert str(longer) == "trainer.updates: 4 -> 9", "the learning rate decays over them"


def test_files_are_compared_by_content(tmp_path):
    def refused(key: str, *now: str, tracked: bool = False) -> Change:
        (tmp_path / "validation.txt").write_text("a cat\n")
        [one] = changes(tmp_path, now, now, tracked, **{key: "2"})
        return one

    prompts = refused("data.prompts")
    assert str(prompts) == "data.prompts: the content that the checkpoint states -> other content"
    assert prompts.why_not is None
    teacher = refused("algorithm.teacher.path")
    assert str(teacher) == "algorithm.teacher.path: the content that the checkpoint states -> other content"
    model = refused("model.path/transformer")
    assert str(model).startswith("model.path/transformer: its content is not what the checkpoint states (")
    assert str(model).endswith("was trained from another model; name that one as model.path)")
    tracking = "algorithm.advantage.track_prompts=true"
    statistics = refused("data.prompts", tracking, tracked=True)
    assert statistics.why_not is not None and "algorithm.advantage.track_prompts=false" in str(statistics)
    assert refused("data.prompts", tracking).why_not is None, "there are none yet"


def test_every_rule_is_of_a_key_that_exists():
    for pattern in {*FREE, *AGAIN, *REFUSED, *NAMED, *TRACKED}:
        path = [part.replace("*", "0") for part in pattern.removesuffix(".*").split(".")]
        assert annotation_at(Config, path) is not None, pattern


def test_emulated_devices_have_no_tensors_that_could_mean_something_else(tmp_path):
    emulated = ["emulation.profile=qwen_image_lora_h800", LORA]
    [one] = changes(tmp_path, emulated, [*emulated, "model.lora.alpha=8"])
    assert (one.key, one.why_not) == ("model.lora.alpha", None)


def test_a_statement_holds_no_secret_and_is_plain(tmp_path):
    config = write_world(tmp_path, tracking={"wandb": {"api_key": "0123456789abcdef"}, "mlflow": {"enabled": False}})
    written = msgspec.json.encode(stated(config, {"data.prompts": "1"}))
    assert b"0123456789abcdef" not in written
    assert msgspec.json.decode(written, type=type(stated(config, {}))) == stated(config, {"data.prompts": "1"})

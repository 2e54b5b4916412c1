"""Tests which checkpoint a user's words mean, and that anything else is one line with a way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.checkpoint import State, read_state
from omni_async.checkpoint.contents import model_contents
from omni_async.checkpoint.folders import write_manifest
from omni_async.checkpoint.state import write_state
from omni_async.checkpoint.statement import stated
from omni_async.config import ConfigError, load, resolved_yaml
from omni_async.control.control_state import ControlState
from omni_async.records.read.chosen import choose
from tests.runtime.preflight.test_resume import checkpoint_of
from tests.runtime.runtime_world import write_world

VERSIONS = (20, 40, 60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints without tensors, whose second validated best."""
    validation = {"every": 20, "prompts": str(tmp_path / "prompts.txt")}
    config = write_world(tmp_path, trainer={"updates": 60}, validation=validation)
    run = tmp_path / "run"
    for version in VERSIONS:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        control, statement = ControlState(version=version), stated(config, {})
        checkpoint_of(run, State(control, config.model.pipeline, config.algorithm.name, statement=statement))
    (run / "config.yaml").write_text(resolved_yaml(config))
    rounds(run, {0: 0.1, 20: 0.5, 40: 0.9, 60: 0.7})
    return run


def rounds(run: Path, rewards: dict[int, float | None]) -> None:
    lines = [{"update": version, "validation/reward": reward} for version, reward in rewards.items()]
    lines += [{"update": version, "reward": 5.0, "finished": 1.0} for version in VERSIONS]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_run_and_a_word_mean_one_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for which, version, reward in ((None, 60, 0.7), ("last", 60, 0.7), ("best", 40, 0.9), ("20", 20, 0.5)):
        found = choose(run, which)
        assert found.folder == run / "checkpoints" / f"update-{version:06d}"
        assert (found.version, found.reward) == (version, reward)
        assert found.base == run.parent / "model" and found.components == ("transformer",)
        assert found.run.path == run and found.config.trainer.updates == 60
    monkeypatch.chdir(run / "checkpoints")
    found = choose(Path("update-000020"))
    assert (found.version, found.reward, found.run.path) == (20, 0.5, run)


def test_notes_name_a_better_checkpoint_and_a_better_round_without_one(run: Path) -> None:
    assert choose(run).notes == ("update 40 has the best validation reward, 0.9 (this one: 0.7): --which best",)
    assert choose(run, "best").notes == ()
    rounds(run, {0: 0.95, 20: 0.5, 40: 0.9})
    found = choose(run, "best")
    assert found.version == 40
    assert found.notes == (
        "the round of update 0 had 0.95, above the 0.9 of update 40, and has no checkpoint (it is the base model)",
    )


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        ({20: 0.5, 42: 0.9, 60: 0.7}, 40),  # a round of update 40 that began within the staleness budget of 2
        ({20: 0.5, 43: 0.9, 60: 0.7}, 60),
        ({20: 0.5, 40: None}, 20),
    ],
)
def test_which_round_counts_for_a_checkpoint(run: Path, rewards: dict[int, float | None], best: int) -> None:
    rounds(run, rewards)
    assert choose(run, "best").version == best


def test_a_mean_over_fewer_samples_is_not_the_best_and_what_is_compared_is_said(run: Path) -> None:
    rounds(run, {})
    easy = [0.9] * 9
    columns = {20: [*easy, 0.1], 40: [0.8] * 9 + [None], 60: [1.0] * 5 + [None] * 5}
    lines = []
    for version, rewards in columns.items():
        there = [one for one in rewards if one is not None]
        counts = {"samples": len(there), "asked": 10, "drawn": "d", "scores": {"reward": rewards}}
        reasons = [{"reason": "no face found", "samples": 10 - len(there)}] if len(there) < 10 else []
        mean = sum(there) / len(there)
        lines.append({"update": version, "validation/reward": mean, "reasons": reasons, **counts})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    best = choose(run, "best")
    assert best.version == 20 and best.shown_reward == "0.82"
    why = "1 over 5 of 10 samples, not scored: no face found"
    assert best.notes == (f"update 60 scored too few samples to be the best: its validation reward is {why}",)
    assert choose(run).notes == (f"update 20 has the best validation reward, 0.82 (this one: {why}): --which best",)
    shutil.rmtree(run / "checkpoints/update-000060")
    over = "over the 9 of 10 samples that both have scored"
    assert choose(run).notes == (f"update 20 has the best validation reward, 0.9 (this one: 0.8 {over}): --which best",)
    assert choose(run, "40").shown_reward == "0.8 over 9 of 10 samples, not scored: no face found"
    shutil.rmtree(run / "checkpoints/update-000020")
    assert choose(run, "best").version == 40
    assert choose(run, "best").notes == (
        f"the round of update 20 had 0.9, above the 0.8 of update 40 {over}, and has no checkpoint",
    )


def test_of_a_run_recorded_before_a_round_with_far_fewer_samples_is_not_the_best(run: Path) -> None:
    rewards = {20: (0.5, 2), 40: (0.6, 2), 60: (1.0, 1)}
    lines = [{"update": at, "validation/reward": mean, "samples": count} for at, (mean, count) in rewards.items()]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert choose(run, "best").version == 40
    for version in (20, 40):
        shutil.rmtree(run / f"checkpoints/update-{version:06d}")
    with pytest.raises(ConfigError, match="has a validation round with 90 % of its samples scored; use last"):
        choose(run, "best")


def restate(folder: Path, **fields: Any) -> None:
    write_state(folder, replace(read_state(folder), **fields))
    (folder / "manifest.json").unlink()
    write_manifest(folder)


Damage = Callable[[Path], None]


def cut_off(run: Path) -> None:
    path = run / "checkpoints/update-000060/state.json"
    path.write_bytes(path.read_bytes()[:-1])


def half_written(run: Path) -> None:
    (run / "checkpoints/update-000060/manifest.json").unlink()


def emulated(run: Path) -> None:
    """Lets the run be of emulated devices, without checkpoints."""
    text = (run / "config.yaml").read_text().replace("emulation: null", "emulation: {profile: qwen_image_lora_h800}")
    (run / "config.yaml").write_text(text)
    shutil.rmtree(run / "checkpoints")


def changed(**fields: object) -> Damage:
    """Returns a damage that states other fields, in a checkpoint that is otherwise whole."""

    def damage(run: Path) -> None:
        folder = run / "checkpoints/update-000060"
        restate(folder, **fields)

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_off, "state.json has"),
        (half_written, "it has no manifest.json; .* has others: update-000040, update-000020"),
        (changed(format=1), "has format 1, this version reads"),
        (changed(pipeline="flux"), "its model.pipeline is 'flux', config.yaml's is 'qwen_image'"),
        (changed(engine={}), "no trained weights, because its devices were emulated"),
        (lambda run: shutil.rmtree(run.parent / "model"), "there is no folder .*model"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "it has no checkpoint yet"),
        (lambda run: (run / "config.yaml").write_text("a: 1"), "config.yaml: .*unknown key"),
        (emulated, "run: its devices were emulated"),
    ],
)
def test_what_is_damaged_or_missing_is_one_line(run: Path, damage: Damage, says: str) -> None:
    damage(run)
    with pytest.raises(ConfigError, match=says) as refused:
        choose(run)
    assert "\n" not in str(refused.value)


def test_words_and_folders_that_name_no_checkpoint_are_refused(run: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(run / "checkpoints/update-000020", tmp_path / "update-000020")
    for folder, which, says in (
        (run, "30", "no checkpoint of that update; it has 20, 40, 60"),
        (run, "bset", "expected best, last or an update, got 'bset'"),
        (run / "checkpoints/update-000020", "best", "update-000020 is one checkpoint; name its run"),
        (tmp_path / "nowhere", None, "there is no such folder"),
        (run / "config.yaml", None, "is not a folder"),
        (tmp_path, None, "neither a run folder"),
        (alone, None, "config.yaml is missing, which describes the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=says):
            choose(folder, which)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"has a validation reward; use last"):
        choose(run, "best")


def test_a_base_model_is_found_by_its_content_where_a_later_attempt_names_it(run: Path, tmp_path: Path) -> None:
    folder, model = run / "checkpoints" / "update-000020", run.parent / "model"
    restate(folder, statement=stated(load(run / "config.yaml"), model_contents(model)))
    moved = model.rename(tmp_path / "elsewhere: a model")
    with pytest.raises(ConfigError, match="there is no folder"):
        choose(folder)
    assert choose(run, base=moved).base == moved
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(model), f"'{moved}'"))
    assert choose(folder).base == moved == Path(choose(folder).config.model.path)
    (moved / "transformer" / "config.json").write_text('{"num_attention_heads": 8}')
    with pytest.raises(ConfigError, match=r"a model/transformer: it is another base model than update-000020 was"):
        choose(folder)


def test_a_checkpoint_s_recipe_counts_and_not_that_of_a_later_attempt(run: Path) -> None:
    folder, config = run / "checkpoints" / "update-000020", load(run / "config.yaml")
    former = replace(config, run=replace(config.run, seed=77))
    restate(folder, statement=stated(former, {}))
    assert choose(folder).config == former and choose(run, "40").config == config

"""Tests the top of a comparison, which names the faster recipe with its numbers, and the facts of each run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scipy import stats

from omni_async.commands.report.waiting import slowest
from omni_async.records.write.rundir import append_jsonl
from omni_async.records.write.summary import write_summary
from tests.commands.report.report_world import facts, section, texts, validation_round, written
from tests.support.configs import make_summary

FLAT = [0.5] * 20


def sync(folder: Path, seed: int = 0, end: float | list[float] = 0.6, **more: float) -> Path:
    """A run of 20 updates of 3 s, with rounds of versions 0, 10 and 20."""
    rounds: dict[int, float | list[float]] = {0: 0.2, 10: 0.4, 20: end}
    return written(folder, FLAT, seed, rounds, name="sync", budget=0, update_s=3.0, **more)


def overlapped(folder: Path, seed: int = 0, end: float | list[float] = 0.7, update_s: float = 2.0) -> Path:
    return written(folder, FLAT, seed, {0: 0.2, 10: 0.35, 20: end}, name="async", budget=2, update_s=update_s)


# ---- which is faster -------------------------------------------------------------------------------------------------


def test_the_headline_has_the_seconds_to_the_highest_reward_that_both_reached(tmp_path: Path) -> None:
    found = section("verdict", sync(tmp_path / "a"), overlapped(tmp_path / "b"))
    # 0.6 is two sevenths below the end of the rise from 0.35 at 20 s to 0.7 at 40 s.
    assert found["title"] == "async is 1.75 times as fast: validation reward 0.600 after 34.3 s instead of 60.0 s"
    numbers = facts(found)
    assert numbers["seconds to validation reward 0.600"][0] == "60.0 → 34.3"
    assert numbers["seconds per update"] == ("3.00 → 2.00", "sync → async; async is 1.50 times as fast")


def test_the_first_recipe_is_the_baseline_and_may_be_the_faster_one(tmp_path: Path) -> None:
    found = section("verdict", overlapped(tmp_path / "b"), sync(tmp_path / "a"))
    assert found["title"].startswith("async is 1.75 times as fast")
    assert facts(found)["seconds to validation reward 0.600"][0] == "34.3 → 60.0"


def test_a_recipe_that_learns_sooner_with_slower_updates_is_named_with_both(tmp_path: Path) -> None:
    slow = overlapped(tmp_path / "b", end=1.2, update_s=3.3)
    title = section("verdict", sync(tmp_path / "a"), slow)["title"]
    assert title == (
        "async is 1.40 times as fast: validation reward 0.600 after 42.7 s instead of 60.0 s, although an update takes"
        " 3.30 s instead of 3.00 s"
    )


def test_seeds_of_a_recipe_are_compared_as_their_mean(tmp_path: Path) -> None:
    ends = {0: 0.6, 1: 0.8}
    folders = [sync(tmp_path / f"a{seed}", seed, end) for seed, end in ends.items()]
    folders += [overlapped(tmp_path / f"b{seed}", seed, end) for seed, end in ends.items()]
    assert facts(section("verdict", *folders))["seconds to validation reward 0.700"][0] == "60.0 → 40.0"


def test_without_a_common_reward_updates_decide_and_the_reason_is_given(tmp_path: Path) -> None:
    flat = written(tmp_path / "b", FLAT, 0, {0: 0.2, 20: 0.1}, name="async", budget=2, update_s=2.0)
    found = section("verdict", sync(tmp_path / "a"), flat)
    assert found["title"] == "async is 1.50 times as fast: an update takes 2.00 s instead of 3.00 s"
    assert "There is no validation reward above the start of both that both reached." in texts(found)


def test_without_validation_training_rewards_are_means_of_5_updates(tmp_path: Path) -> None:
    rising = [0.1 * n for n in range(1, 11)]
    folders = [
        written(tmp_path / name, rising, name=name, budget=budget, update_s=update_s)
        for name, budget, update_s in (("sync", 0, 3.0), ("async", 2, 2.0))
    ]
    found = section("verdict", *folders)
    assert found["title"] == "async is 1.50 times as fast: training reward 0.800 after 20.0 s instead of 30.0 s"
    assert facts(found)["training reward"][1].endswith("not paired: over the groups of the last 5 updates")


def test_rewards_of_other_scorers_are_not_compared(tmp_path: Path) -> None:
    other = overlapped(tmp_path / "b")
    with (other / "config.yaml").open("a") as config:
        config.write("reward: {scorers: [{name: ocr}]}\n")
    found = section("verdict", sync(tmp_path / "a"), other)
    assert found["title"].startswith("async is 1.50 times as fast: an update takes")
    assert "Their rewards are not comparable" in texts(found)


def test_curves_over_other_validation_samples_are_not_compared(tmp_path: Path) -> None:
    """Compares training rewards instead: half the validation prompts of one arm are other ones."""
    folders = [
        sync(tmp_path / "a", end=[0.6, 0.6]),
        written(tmp_path / "b", FLAT, name="async", budget=2, update_s=2.0),
    ]
    for version, reward in ((0, 0.2), (10, 0.4), (20, 0.9)):
        append_jsonl(folders[1] / "metrics.jsonl", validation_round(version, [reward, reward], "other prompts"))
    found = section("verdict", *folders)
    assert found["title"].startswith("async is 1.50 times as fast: an update takes")
    assert "Their validation curves are not compared: their prompts, noise, sampling or scorers differ." in texts(found)


def test_other_numbers_of_devices_are_named(tmp_path: Path) -> None:
    folders = sync(tmp_path / "a"), overlapped(tmp_path / "b")
    for folder, devices in zip(folders, (2, 5), strict=True):
        write_summary(folder / "summary.json", make_summary(devices=devices))
    assert "Their numbers of devices differ: 2 for sync, 5 for async." in texts(section("verdict", *folders))
    write_summary(folders[0] / "summary.json", make_summary(devices=5))
    assert "numbers of devices" not in texts(section("verdict", *folders))


def test_three_recipes_are_each_compared_with_the_first(tmp_path: Path) -> None:
    third = written(tmp_path / "c", FLAT, 0, {0: 0.2, 20: 0.7}, name="third", budget=4, update_s=1.0)
    found = section("verdict", sync(tmp_path / "a"), overlapped(tmp_path / "b"), third)
    assert found["title"].startswith("third is 3.75 times as fast")
    assert "async is 1.75 times as fast" in texts(found)


# ---- the final reward ------------------------------------------------------------------------------------------------


def test_one_run_each_is_paired_over_validation_prompts(tmp_path: Path) -> None:
    old, new = [0.1, 0.5, 0.6, 0.8], [0.2, 0.7, 0.9, 0.8]
    found = section("verdict", sync(tmp_path / "a", end=old), overlapped(tmp_path / "b", end=new))
    value, detail = facts(found)["validation reward after update 20"]
    assert value == "0.500 → 0.650"
    interval = stats.ttest_rel(new, old).confidence_interval()
    half = (interval.high - interval.low) / 2
    assert detail == f"+0.15 ± {half:.2f} (95 % interval), paired over 4 validation prompts"
    assert "does not cover training seeds" in texts(found)


def test_samples_of_a_prompt_count_once(tmp_path: Path) -> None:
    folders = [sync(tmp_path / "a", end=[0.1, 0.3, 0.5, 0.7]), overlapped(tmp_path / "b", end=[0.3, 0.3, 0.9, 0.9])]
    for folder in folders:
        with (folder / "config.yaml").open("a") as config:
            config.write("validation: {samples_per_prompt: 2}\n")
    _, detail = facts(section("verdict", *folders))["validation reward after update 20"]
    half = stats.sem([0.1, 0.3]) * stats.t.ppf(0.975, 1)
    assert detail == f"+0.2 ± {half:.1f} (95 % interval), paired over 2 validation prompts"


def test_several_seeds_are_paired_over_seeds(tmp_path: Path) -> None:
    ends = {1: (0.6, 0.7), 2: (0.5, 0.7), 3: (0.7, 0.7)}
    folders = [sync(tmp_path / f"a{seed}", seed, old) for seed, (old, _) in ends.items()]
    folders += [overlapped(tmp_path / f"b{seed}", seed, new) for seed, (_, new) in ends.items()]
    half = stats.sem([0.1, 0.2, 0.0]) * stats.t.ppf(0.975, 2)
    value, detail = facts(section("verdict", *folders))["validation reward after update 20"]
    assert (value, detail) == ("0.600 → 0.700", f"+0.10 ± {half:.2f} (95 % interval), paired over 3 seeds")


@pytest.mark.parametrize(
    ("last", "value", "said"),
    [
        ({"update": 20, "validation/reward": 0.7}, "0.600 → 0.700", "no interval: rewards of samples not recorded"),
        (validation_round(20, [0.6, 0.8], "other noise"), None, "not comparable: their prompts, noise, sampling or"),
        ({"update": 19, "validation/reward": 0.7}, None, "no validation round is of the same update in all runs"),
    ],
)
def test_a_missing_interval_has_a_reason(tmp_path: Path, last: dict[str, object], value: str | None, said: str) -> None:
    other = written(tmp_path / "b", FLAT, 0, {0: 0.2}, name="async", budget=2)
    append_jsonl(other / "metrics.jsonl", last)
    found = section("verdict", sync(tmp_path / "a", end=[0.6, 0.6]), other)
    final = facts(found).get("validation reward after update 20", (None, ""))
    assert final[0] == value and said in final[1] + texts(found)


def test_a_run_without_updates_is_too_early_to_compare(tmp_path: Path) -> None:
    young = written(tmp_path / "b", [], name="async", budget=2)
    assert section("verdict", sync(tmp_path / "a"), young)["title"] == "Too early to compare async with sync"


@pytest.mark.parametrize("value", [None, "text", [], {"a": 1}, -1, 1e308, True, 10**400])
def test_edited_lines_and_settings_cost_no_comparison(tmp_path: Path, value: object) -> None:
    other = overlapped(tmp_path / "b", end=[0.6, 0.8])
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for line, key in zip(lines[-6:], ["reward", "wall_s", "wall_s", "update", "asked", "scores"], strict=True):
        line[key] = value
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = json.dumps(value if value != 10**400 else "much")
    settings = f"algorithm: {text}\nmodel: {{pipeline: {text}, path: {text}}}\nreward: {{scorers: [{text}]}}\n"
    with (other / "config.yaml").open("a") as config:
        config.write(f"{settings}validation: {{samples_per_prompt: {text}}}\n")
    json.dumps(section("verdict", sync(tmp_path / "a"), other), allow_nan=False)


# ---- what a run is ---------------------------------------------------------------------------------------------------


def test_the_facts_of_a_run_are_those_of_its_recipe_and_its_ledger(tmp_path: Path) -> None:
    shares = {"busy/rollout": 0.98, "busy/reward": 0.5, "busy/trainer": 0.4}
    folder = written(tmp_path / "run", FLAT, **shares)
    (folder / "config.yaml").write_text(
        "algorithm: {name: flow_grpo}\nmodel: {pipeline: qwen_image, path: /models/tiny}\n"
        "reward: {scorers: [{name: ocr}, {name: lib/mine.py:Bright, weight: 0.5}]}\n"
        "staleness: {max_updates: 2}\nrollout: {group_size: 12}\ntrainer: {groups_per_update: 4}\n"
    )
    assert facts(section("verdict", folder)) == {
        "algorithm": ("flow_grpo", "4 groups of 12 samples per update"),
        "model": ("qwen_image", "tiny"),
        "reward": ("ocr + mine.py:Bright", "weights 1, 0.5"),
        "staleness": ("S = 2", "used: 0.50 on average, 1 at most"),
        "bottleneck": ("generation", "busy: generation 98%, scoring 50%, training 40%"),
    }


def test_a_secret_in_a_model_s_path_stays_masked(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", FLAT)
    (folder / "config.yaml").write_text("model: {pipeline: 'x', path: 'https://me:hunter22@host'}\n")
    assert "hunter22" not in json.dumps(section("verdict", folder))


@pytest.mark.parametrize(
    ("budget", "trainer", "rollout", "reward", "stage"),
    [
        (2, (0.4, 0.6), (0.95, 0.0), 0.5, "generation"),
        (2, (0.4, 0.6), (0.5, 0.4), 0.97, "scoring"),
        (2, (0.95, 0.0), (0.5, 0.5), 0.4, "training"),
        (2, (0.95, 0.02), (0.95, 0.02), 0.4, "none"),
        (0, (0.3, 0.7), (0.35, 0.0), 0.3, "none"),
    ],
)
def test_the_slowest_stage_is_the_one_that_others_wait_for(
    budget: int, trainer: tuple[float, float], rollout: tuple[float, float], reward: float, stage: str
) -> None:
    shares = {
        "trainer": {"busy": trainer[0], "starved": trainer[1]},
        "rollout": {"busy": rollout[0], "backpressured": rollout[1]},
        "reward": {"busy": reward},
    }
    assert slowest(shares, budget).stage == stage

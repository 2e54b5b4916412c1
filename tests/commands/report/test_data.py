"""Tests what a page says: the numbers of the run's own files, and sentences that follow from them."""

from __future__ import annotations

import fcntl
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from omni_async.commands.report import what_it_buys
from omni_async.commands.report.blocks import MOST_POINTS, thinned
from omni_async.commands.report.data import SECTIONS
from omni_async.commands.report.file import one_file
from omni_async.commands.report.numbers import estimate, number, seconds
from omni_async.commands.report.waiting import STATES, shares
from omni_async.config import ConfigError
from omni_async.records.read.record import read_run
from omni_async.records.write.activity import Activity, busy_fractions
from omni_async.records.write.rundir import append_jsonl
from omni_async.records.write.summary import write_summary
from omni_async.simulation import what_if
from omni_async.types import Span
from tests.commands.report.report_world import block, facts, metrics, page, section, texts, written
from tests.support.configs import make_summary

# ---- the numbers of a run --------------------------------------------------------------------------------------------


def test_every_section_of_a_run_has_something_and_all_of_it_is_json(emulated):
    made = page(emulated)
    assert [one["id"] for one in made["sections"]] == [*SECTIONS]
    assert all(one["blocks"] or one["tabs"] for one in made["sections"])
    json.dumps(made, allow_nan=False)


def test_a_page_asks_for_short_simulations(emulated, monkeypatch):
    asked = []

    def stopped(*job, **how):
        asked.append(how["each"])
        raise ConfigError("stopped")

    monkeypatch.setattr(what_it_buys, "what_if", stopped)
    what_it_buys._answer.cache_clear()
    assert "Nothing can be predicted: stopped." in json.dumps(page(emulated))
    assert asked == [what_it_buys._EACH] and asked[0] < what_if._MOST_BUNDLES


def test_a_file_has_the_verdict_for_readers_without_javascript():
    blocks = [{"kind": "facts", "items": []}, {"kind": "text", "text": "The run is done.", "tone": "plain"}]
    text = one_file({"title": "run", "sections": [{"title": "It learned: 0.2 > 0.1", "blocks": blocks}]})
    assert "<h1>It learned: 0.2 &gt; 0.1</h1><div>The run is done.</div></noscript>" in text


def test_curves_hold_the_numbers_of_metrics_jsonl(painted):
    lines = metrics(painted)
    updates = [line for line in lines if "finished" in line]
    (reward,) = block(section("curves", painted), "reward")["series"]
    assert reward["x"]["update"] == [line["update"] for line in updates]
    assert reward["x"]["minutes"] == [line["wall_s"] / 60 for line in updates]
    assert reward["y"] == [line["reward"] for line in updates]
    (validation,) = block(section("curves", painted), "validation-reward")["series"]
    rounds = {line["update"]: line["validation/reward"] for line in lines if "validation/reward" in line}
    assert dict(zip(validation["x"]["update"], validation["y"], strict=True)) == rounds and {*rounds} == {0, 6, 12}
    (speed,) = block(section("throughput", painted), "metric-images_per_s")["series"]
    assert speed["y"] == [line["images_per_s"] for line in updates]


def test_staleness_is_the_share_of_each_update_s_groups_in_the_ledger(emulated):
    chart = block(section("staleness", emulated), "staleness")
    counts = Counter((line.trained_version, line.staleness) for line in read_run(emulated).ledger)
    for one in chart["series"]:
        age = int(one["name"].removeprefix("staleness "))
        expected = [counts[update, age] / 8 for update in range(1, 13)]
        assert one["y"] == pytest.approx(expected), one["name"]


@pytest.mark.parametrize(
    ("reserve_s", "starved_s", "said"),
    [
        (3.0, 0.25, "with a reserve of 3 s (median); at most 1 s of the trainer's waits in all are its price."),
        (0.0, 0.25, "with a reserve of 0 s (median); at most 1 s of the trainer's waits in all are its price."),
        (0.0, 0.0, "the budget S is None."),
    ],
)
def test_staleness_is_shown_with_the_reserve_and_its_price(tmp_path, reserve_s, starved_s, said):
    numbers = {"admission/reserve_s": reserve_s, "admission/starved_s": starved_s}
    shown = texts(section("staleness", written(tmp_path / "run", [0.5] * 4, **numbers)))
    assert "0.50 updates on average, 1 at most; the budget S is " in shown
    assert shown.endswith(said)


def test_shares_over_all_of_the_time_are_those_of_the_summary_s_function(emulated):
    spans = [*read_run(emulated).spans()]
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    found = shares(spans, start, end)
    for role, expected in busy_fractions(Activity((start, math.inf), spans), end).items():
        mean = dict(zip(STATES, found[role].mean(axis=0), strict=True))
        assert {state: mean[state] for state in STATES[:3]} == pytest.approx(expected, abs=1e-6), role
        assert found[role].sum(axis=1) == pytest.approx(1.0), role


def test_shares_are_of_the_stretch_in_which_something_happened_and_a_role_s_workers_count_alike():
    spans = [
        Span("rollout-0", "generate", 0.0, 5.0),
        Span("rollout-0", "generate", 4.0, 5.0),  # at the same time: counts once
        Span("rollout-0", "backpressured", 2.0, 8.0),  # busy comes first
        Span("rollout-1", "starved", 0.0, 10.0),
    ]
    rollout = shares(spans, 0.0, 10.0, bins=2)["rollout"]
    assert rollout.tolist() == [[0.5, 0.0, 0.5, 0.0], pytest.approx([0.0, 0.3, 0.5, 0.2])]


# ---- sentences -------------------------------------------------------------------------------------------------------


def test_the_verdict_says_whether_the_change_is_larger_than_its_uncertainty(tmp_path):
    rising = [0.1 + 0.02 * n for n in range(20)]
    assert texts(section("verdict", written(tmp_path / "up", rising))).startswith(
        "It learned: training reward 0.145 → 0.445"
    )
    assert texts(section("verdict", written(tmp_path / "down", rising[::-1]))).startswith("It got worse")
    noisy = [0.1, 0.9] * 10
    assert texts(section("verdict", written(tmp_path / "flat", noisy))).startswith("No clear change")
    assert texts(section("verdict", written(tmp_path / "short", rising[:3]))).startswith("Too short to say: 3 updates")
    assert texts(section("verdict", written(tmp_path / "none", []))).startswith("No update was made")


def test_validation_decides_where_the_spread_of_its_rounds_is_known(tmp_path):
    folder = written(tmp_path / "run", [0.5] * 20)
    for version, reward in ((0, 0.25), (20, 0.75)):
        line = {"update": version, "validation/reward": reward, "samples": 36, "standard_error": 0.05}
        append_jsonl(folder / "metrics.jsonl", line)
    assert section("verdict", folder)["title"] == "It learned: validation reward 0.250 → 0.750"
    _, detail = facts(section("result", folder))["validation reward"]
    assert detail.startswith("+0.50 ± 0.14 (95 % interval)")  # 1.96 * sqrt(2) * 0.05


def test_the_verdict_names_the_reward_that_decides(tmp_path):
    folder = written(tmp_path / "run", [0.1] * 10 + [0.9] * 10, validation={0: 0.5, 20: 0.4})  # its spread is not known
    assert section("verdict", folder)["title"].startswith("It learned: training reward 0.1")


def test_seeds_of_one_recipe_are_a_mean_and_its_range_and_share_a_colour(tmp_path):
    folders = [
        written(tmp_path / f"{seed}", [0.1 * seed, 0.5], seed, {0: 0.1, 2: 0.3 + 0.1 * seed}) for seed in (1, 2, 3)
    ]
    folders.append(written(tmp_path / "other", [0.9], seed=4))
    (tmp_path / "other" / "config.yaml").write_text("run: {name: other}\nrollout: {workers: 2}\n")
    made = page(*folders)
    assert [run["colour"] for run in made["runs"]] == [0, 0, 0, 1]
    curves = block(section("curves", *folders), "reward")["series"]
    assert [(one["name"], one["faint"]) for one in curves[:3]] == [(f"made, seed {seed}", True) for seed in (1, 2, 3)]
    mean = curves[3]
    assert (mean["name"], mean["y"]) == ("made, mean of 3 seeds", pytest.approx([0.2, 0.5]))
    assert (mean["low"], mean["high"]) == ([0.1, 0.5], [pytest.approx(0.3), 0.5])
    assert "made: validation reward +0.40 ± 0.25 over 3 seeds" in texts(section("verdict", *folders))
    differences = block(section("configuration", *folders), "differences")
    assert ["rollout.workers", None, None, None, "2"] in differences["rows"]
    assert ["trainer.updates", "40", "40", "40", None] in differences["rows"]


def test_the_mean_of_long_seeds_is_that_of_all_their_updates(tmp_path):
    folders = [written(tmp_path / f"{seed}", [], seed) for seed in (1, 2)]
    for folder, offset in zip(folders, (0.0, 0.5), strict=True):
        values = [offset + (7 * n * (3 if offset else 1) % 11) / 100 for n in range(1, 4001)]
        lines = [{"update": n, "reward": value, "finished": 1e9} for n, value in enumerate(values, start=1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, other, mean = block(section("curves", *folders), "reward")["series"]
    of = {line["update"]: line["reward"] for line in metrics(folders[0])}
    and_ = {line["update"]: line["reward"] for line in metrics(folders[1])}
    assert (first["of"], other["of"], mean["of"]) == (4000, 4000, 4000) and len(mean["y"]) > 1500
    assert mean["y"] == pytest.approx([(of[x] + and_[x]) / 2 for x in mean["x"]["update"]])


def test_speed_has_the_mean_of_seeds_too_and_runs_of_one_seed_are_called_runs(tmp_path):
    folders = [written(tmp_path / name, [0.5] * 3, 1, {0: 0.1, 3: 0.5}) for name in ("0", "1")]
    for speed, folder in enumerate(folders, start=2):
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({**line, "images_per_s": float(speed)}) + "\n" for line in metrics(folder))
        )
    shown = section("throughput", *folders)
    assert [(one["name"], one["y"][0]) for one in block(shown, "metric-images_per_s")["series"]] == [
        ("0", 2.0), ("1", 3.0), ("made, mean of 2 runs", 2.5),
    ]  # fmt: skip
    assert section("verdict", *folders)["title"].startswith("made learned in 0 of 2 runs")


def test_runs_of_one_name_and_folder_name_are_told_apart(tmp_path):
    folders = [written(tmp_path / place / "made-1", [0.1, 0.2]) for place in ("here", "there")]
    made = page(*folders)
    assert len({run["label"] for run in made["runs"]}) == len({run["id"] for run in made["runs"]}) + 1 == 2
    assert len({tab["run"] for tab in section("staleness", *folders)["tabs"]}) == 2


def test_samples_are_counted_by_what_they_are(tmp_path):
    """A summary counts generated samples, of which those of unrecorded time have no rate."""
    folder = written(tmp_path / "run", [0.5] * 12)
    summary = make_summary(images=400, untimed_images=200, finished=110.0, rewards=[0.5] * 12, cpu_s={"trainer": 30})
    write_summary(folder / "summary.json", summary)
    assert facts(section("result", folder))["CPU seconds"] == ("30.0", "start included; trainer 30.0")
    value, detail = facts(section("result", folder))["generated samples"]
    assert (value, detail) == ("400", "2.00 per second; rejected groups included, validation not")
    assert facts(section("result", folder))["device-hours"][0] == "0.0556"
    pairs = written(tmp_path / "pairs", [0.5] * 12)
    with (pairs / "config.yaml").open("a") as config:
        config.write("data: {preferences: pairs.parquet}\n")
    assert facts(section("result", pairs))["samples read"] == ("96", "0.133 per second")
    columns = block(section("result", folder, pairs), "comparison")["columns"]
    assert "generated samples or samples read" in columns and "images" not in columns


def test_emulated_devices_have_no_device_hours(tmp_path):
    folder = written(tmp_path / "run", [0.5] * 12)
    write_summary(folder / "summary.json", make_summary(images=400))
    with (folder / "config.yaml").open("a") as config:
        config.write("emulation: {profile: toy}\n")
    assert "device-hours" not in facts(section("result", folder))


@pytest.mark.parametrize(
    "recipe", ["data: {preferences: pairs.parquet}\n", "algorithm: {teacher: {path: t}}\nreward: {scorers: []}\n"]
)
def test_a_run_without_scorers_has_no_training_reward(tmp_path, recipe):
    """Its ledger has a constant in place of rewards."""
    folders = [written(tmp_path / name, [0.1 * n for n in range(20)], name=name) for name in ("a", "b")]
    for folder in folders:
        with (folder / "config.yaml").open("a") as config:
            config.write(recipe)
    with (folders[1] / "config.yaml").open("a") as config:
        config.write("rollout: {workers: 2}\n")
    assert "training reward" not in facts(section("result", folders[0]))
    verdict = section("verdict", *folders)
    assert "training reward" not in str(facts(verdict)) and "training reward" not in verdict["title"]
    assert "There is no final reward to compare" in texts(verdict)
    row = block(section("result", *folders), "comparison")["rows"][0]
    assert row[4] is None


def test_samples_of_training_prompts_are_not_called_the_same_prompts(tmp_path):
    folder = written(tmp_path / "run", [0.5])
    assert section("samples", folder)["lead"] == ""
    (folder / "samples").mkdir()
    (folder / "samples" / "validation-000001.jsonl").write_text("")
    assert section("samples", folder)["lead"].startswith("The same prompts")


def test_a_run_that_has_just_begun_has_no_update_yet(tmp_path):
    folder = written(tmp_path / "run", [])
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert section("verdict", folder)["title"] == "No update yet"


def test_a_killed_run_and_a_folder_of_a_run_that_did_nothing_have_a_page(tmp_path):
    killed = page(written(tmp_path / "killed", [0.5] * 12))
    assert killed["runs"][0]["status"] == "killed"
    empty = page(written(tmp_path / "empty", []))
    assert "No group has ended yet." in texts(next(one for one in empty["sections"] if one["id"] == "endings"))


@pytest.mark.parametrize("value", [None, "text", [], {"a": 1}, -1, 1e308, True, 10**400])
def test_lines_that_somebody_edited_cost_their_own_numbers_and_no_page(tmp_path, value):
    folder = written(tmp_path / "run", [0.5] * 12, validation={0: 0.1, 6: 0.2})
    lines = metrics(folder)
    for line, key in zip(lines, ["reward", "wall_s", "images", "update", "finished", "reward", "reward"], strict=False):
        line[key] = value
    lines[12]["validation/reward"] = lines[13]["standard_error"] = value
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    append_jsonl(folder / "attempts.jsonl", {"began": value, "status": value})
    made = page(folder)
    json.dumps(made, allow_nan=False)
    curves = next(one for one in made["sections"] if one["id"] == "curves")
    (reward,) = block(curves, "reward")["series"]
    assert len(reward["y"]) >= 10 and reward["y"][-1] == 0.5


def test_secrets_in_a_configuration_stay_masked(tmp_path):
    folder = written(tmp_path / "run", [0.5])
    (folder / "config.yaml").write_text("tracking: {mlflow: {tracking_uri: 'https://me:hunter22@host/x'}}\n")
    assert "hunter22" not in json.dumps(page(folder))


# ---- very many numbers -----------------------------------------------------------------------------------------------


def test_thinning_keeps_ends_and_extremes_and_says_how_many_there_were(tmp_path):
    values: list[float | None] = [0.5] * 50_000
    values[12_345], values[43_210] = 7.0, -7.0
    kept = thinned(values)
    assert len(kept) <= MOST_POINTS and {0, 12_345, 43_210, 49_999} <= {*kept} and kept == sorted(kept)
    assert thinned([1.0, None, 2.0]) == [0, 1, 2]
    folder = written(tmp_path / "run", [0.5] * 2500)
    chart = block(section("curves", folder), "reward")
    assert len(chart["series"][0]["y"]) <= MOST_POINTS and "Of up to 2,500 points" in chart["note"]


# ---- how numbers are written -----------------------------------------------------------------------------------------


def test_numbers_and_times_are_written_for_people():
    written_ = {0.25149: "0.251", 35.68: "35.7", 4800.0: "4,800", 0: "0", 2.5e-6: "2.50e-06", None: "-"}
    assert {value: number(value) for value in written_} == written_
    assert [seconds(value) for value in (12.34, 134.5, 7384.0)] == ["12.3 s", "2 min 14 s", "2 h 03 min"]


def test_an_interval_is_student_s():
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert found is not None and found.mean == 2.5
    assert found.half == pytest.approx(3.182446 * 1.2909944487 / 2)
    assert estimate([]) is None and estimate([1.0]) == (1.0, None)


def test_the_first_mismatch_of_engine_and_trainer_stands_next_to_the_drift(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [])
    of_rows = {"engine_mismatch_nats/mean": -2.5, "engine_mismatch_nats/variance": 9.0, "fresh_fraction": 1.0}
    first = {**of_rows, "engine_mismatch_velocity": 0.03, "engine_mismatch_clipped": 0.62}
    damaged = {**first, "engine_mismatch_clipped": "much", "log_ratio_nats/variance": None, "fresh_fraction": 0}
    stale = {"fresh_fraction": 0.0, "log_ratio_nats/variance": 25.0}
    for update, line in enumerate([damaged, first, stale, damaged], start=1):
        append_jsonl(run / "metrics.jsonl", {"update": update, "wall_s": 60.0 * update, "finished": 1e9, **line})
    shown = texts(section("correction", run))
    assert "log-ratio -2.5 ± 3 nats, velocity error 0.03 of its rms, 62% of the rows outside" in shown
    assert "stale rows drift by 5 nats" in shown

"""Tests the table and the figure of a result."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from omni_async.commands.bench import table
from omni_async.commands.bench.comparison import CATEGORIES, answer, compare
from omni_async.commands.bench.figure import figure_of
from omni_async.commands.bench.result import (
    FILE_NAME,
    ArmRecord,
    Machine,
    Measured,
    Overlap,
    Prediction,
    RunRecord,
    Stage,
    describe_machine,
    read_overlap,
)
from omni_async.config import ConfigError
from omni_async.performance.law import StageTimes


def shares(*fractions: float) -> dict[str, float]:
    return dict(zip(("busy", "starved", "backpressured"), fractions, strict=True))


def measured(step: float, **given) -> Measured:
    numbers = {
        **{"updates": 10, "step_s": step, "steps_s": (step,) * 10},
        **{"images_per_s": 32 / step, "images_per_s_per_device": 8 / step},
        "attribution": dict.fromkeys(CATEGORIES, 0.0) | {"training": 4.0, "generation": step - 4.0},
        "stages": {"generation": Stage(3.0, 0.25), "reward": Stage(1.0)},
        "busy": {"rollout": shares(0.5, 0.0, 0.375), "trainer": shares(0.25, 0.5, 0.0)},
        "staleness": {0: 30, 2: 10},
        "peak_memory_bytes": 3 * 2**29,
    }
    return Measured(**numbers | given)


def runs(*steps: float, **given) -> tuple[RunRecord, ...]:
    return tuple(RunRecord(round=n, status="done", measured=measured(step, **given)) for n, step in enumerate(steps))


def arm(name: str, budget: int = 0, **given) -> ArmRecord:
    prediction = Prediction(times=StageTimes(generate=3, score=1, train=4, publish=0), law_s=4.5, simulated_s=5.25)
    named = {"name": name, "schedule": name.partition(":")[0], "max_updates": budget, "devices": 4}
    return ArmRecord(**named | {"prediction": prediction} | given)


def result(*arms: ArmRecord, time_scale: float = 1.0) -> Overlap:
    machine = Machine("a chip", 2, 8 * 2**30, "Linux", "3.11", {"ray": "2.60"})
    given: dict[str, Any] = {"recipe": "toy.yaml", "command": "bench", "started": "today", "machine": machine}
    return Overlap(**given, repeats=3, updates=12, time_scale=time_scale, law="profile toy, times 1", arms=arms)


FAILED = RunRecord(round=1, status="failed", reason="EngineError: gone")
RESULT = result(
    arm("sync", runs=runs(8.0, 8.0, 8.5)),
    arm("async:1", 1, runs=(*runs(5.0), FAILED)),
    arm("async:2", 2, runs=(FAILED,)),
    arm("async:4", 4, skipped="staleness.exact: no", prediction=None),
)


def cells(overlap: Overlap) -> dict[tuple[str, str], list[str]]:
    return {(section.title, label): row for section in table.sections(overlap) for label, row in section.rows}


def test_a_cell_per_arm_and_a_word_where_there_is_no_number():
    found = cells(RESULT)
    assert found["seconds per update", "median"] == ["8", "5", "failed", "skipped"]
    assert found["seconds per update", "quartiles"] == ["8..8.25", "", "", ""]
    assert found["seconds per update", "runs"] == ["3 of 3", "1 of 3", "", ""]
    assert found["seconds per update", "law"][:2] == ["4.5", "4.5"]
    assert found["seconds per update", "bound fraction"][:2] == ["0.562", "0.9"]
    assert found["seconds per update", "simulated / measured - 1"][:2] == ["-34.4 %", "+5.0 %"]
    assert found["devices", "all roles"][:2] == ["4", "4"]
    assert found["trained samples/s", "all devices"][:2] == ["4", "6.4"]
    assert found["trained samples/s", "per device"][:2] == ["1", "1.6"]
    assert found["speed-up over", "sync"] == ["", "1.60", "", ""]
    assert found["where the seconds go", "waiting for generation"][:2] == ["4", "1"]
    assert found["device-seconds (variation)", "T_g generation"][0] == "3 (0.25)"
    assert found["device-seconds (variation)", "T_r reward"][0] == "1"
    assert found["busy / starved / backpressured, %", "rollout"][0] == "50 / 0 / 38"
    assert found["staleness, updates", "mean"][0] == "0.50"
    assert [found["staleness, updates", f"{age}, % of groups"][0] for age in (0, 2)] == ["75", "25"]
    assert found["memory, GiB", "peak of the job"][0] == "1.5"
    assert ("seconds per update", "in the profile's time") not in found
    assert "trained tokens/s" not in {title for title, _ in found}


@pytest.mark.parametrize(("scale", "title", "cell"), [(1.0, "", "4000"), (0.01, ", in the profile's time", "40")])
def test_tokens_per_second_are_those_of_the_profile_s_time(scale: float, title: str, cell: str):
    drawn = tuple(replace(one, measured=replace(one.measured, tokens_per_s=4000.0)) for one in runs(8.0))
    found = cells(result(arm("sync", runs=drawn), arm("async:1", 1, runs=runs(5.0)), time_scale=scale))
    assert found[f"trained tokens/s{title}", "all devices"] == [cell, ""]


def test_notes_name_speed_ups_failures_skips_and_where_the_law_is_from():
    notes = list(table.notes(RESULT))
    assert {
        "async:1 saves 3.00 s per update over sync: 5.00 s in place of 8.00 s, 1.60 times as fast;"
        " generation overlapped with training 3.00 s",
        "async:1: run 2 failed: EngineError: gone",
        "async:2: run 2 failed: EngineError: gone",
        "async:4: skipped: staleness.exact: no",
        "law and simulation: profile toy, times 1",
    } <= {*notes}
    assert any("a chip, 2 CPUs, 8 GiB; Linux; Python 3.11, ray 2.60" in note for note in notes)


def test_savings_over_other_baselines_are_noted_for_the_fastest_arm():
    steps = {"sync": 8.0, "sync_colocated": 6.0, "async:1": 5.0, "async:2": 4.5}
    overlap = result(*(arm(name, runs=runs(step)) for name, step in steps.items()))
    found = answer(compare(overlap))
    assert (found.arm, found.baseline) == ("async:2", "sync")
    words = " ".join(table.notes(overlap))
    assert "async:2 saves 1.50 s per update over sync_colocated" in words
    assert "async:1 saves 1.00 s per update over sync_colocated" not in words
    assert "sync_colocated saves 2.00 s per update over sync:" in words


# ---- the answer ------------------------------------------------------------------------------------------------------


def spent(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(CATEGORIES, 0.0) | seconds


BEFORE = measured(8.0, attribution=spent(training=4.0, generation=2.5, reward=1.0, weights=0.375, idle=0.125))
AFTER = measured(5.25, attribution=spent(training=4.5, generation=0.5, reward=0.125, idle=0.125))
ANSWER = result(
    arm("sync", runs=(RunRecord(round=0, status="done", measured=BEFORE),)),
    arm("async:2", 2, runs=(RunRecord(round=0, status="done", measured=AFTER),)),
)


def test_the_answer_is_first_in_seconds_by_cause_and_its_rows_add_up():
    lines = table.markdown(ANSWER).splitlines()
    assert lines[0] == ("**async:2 saves 2.75 s per update over sync: 5.25 s in place of 8.00 s, 1.52 times as fast**")
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:10]]
    assert header == ["seconds per update", "sync", "async:2", "saved"]
    assert rows == [
        ["generation overlapped with training", "2.50", "0.50", "2.00"],
        ["scoring overlapped", "1.00", "0.12", "0.88"],
        ["weight transfer overlapped", "0.38", "0.00", "0.38"],
        ["not attributed: no role was active", "0.12", "0.12", "0.00"],
        ["training, longer", "4.00", "4.50", "-0.50"],
        ["the update", "8.00", "5.25", "2.75"],
    ]
    found = answer(compare(ANSWER))
    assert sum(one.saved_s for one in found.causes) == found.before_s - found.after_s == 2.75
    assert "The trainer of async:2 still waits 0.62 s per update: waiting for generation 0.50 s" in lines[11]
    assert "%" not in "".join(lines[:12])


def test_the_answer_is_of_the_round_with_the_median_speed_up():
    overlap = result(arm("sync", runs=runs(8.0, 9.0, 8.5)), arm("async:2", 2, runs=runs(4.0, 4.0, 5.0)))
    found = answer(compare(overlap))
    assert (found.round, found.rounds, found.before_s, found.after_s) == (0, 3, 8.0, 4.0)
    assert (found.saved_s.median, found.ratio.median) == (4.0, 2.0)
    assert any("of round 1, which has the median speed-up of 3 rounds" in said for said in table.details(overlap))


def test_a_slower_arm_needs_more_and_an_arm_alone_has_no_answer():
    slower = result(arm("sync", runs=runs(8.0)), arm("async:1", 1, runs=runs(8.5)))
    assert table.headline(slower) == (
        "async:1 needs 0.50 s per update more than sync: 8.50 s in place of 8.00 s, 0.94 times as fast"
    )
    alone = result(arm("sync", runs=runs(8.0)), arm("async:2", 2, runs=(FAILED,)))
    assert table.headline(alone).startswith("No comparison: ") and table.headline(alone).endswith("measured: sync")
    assert list(table.details(alone)) == [] and "saved" not in table.markdown(alone)
    other = result(arm("one_step_off", runs=runs(6.0)), arm("async:2", 2, runs=runs(4.0)))
    assert table.headline(other).startswith("async:2 saves 2.00 s per update over one_step_off: ")


def test_a_simulation_that_failed_is_reported_and_scaled_time_is_also_shown_in_the_profiles():
    prediction = Prediction(times=StageTimes(1, 1, 1, 1), law_s=4.0, not_simulated="RuntimeError: no")
    overlap = result(arm("sync", runs=runs(8.0), prediction=prediction), time_scale=0.01)
    assert "sync: not simulated: RuntimeError: no" in list(table.notes(overlap))
    found = cells(overlap)
    assert found["seconds per update", "simulated"] == ["-"]
    assert found["seconds per update", "in the profile's time"] == ["800"]
    assert "trained samples/s" not in {title for title, _ in found}, (
        "they are neither the machine's nor the emulated devices'"
    )


def test_markdown_is_one_rectangular_table_followed_by_a_list():
    lines = table.markdown(RESULT).splitlines()
    del lines[: lines.index("- This is one round; more (--repeats) show how much the saving varies") + 1]
    rows = [line for line in lines if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    assert all(row.count("|") == 6 for row in rows)
    assert rows[0].split()[1:-1] == ["|", "sync", "|", "async:1", "|", "async:2", "|", "async:4"]
    after = lines[lines.index(rows[-1]) + 1 :]
    assert after[0] == "" and all(line.startswith("- ") for line in after[1:])


def test_texts_of_a_result_from_elsewhere_are_no_markup():
    evil = "a | b\n# c <img src=x> [d](e) \x1b[31m"
    lines = table.markdown(msgspec.structs.replace(RESULT, law=evil)).splitlines()
    assert "- law and simulation: a \\| b # c \\<img src=x> \\[d](e) \\\\x1b\\[31m" in lines


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pipe_gets_markdown_and_a_terminal_a_table(terminal):
    out = io.StringIO()
    table.show(RESULT, Console(file=out, force_terminal=terminal, width=140))
    shown = out.getvalue()
    assert ("|---" in shown) == (not terminal)
    assert "async:4: skipped: staleness.exact: no" in shown
    for word in ("bound fraction", "skipped", "1.60"):
        assert word in shown


def test_numbers_that_are_added_have_equally_many_decimals():
    assert table.rounded([12.345, -0.001, 3.0]) == ["12.3", "0.0", "3.0"]
    assert table.rounded([0.01234, 0.001]) == ["0.0123", "0.0010"]
    assert table.rounded([1234.5, 1.0]) == ["1234", "1"] and table.rounded([0.0]) == ["0"]


def test_numbers_have_three_digits():
    values = {None: "-", 0.0: "0", 0.01234: "0.0123", 1.2345: "1.23", 418.2: "418", 12345.0: "12345", 1.5e-5: "1.5e-05"}
    assert {value: table.number(value) for value in values} == values


def test_the_figure_has_four_panels_with_every_measured_arm():
    measured_ = arm("sync", runs=runs(8.0, 9.0, 10.0)), arm("async:2", 2, runs=runs(5.0))
    axes = figure_of(result(*measured_, arm("async:4", 4, skipped="no"))).axes
    titles = ["Step time", "Where the trainer's time goes", "What each role does", "Staleness"]
    assert [panel.get_title(loc="left") for panel in axes] == titles
    for panel in axes:
        assert [label.get_text() for label in panel.get_xticklabels()] == ["sync", "async:2"]
    steps, seconds, _, staleness = axes
    [medians] = steps.containers
    assert list(medians.lines[0].get_ydata()) == [9.0, 5.0]
    tops = np.sum([[bar.get_height() for bar in bars] for bars in seconds.containers], axis=0)
    assert tops == pytest.approx([9.0, 5.0])
    [heat] = staleness.get_images()
    assert np.asarray(heat.get_array()).tolist() == [[0.75, 0.75], [0, 0], [0.25, 0.25]]


def test_the_machine_is_described_by_what_it_is():
    found = describe_machine()
    assert found.cpus >= 1 and found.memory_bytes > 2**30 and found.gpus == ()
    assert found.packages["omni-async"]
    assert f"{found.cpus} CPUs" in str(found)
    assert msgspec.convert(msgspec.to_builtins(found), Machine) == found


@pytest.mark.parametrize("number", ["1e160", "9" * 400, "-1", "true"])
def test_a_result_with_numbers_that_no_benchmark_has_is_refused_in_one_line(tmp_path, number):
    content = msgspec.json.encode(result(arm("S0", runs=runs(1.0)))).replace(
        b'"repeats":3', b'"repeats":' + number.encode()
    )
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match="not a benchmark result"):
        read_overlap(tmp_path)


def test_a_result_is_in_its_folder_unless_it_is_named_itself(tmp_path):
    overlap = result(arm("S0", runs=runs(1.0)))
    (tmp_path / "away.json").write_bytes(msgspec.json.encode(overlap))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / FILE_NAME).symlink_to(tmp_path / "away.json")
    with pytest.raises(ConfigError, match="leads out of its folder"):
        read_overlap(tmp_path / "out")
    assert read_overlap(tmp_path / "out" / FILE_NAME) == overlap

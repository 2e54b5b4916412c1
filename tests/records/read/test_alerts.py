"""Tests that each alert fires on what it is about, and is silent on what only resembles it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_async.control.rounds import Round
from omni_async.records.read.alerts import CHECKS, Alert, alerts
from omni_async.records.read.columns import Columns
from omni_async.records.read.follow import Follower
from omni_async.records.read.record import read_run
from omni_async.records.read.seen import Seen, seen_of, seen_of_run
from omni_async.records.read.trends import share_at_least, trend
from omni_async.records.write.attempts import Fault
from tests.support.made_run import MadeRun
from tests.support.places import ROOT

DOCS = ROOT / "docs"


def seen(
    updates: Sequence[dict[str, Any]] = (),
    rounds: dict[int, float] | None = None,
    labels: tuple[str, ...] = (),
    **more: Any,
) -> Seen:
    lines = Columns()
    for number, line in enumerate(updates, 1):
        lines.add({"update": number, **line})
    validation = [Round(version, value) for version, value in (rounds or {}).items()]
    return Seen(lines, labels=labels, **{"validation": validation, **more})


def names(found: Seen) -> set[str]:
    return {alert.name for alert in alerts(found)}


def rewards(slope: float, count: int = 100, noise: float = 0.05, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"reward": 0.5 + slope * n + noise * rng.standard_normal()} for n in range(count)]


# ---- trends ----------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_trend_holds_the_true_slope_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    x = np.arange(40)
    found = [trend(0.01 * x + rng.standard_normal(40)) for _ in range(1000)]
    held = sum(one.low <= 0.01 <= one.high for one in found if one is not None)
    assert 930 <= held <= 985


def test_noise_that_resembles_its_predecessor_widens_the_interval() -> None:
    rng = np.random.default_rng(3)
    false = 0
    for _ in range(300):
        noise = np.zeros(100)
        for n in range(1, 100):
            noise[n] = 0.7 * noise[n - 1] + rng.standard_normal()
        found = trend(noise)
        assert found is not None
        false += not found.low <= 0 <= found.high
    assert false < 40  # without it 40 % of them


def test_the_lower_end_of_a_share_is_wilsons() -> None:
    assert share_at_least(0, 0) == 0.0
    assert share_at_least(5, 10) == pytest.approx(0.2366, abs=1e-3)
    assert share_at_least(100, 100) == pytest.approx(0.9630, abs=1e-3)


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_reward_that_does_not_rise_is_flat_and_one_that_rises_is_not(seed: int) -> None:
    flat, rising = names(seen(rewards(0.0, seed=seed))), names(seen(rewards(0.002, seed=seed)))
    assert "reward_falls" not in rising and "reward_flat" not in rising
    if not flat & {"reward_flat", "reward_falls"}:  # by chance one in twenty, or a wide interval
        found = trend(seen(rewards(0.0, seed=seed)).updates.column("reward"))
        assert found is not None and (found.low > 0 or found.high * 100 > found.noise)


def test_a_flat_reward_is_found() -> None:
    assert "reward_flat" in names(seen(rewards(0.0)))


def test_a_short_run_or_a_noisy_one_that_may_rise_is_not_called_flat() -> None:
    assert "reward_flat" not in names(seen(rewards(0.0, count=20)))
    noisy = [{"reward": 0.5 + 0.001 * n + 0.3 * math.sin(n)} for n in range(40)]
    found = trend(np.array([line["reward"] for line in noisy]))
    assert found is not None
    assert ("reward_flat" in names(seen(noisy))) == (found.high * 40 <= found.noise)


def test_a_flat_training_reward_with_a_validation_that_rises_is_not_flat() -> None:
    rising = {10: 0.5, 40: 0.55, 70: 0.6, 100: 0.66}
    assert "reward_flat" not in names(seen(rewards(0.0), rising))
    assert "reward_flat" in names(seen(rewards(0.0), {10: 0.5, 40: 0.55, 70: 0.5, 100: 0.5}))


def test_a_reward_that_falls_is_a_problem() -> None:
    [alert] = [one for one in alerts(seen(rewards(-0.003))) if one.name == "reward_falls"]
    assert alert.level == "problem"
    assert "reward_falls" not in names(seen(rewards(0.0)))


def test_preferences_have_no_reward_to_be_flat() -> None:
    lines = [{"reward": 0.5, "accuracy": 0.6, "margin": 0.1} for _ in range(100)]
    assert names(seen(lines)) == set()


def test_a_loss_that_is_no_number_is_a_problem() -> None:
    assert "not_finite" in names(seen([{"loss": 1.0}, {"loss": None}]))
    assert "not_finite" not in names(seen([{"loss": None}, {"loss": 1.0}]))
    assert "not_finite" not in names(seen([{"reward": 1.0}]))


def ended(wasted: int, of: int) -> list[tuple[str, str | None]]:
    return [("rejected", "zero reward variance")] * wasted + [("trained", None)] * (of - wasted)


def test_groups_without_variance_are_reported_where_their_share_is_surely_large() -> None:
    assert "zero_variance" in names(seen(endings=ended(100, 200)))
    assert "zero_variance" not in names(seen(endings=ended(50, 200)))
    assert "zero_variance" not in names(seen(endings=ended(2, 4)))  # too few to say


# ---- levels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alert", "fires", "silent"),
    [
        ("low_ess", {"ess": 0.1}, {"ess": 0.6}),
        ("masked", {"masked": 0.7}, {"masked": 0.3}),
        ("clipped", {"clip_fraction": 0.8}, {"clip_fraction": 0.2}),
        ("starved_trainer", {"busy/trainer": 0.2, "busy/rollout": 0.97}, {"busy/trainer": 0.8, "busy/rollout": 0.97}),
        ("starved_trainer", {"busy/trainer": 0.2, "busy/reward": 0.97}, {"busy/trainer": 0.2, "busy/rollout": 0.6}),
        ("idle_engines", {"busy/trainer": 0.97, "busy/rollout": 0.3}, {"busy/trainer": 0.97, "busy/rollout": 0.8}),
    ],
)
def test_a_level_counts_once_some_updates_have_it(
    alert: str, fires: dict[str, float], silent: dict[str, float]
) -> None:
    assert alert in names(seen([fires] * 5))
    assert alert not in names(seen([silent] * 5))
    assert alert not in names(seen([fires] * 2))
    assert alert not in names(seen([silent] * 4 + [fires]))


def rounded(velocity: float, nats: float = 4.0, clipped: float = 0.0, honest: float = 0.1) -> dict[str, Any]:
    of_rows = {"engine_mismatch_nats": 3 * nats, "engine_mismatch_nats/variance": nats**2}
    return {**of_rows, "engine_mismatch_velocity": velocity, "engine_mismatch_clipped": clipped} | {
        "engine_mismatch_honest": honest
    }


def test_honest_rounding_is_no_alert_however_many_nats_it_is() -> None:
    assert names(seen([rounded(0.03)] * 5)) == set()
    [fault] = alerts(seen([rounded(0.4)] + [{"loss": 1.0}] * 9))  # fresh rows may be those of the start alone
    assert (fault.name, fault.level) == ("engine_mismatch", "problem")
    assert "differ by 40% of their size; rounding explains 10%" in fault.says
    assert names(seen([rounded(0.03, honest=0.01)])) == {"engine_mismatch"}
    assert names(seen([rounded(0.03)] * 4 + [rounded(0.4)])) == set()


def test_rounding_that_the_clip_range_cannot_bear_is_a_warning_until_ratios_leave_the_engine() -> None:
    [alert] = alerts(seen([rounded(0.03, clipped=0.62)] * 5))
    assert (alert.name, alert.level) == ("mismatch_clipped", "warning")
    assert "62% of the rows" in alert.says and "by 4 nats (a velocity error of 3.0%)" in alert.says
    assert names(seen([rounded(0.03, clipped=0.62)] + [rounded(0.03)] * 4)) == set()
    stale = {"loss": 1.0, "proximal_ratio": 1.0}
    assert names(seen([rounded(0.03, clipped=0.62)] + [stale] * 50)) == set(), "auto has changed the ratio"
    assert names(seen([rounded(0.03, clipped=0.62)] + [{"loss": 1.0}] * 50)) == {"mismatch_clipped"}
    assert names(seen([rounded(0.03, clipped=0.04)])) == set()


def test_a_starved_trainer_is_told_for_whom_it_waits() -> None:
    [one] = alerts(seen([{"busy/trainer": 0.2, "busy/rollout": 0.5, "busy/reward": 0.95}] * 5))
    assert "waits for scoring" in one.says and "reward=N" in one.do


def test_a_run_that_makes_no_updates_any_more_is_reported_while_it_runs() -> None:
    lines = [{"update_s": 2.0, "finished": 100.0 + 2 * n} for n in range(5)]
    assert "no_progress" in names(seen(lines, status="running", now=300.0))
    assert "no_progress" not in names(seen(lines, status="running", now=150.0))
    assert "no_progress" not in names(seen(lines, status="done", now=300.0))


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_scorer_that_is_down_is_reported_while_the_run_waits_for_it() -> None:
    told = "reward-0: scorer http is down: connection refused"
    assert "outage" in names(seen(status="running", told=told))
    assert "outage" not in names(seen(status="done", told=told))
    assert "outage" not in names(seen(status="running", told="reward-0: scorer http answers again"))


def test_a_scorer_that_fails_often_is_named() -> None:
    def lines(failed: float) -> list[dict[str, Any]]:
        return [
            {"scorer/ocr/failed": failed, "scorer/ocr/samples": 40, "scorer/clip/failed": 0, "scorer/clip/samples": 40}
        ] * 5

    [one] = alerts(seen(lines(10), labels=("clip", "ocr")))
    assert one.name == "scorer_fails" and "ocr failed for 50 of 200" in one.says
    assert names(seen(lines(1), labels=("clip", "ocr"))) == set()


def test_groups_that_are_dropped_while_the_run_goes_on_are_reported_with_the_last_reason() -> None:
    lost: list[tuple[str, str | None]] = [("dropped", "reward failed 4 times: x")] * 20
    [one] = alerts(seen(endings=[*ended(0, 180), *lost]))
    assert one.name == "dropped" and "reward failed 4 times: x" in one.says
    at_end: list[tuple[str, str | None]] = [("dropped", "run interrupted: on request")] * 20
    assert names(seen(endings=[*ended(0, 180), *at_end])) == set()


def test_a_part_that_is_lost_again_and_again_within_an_hour_is_a_problem() -> None:
    def fault(part: str, time: float) -> Fault:
        return Fault(time, part, "its process died", f"{part}.9", 2.0)

    often = [fault("rollout-0", 10.0), fault("rollout-0.2", 20.0), fault("rollout-0.3", 30.0)]
    assert names(seen(faults=often)) == {"repeated_faults"}
    assert names(seen(faults=[fault(f"rollout-{n}", 10.0) for n in range(3)])) == set()
    assert names(seen(faults=[fault("rollout-0", 4000.0 * n) for n in range(3)])) == set()


def test_a_run_that_was_killed_says_how_it_goes_on() -> None:
    [one] = alerts(seen(status="killed"))
    assert "checkpoint.resume=auto" in one.do
    assert names(seen(status="interrupted")) == set()


def test_samples_of_the_newest_round_without_a_score_are_a_warning_with_their_reasons() -> None:
    incomplete = Round(4, 1.0, scored=1, asked=2, reasons={"no face found": 1})
    [one] = alerts(seen(validation=[Round(0, 0.5, scored=2, asked=2), incomplete]))
    assert (one.name, one.level) == ("not_scored", "warning")
    assert "version 4: 1 of 2 samples not scored: no face found" in one.says
    assert names(seen(validation=[incomplete, Round(8, 0.5, scored=2, asked=2)])) == set()
    assert names(seen(validation=[Round(8, 0.5, scored=2), Round(9, 0.5)])) == set()


def test_rounds_over_other_samples_are_no_rise_of_validation() -> None:
    """Checks that a reward is flat although the last round, of which the hard samples failed, is the highest."""
    rising = [
        Round(10 * n, 0.5 + 0.01 * n, scored=20, asked=20, drawn="d", scores={"reward": (0.5,) * 20}) for n in (1, 2)
    ]
    lucky = Round(90, 0.9, scored=19, asked=20, drawn="d", scores={"reward": (0.9,) * 19 + (None,)})
    flat = rewards(0.0)
    assert "reward_flat" not in names(seen(flat, {10: 0.5, 50: 0.6, 90: 0.9}))
    assert "reward_flat" in names(seen(flat, validation=[*rising, lucky]))


# ---- of all ----------------------------------------------------------------------------------------------------------


def worlds() -> list[Seen]:
    """Returns runs that have every alert between them."""
    bad = {"loss": None, **rounded(0.4, clipped=0.9), "ess": 0.1, "masked": 0.9, "clip_fraction": 0.9, "update_s": 1.0}
    bad |= {"busy/trainer": 0.1, "busy/rollout": 0.99, "finished": 1.0, "scorer/x/failed": 9, "scorer/x/samples": 9}
    endings = [*ended(100, 180), *[("dropped", "generation failed")] * 20]
    faults = [Fault(1.0, "rollout-0", "x", "y", 1.0)] * 3
    common: dict[str, Any] = {"endings": endings, "faults": faults, "labels": ("x",), "now": 1e6}
    return [
        seen([bad] * 5, status="running", told="x is down", **common),
        seen(rewards(0.0), status="killed"),
        seen(rewards(-0.1)),
        seen([{"busy/trainer": 0.97, "busy/rollout": 0.3}] * 5),
        seen(validation=[Round(4, 1.0, scored=1, asked=2, reasons={"no face found": 1})]),
    ]


EVERY = [alert for world in worlds() for alert in alerts(world)]


def test_problems_come_first_and_every_check_can_fire() -> None:
    assert len({alert.name for alert in EVERY}) == len(CHECKS)
    levels = [alert.level for alert in alerts(worlds()[0])]
    assert {*levels} == {"problem", "warning", "note"}
    assert levels == sorted(levels, key=["problem", "warning", "note"].index)


@pytest.mark.parametrize("alert", EVERY, ids=lambda alert: alert.name)
def test_the_page_that_an_alert_links_has_the_place_it_links(alert: Alert) -> None:
    page, _, anchor = alert.docs.partition("#")
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert not anchor or anchor in anchors
    assert alert.says.endswith(".") and alert.do.endswith(".")


def test_a_run_read_whole_and_one_that_is_followed_give_the_same_alerts(tmp_path: Path) -> None:
    MadeRun(groups=400).write(tmp_path)
    follower = Follower(tmp_path)
    for _ in follower.poll():
        pass
    whole = seen_of_run(read_run(tmp_path))
    followed = seen_of(follower, "killed", None, 0.0)
    assert whole.status == "killed" and whole.endings == followed.endings and len(whole.endings) == 200
    assert alerts(whole) == alerts(followed) and {"killed"} <= {one.name for one in alerts(whole)}


def test_a_run_without_anything_has_no_alerts() -> None:
    assert alerts(seen()) == []

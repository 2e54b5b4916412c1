"""Tests that each alert fires on its fault, and not on similar runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_async.control.rounds import Round
from omni_async.records.read.alerts import CHECKS, alerts
from omni_async.records.read.columns import Columns
from omni_async.records.read.follow import Follower
from omni_async.records.read.record import read_run
from omni_async.records.read.seen import Seen, seen_of, seen_of_run
from omni_async.records.read.trends import share_at_least, trend
from omni_async.records.write.attempts import Fault
from tests.support.made_run import MadeRun
from tests.support.places import ROOT


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


def rewards(slope: float, count: int = 100, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"reward": 0.5 + slope * n + 0.05 * rng.standard_normal()} for n in range(count)]


def ended(wasted: int, of: int) -> list[tuple[str, str | None]]:
    return [("rejected", "zero reward variance")] * wasted + [("trained", None)] * (of - wasted)


def dropped(reason: str) -> list[tuple[str, str | None]]:
    return [*ended(0, 180), *[("dropped", reason)] * 20]


def rounded(velocity: float, nats: float = 4.0, clipped: float = 0.0, honest: float = 0.1) -> dict[str, Any]:
    of_rows = {"engine_mismatch_nats": 3 * nats, "engine_mismatch_nats/variance": nats**2}
    return {**of_rows, "engine_mismatch_velocity": velocity, "engine_mismatch_clipped": clipped} | {
        "engine_mismatch_honest": honest
    }


def fault(part: str, time: float) -> Fault:
    return Fault(time, part, "its process died", f"{part}.9", 2.0)


def failing(failed: float) -> Seen:
    ocr = {"scorer/ocr/failed": failed, "scorer/ocr/samples": 40}
    return seen([{**ocr, "scorer/clip/failed": 0, "scorer/clip/samples": 40}] * 5, labels=("clip", "ocr"))


# ---- trends ----------------------------------------------------------------------------------------------------------


def test_interval_of_a_trend() -> None:
    rng = np.random.default_rng(7)
    x = np.arange(40)
    found = [trend(0.01 * x + rng.standard_normal(40)) for _ in range(1000)]
    held = sum(one.low <= 0.01 <= one.high for one in found if one is not None)
    assert 930 <= held <= 985, "it has the true slope as often as it claims"
    false = 0
    for _ in range(300):
        noise = np.zeros(100)
        for n in range(1, 100):
            noise[n] = 0.7 * noise[n - 1] + rng.standard_normal()
        one = trend(noise)
        assert one is not None
        false += not one.low <= 0 <= one.high
    assert false < 40, "noise that resembles its predecessor; without a wider interval 40 % are false"


def test_lower_end_of_a_share_is_wilsons() -> None:
    assert share_at_least(0, 0) == 0.0
    assert share_at_least(5, 10) == pytest.approx(0.2366, abs=1e-3)
    assert share_at_least(100, 100) == pytest.approx(0.9630, abs=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_flat_and_rising_rewards(seed: int) -> None:
    flat, rising = names(seen(rewards(0.0, seed=seed))), names(seen(rewards(0.002, seed=seed)))
    assert not rising & {"reward_falls", "reward_flat"}
    if not flat & {"reward_flat", "reward_falls"}:  # by chance one in twenty, or a wide interval
        found = trend(seen(rewards(0.0, seed=seed)).updates.column("reward"))
        assert found is not None and (found.low > 0 or found.high * 100 > found.noise)


# ---- what fires, and what does not -----------------------------------------------------------------------------------

RISING = {10: 0.5, 40: 0.55, 70: 0.6, 100: 0.66}
SAME_SAMPLES = [
    Round(10 * n, 0.5 + 0.01 * n, scored=20, asked=20, drawn="d", scores={"reward": (0.5,) * 20}) for n in (1, 2)
]
LUCKY = Round(90, 0.9, scored=19, asked=20, drawn="d", scores={"reward": (0.9,) * 19 + (None,)})
INCOMPLETE = Round(4, 1.0, scored=1, asked=2, reasons={"no face found": 1})
PACE = [{"update_s": 2.0, "finished": 100.0 + 2 * n} for n in range(5)]
DOWN = "reward-0: scorer http is down: connection refused"
LOST = [fault("rollout-0", 10.0), fault("rollout-0.2", 20.0), fault("rollout-0.3", 30.0)]
CLIPPED = rounded(0.03, clipped=0.62)
STALE = {"loss": 1.0, "proximal_ratio": 1.0}
VALIDATED = Round(8, 0.5, scored=2, asked=2)
FIRES = [
    ("reward_flat", seen(rewards(0.0))),
    ("reward_flat", seen(rewards(0.0), {10: 0.5, 40: 0.55, 70: 0.5, 100: 0.5})),
    ("reward_flat", seen(rewards(0.0), validation=[*SAME_SAMPLES, LUCKY])),  # the last round lacks the hard samples
    ("reward_falls", seen(rewards(-0.003))),
    ("not_finite", seen([{"loss": 1.0}, {"loss": None}])),
    ("zero_variance", seen(endings=ended(100, 200))),
    ("engine_mismatch", seen([rounded(0.4)] + [{"loss": 1.0}] * 9)),  # fresh rows may be those of the start alone
    ("engine_mismatch", seen([rounded(0.03, honest=0.01)] * 5)),
    ("mismatch_clipped", seen([CLIPPED] * 5)),
    ("mismatch_clipped", seen([CLIPPED] + [{"loss": 1.0}] * 50)),
    ("no_progress", seen(PACE, status="running", now=300.0)),
    ("outage", seen(status="running", told=DOWN)),
    ("scorer_fails", failing(10)),
    ("dropped", seen(endings=dropped("reward failed 4 times: x"))),
    ("repeated_faults", seen(faults=LOST)),
    ("killed", seen(status="killed")),
    ("not_scored", seen(validation=[VALIDATED, INCOMPLETE])),
]
SILENT = [
    ("reward_flat", seen(rewards(0.0, count=20))),
    ("reward_flat", seen(rewards(0.0), RISING)),
    ("reward_flat", seen([{"reward": 0.5, "accuracy": 0.6, "margin": 0.1}] * 100)),  # preferences
    ("reward_falls", seen(rewards(0.0))),
    ("not_finite", seen([{"loss": None}, {"loss": 1.0}])),
    ("not_finite", seen([{"reward": 1.0}])),
    ("zero_variance", seen(endings=ended(50, 200))),
    ("zero_variance", seen(endings=ended(2, 4))),  # too few
    ("engine_mismatch", seen([rounded(0.03)] * 4 + [rounded(0.4)])),
    ("mismatch_clipped", seen([CLIPPED] + [rounded(0.03)] * 4)),
    ("mismatch_clipped", seen([CLIPPED] + [STALE] * 50)),  # auto has changed the ratio
    ("mismatch_clipped", seen([rounded(0.03, clipped=0.04)] * 5)),
    ("no_progress", seen(PACE, status="running", now=150.0)),
    ("no_progress", seen(PACE, status="done", now=300.0)),
    ("outage", seen(status="done", told=DOWN)),
    ("outage", seen(status="running", told="reward-0: scorer http answers again")),
    ("scorer_fails", failing(1)),
    ("dropped", seen(endings=dropped("run interrupted: on request"))),
    ("repeated_faults", seen(faults=[fault(f"rollout-{n}", 10.0) for n in range(3)])),
    ("repeated_faults", seen(faults=[fault("rollout-0", 4000.0 * n) for n in range(3)])),
    ("killed", seen(status="interrupted")),
    ("not_scored", seen(validation=[INCOMPLETE, VALIDATED])),
    ("not_scored", seen(validation=[Round(8, 0.5, scored=2), Round(9, 0.5)])),
]
for name, fires, silent in [
    ("low_ess", {"ess": 0.1}, {"ess": 0.6}),
    ("masked", {"masked": 0.7}, {"masked": 0.3}),
    ("clipped", {"clip_fraction": 0.8}, {"clip_fraction": 0.2}),
    ("starved_trainer", {"busy/trainer": 0.2, "busy/rollout": 0.97}, {"busy/trainer": 0.8, "busy/rollout": 0.97}),
    ("starved_trainer", {"busy/trainer": 0.2, "busy/reward": 0.97}, {"busy/trainer": 0.2, "busy/rollout": 0.6}),
    ("withheld", {"admission/starved_s": 1.0, "update_s": 10.0}, {"admission/starved_s": 0.4, "update_s": 10.0}),
    ("idle_engines", {"busy/trainer": 0.97, "busy/rollout": 0.3}, {"busy/trainer": 0.97, "busy/rollout": 0.8}),
]:  # a level counts once some updates have it
    FIRES.append((name, seen([fires] * 5)))
    SILENT += [(name, seen(lines)) for lines in ([silent] * 5, [fires] * 2, [silent] * 4 + [fires])]
ALL = [alert for _, found in FIRES for alert in alerts(found)]


@pytest.mark.parametrize(("name", "found"), FIRES)
def test_fires(name: str, found: Seen) -> None:
    assert name in names(found)


@pytest.mark.parametrize(("name", "found"), SILENT)
def test_is_silent(name: str, found: Seen) -> None:
    assert name not in names(found)


@pytest.mark.parametrize("found", [seen(), seen([rounded(0.03)] * 5), failing(1)])
def test_nothing_to_report(found: Seen) -> None:
    assert alerts(found) == []


@pytest.mark.parametrize(
    ("name", "level", "says", "do"),
    [
        ("reward_falls", "problem", "", ""),
        ("engine_mismatch", "problem", "differ by 40% of their size; rounding explains 10%", ""),
        ("mismatch_clipped", "warning", "62% of the rows", ""),
        ("mismatch_clipped", "warning", "by 4 nats (a velocity error of 3.0%)", ""),
        ("starved_trainer", "", "waits for scoring", "reward=N"),
        ("withheld", "note", "waits 1 s of 10 s per update", "staleness.reserve"),
        ("scorer_fails", "", "ocr failed for 50 of 200", ""),
        ("dropped", "", "reward failed 4 times: x", ""),
        ("killed", "", "", "checkpoint.resume=auto"),
        ("not_scored", "warning", "version 4: 1 of 2 samples not scored: no face found", ""),
    ],
)
def test_what_an_alert_reports(name: str, level: str, says: str, do: str) -> None:
    assert any(one.name == name and level in one.level and says in one.says and do in one.do for one in ALL)


def test_every_check_can_fire_and_its_link_leads_somewhere() -> None:
    assert len({alert.name for alert in ALL}) == len(CHECKS)
    for alert in ALL:
        page, _, anchor = alert.docs.partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.M)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors
        assert alert.says.endswith(".") and alert.do.endswith(".")


def test_problems_come_first() -> None:
    bad = {"loss": None, **rounded(0.4, clipped=0.9), "ess": 0.1, "masked": 0.9, "update_s": 1.0, "finished": 1.0}
    many = seen([bad] * 5, status="running", told=DOWN, faults=LOST, endings=ended(100, 200), now=1e6)
    levels = [alert.level for alert in alerts(many)]
    assert len({*levels}) > 1 and levels == sorted(levels, key=["problem", "warning", "note"].index)


def test_a_run_read_whole_and_one_that_is_followed_have_the_same_alerts(tmp_path: Path) -> None:
    MadeRun(groups=400).write(tmp_path)
    follower = Follower(tmp_path)
    for _ in follower.poll():
        pass
    whole = seen_of_run(read_run(tmp_path))
    followed = seen_of(follower, "killed", None, 0.0)
    assert whole.status == "killed" and whole.endings == followed.endings and len(whole.endings) == 200
    assert alerts(whole) == alerts(followed) and {"killed"} <= {one.name for one in alerts(whole)}

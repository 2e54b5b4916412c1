"""Tests which engine holds which weights, and what is refused."""

from __future__ import annotations

import pytest

from omni_async.control.versions import Versions, WeightMismatch
from omni_async.types import WeightReport


def versions(*engines: str, published: int = 0) -> Versions:
    v = Versions()
    v.trained = 10
    for engine in engines:
        v.join(engine)
    for version in range(published + 1):
        v.announce(version, f"d{version}")
    return v


def test_the_held_version_is_the_oldest_of_all_engines() -> None:
    v = versions("a", "b", published=2)
    assert v.held is None
    v.report(WeightReport("a", 2, "d2"))
    assert v.held is None, "b holds nothing yet"
    v.report(WeightReport("b", 1, "d1"))
    assert v.held == 1
    v.report(WeightReport("b", 2, "d2"))
    assert v.held == 2
    assert v.engines == {"a": 2, "b": 2} and v.of("a") == 2


def test_an_engine_that_left_holds_nobody_back() -> None:
    v = versions("a", "b", published=1)
    v.report(WeightReport("a", 1, "d1"))
    v.leave("b")
    assert v.held == 1
    v.leave("b")
    v.leave("a")
    assert v.held is None


def test_reports_of_unknown_engines_and_of_wrong_weights_are_refused_and_change_nothing() -> None:
    v = versions("a", published=1)
    with pytest.raises(WeightMismatch, match="engine z is none of this run's: a"):
        v.report(WeightReport("z", 0, "d0"))
    for version, digest in ((1, "x"), (7, "d7")):
        with pytest.raises(WeightMismatch):
            v.report(WeightReport("a", version, digest))
    assert v.engines == {"a": -1}


def test_versions_are_announced_in_order_and_after_their_update() -> None:
    v = Versions(3)
    v.announce(3, "d3")
    for version in (3, 2):
        with pytest.raises(ValueError, match=f"version {version} published after 3"):
            v.announce(version, "d")
    with pytest.raises(ValueError, match="version 4 published before its update was reported: the newest version is 3"):
        v.announce(4, "d4")
    v.trained = 5
    v.announce(5, "d5")
    assert v.published == 5


def test_digests_nobody_can_report_any_more_are_forgotten() -> None:
    v = versions("a", "b", published=3)
    v.report(WeightReport("a", 3, "d3"))
    v.report(WeightReport("b", 2, "d2"))
    v.report(WeightReport("b", 3, "d3"))
    assert v.published == 3
    with pytest.raises(WeightMismatch, match="never published"):
        v.report(WeightReport("b", 2, "d2"))


def test_a_newcomer_may_report_a_version_whose_digest_is_forgotten_and_holds_nothing() -> None:
    v = versions("a", published=2)
    v.report(WeightReport("a", 1, "d1"))
    v.join("b")
    v.report(WeightReport("a", 2, "d2"))
    v.report(WeightReport("b", 1, "d1"))
    assert v.of("b") == -1 and v.held == 2


def test_when_every_engine_was_lost_nobody_begins_with_what_they_had_left_behind() -> None:
    """Checks that a version left behind is refused: the slots of the groups that made version 2 are given out again."""
    v = versions("a", published=2)
    v.report(WeightReport("a", 1, "d1"))
    v.report(WeightReport("a", 2, "d2"))
    v.join("b")
    v.leave("a")
    assert v.held is None
    v.report(WeightReport("b", 1, "d1"))
    assert v.held is None and v.of("b") == -1
    v.report(WeightReport("b", 2, "d2"))
    assert v.held == 2

"""Tests what a timeline asks of the spans: lanes, tracks, windows, shares of time, one group."""

from __future__ import annotations

import random

import numpy as np
import pytest

from omni_async.records.read.spans import Facts, Placed, SpanLine, SpanStore
from omni_async.records.write.timeline import clip, length, union


def store_of(*spans: tuple[str, str, float, float]) -> SpanStore:
    store = SpanStore()
    ordered = sorted(spans, key=lambda span: span[3])
    store.add(Placed(SpanLine(*span), number, 1) for number, span in enumerate(ordered))
    return store


def test_lanes_are_slots_in_the_order_of_the_roles_and_a_replacement_has_the_lane_of_the_lost_one() -> None:
    names = ("trainer", "reward-0", "rollout-10", "rollout-2", "rollout-2.2", "publisher", "judge-0")
    store = store_of(*((name, "work", 0.0, 1.0) for name in names))
    assert store.lanes() == ["rollout-2", "rollout-10", "reward-0", "trainer", "publisher", "judge-0"]
    window = store.window(0.0, 1.0, 0, 6, 10, 100)
    assert window.boxes is not None and sorted(store.lanes_of(window.boxes)) == [0, 0, 1, 2, 3, 4, 5]


def test_a_window_has_the_spans_that_touch_it_on_its_lanes_and_none_else() -> None:
    store = store_of(
        ("rollout-0", "generate", 0.0, 2.0),
        ("rollout-0", "generate", 2.0, 4.0),
        ("rollout-1", "generate", 1.0, 3.0),
        ("trainer", "train", 2.5, 9.0),
    )
    window = store.window(2.0, 3.0, 0, 1, 10, 100)
    assert window.boxes is not None and window.boxes["start"].tolist() == [2.0]
    whole = store.window(-5.0, 50.0, 0, 3, 10, 100)
    assert whole.boxes is not None and len(whole.boxes) == 4
    assert store.window(10.0, 11.0, 0, 3, 10, 100).boxes.size == 0  # type: ignore[union-attr]


def test_spans_that_overlap_are_on_different_tracks() -> None:
    rng = random.Random(1)
    spans = [("rollout-0", "generate", at := rng.uniform(0, 50), at + rng.uniform(0, 5)) for _ in range(300)]
    boxes = store_of(*spans).window(-1, 100, 0, 1, 10, 1000).boxes
    assert boxes is not None and len(boxes) == 300
    for track in np.unique(boxes["track"]):
        own = np.sort(boxes[boxes["track"] == track], order="start")
        assert (own["end"][:-1] <= own["start"][1:]).all()
    most = max(sum(s <= at < e for _, _, s, e in spans) for _, _, at, _ in spans)
    assert boxes["track"].max() + 1 <= 2 * most


@pytest.mark.parametrize("seed", range(5))
def test_the_shares_of_columns_are_those_of_the_union_of_the_spans(seed: int) -> None:
    rng = random.Random(seed)
    times = [(rng.randrange(3), at := rng.uniform(0, 100), at + rng.expovariate(0.5)) for _ in range(200)]
    store = store_of(*((f"rollout-{n}", "generate", start, end) for n, start, end in times))
    window = store.window(10.0, 90.0, 0, 3, 37, 10)
    assert window.boxes is None and window.busy is not None and window.waits is not None
    for lane in range(3):
        own = union((start, end) for n, start, end in times if n == lane)
        for column in range(37):
            begin = 10.0 + column * 80 / 37
            share = length(clip(own, begin, begin + 80 / 37)) / (80 / 37)
            assert window.busy[lane, column] == pytest.approx(255 * share, abs=1.01)
    assert not window.waits.any()
    store = store_of(("trainer", "train", 0.0, 1.0), ("trainer", "starved", 1.0, 4.0), ("trainer", "outage", 1.0, 2.0))
    window = store.window(0.0, 4.0, 0, 1, 4, 0)
    assert window.busy is not None and window.waits is not None
    assert (window.busy.tolist(), window.waits.tolist()) == ([[255, 0, 0, 0]], [[0, 255, 255, 255]])


def spans_of_group(spans: list[tuple[str, str, float, float, Facts]], *group: int) -> list[int]:
    store = SpanStore()
    store.add(Placed(SpanLine(*span), number, 1) for number, span in enumerate(spans))
    return [place.offset for place in store.of_group(*group)]


def test_the_spans_of_a_group_are_its_samples_its_training_and_the_calls_that_scored_its_prompt_meanwhile() -> None:
    trained = [
        ("rollout-0", "generate", 0.0, 1.0, Facts(sample="g12.s0")),
        ("rollout-0", "generate", 0.0, 1.2, Facts(sample="g121.s0")),
        ("rollout-0", "generate", 0.0, 1.2, Facts(sample="v12.p0.s0")),
        ("reward-0", "score", 0.5, 0.9, Facts(prompts=(4,))),  # before its media
        ("reward-0", "score", 1.3, 1.4, Facts(prompts=(3, 4))),
        ("reward-0", "score", 1.3, 1.5, Facts(prompts=(5,))),
        ("trainer", "train", 2.0, 2.5, Facts(group=12)),
        ("reward-0", "score", 2.6, 2.7, Facts(prompts=(4,))),  # of a later group of its prompt
    ]
    assert spans_of_group(trained, 12, 4) == [0, 4, 6]
    assert spans_of_group(trained, 13, 4) == []
    rejected = [
        ("rollout-0", "generate", 0.0, 1.0, Facts(sample="g12.s0")),
        ("reward-0", "score", 1.3, 1.4, Facts(prompts=(4,))),
        ("rollout-0", "generate", 2.0, 3.0, Facts(sample="g20.s0")),
        ("reward-0", "score", 3.3, 3.4, Facts(prompts=(4,))),
    ]
    assert spans_of_group(rejected, 12, 4, 20) == [0, 1], "none of the next group of its prompt"
    assert spans_of_group(rejected, 12, 4) == [0, 1, 3]
    assert spans_of_group(rejected, 20, 4) == [2, 3]


def test_a_window_over_many_chunks_has_the_spans_of_one_over_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    spans = [(f"rollout-{n % 3}", "generate", 0.1 * n, 0.1 * n + rng.expovariate(1.0)) for n in range(400)]
    whole = store_of(*spans)
    monkeypatch.setattr("omni_async.records.read.rows._CHUNK", 7)
    chunked = store_of(*spans)
    for start, end in ((0.0, 50.0), (11.0, 12.0), (39.0, 45.0), (-9.0, -1.0), (17.3, 17.4)):
        boxes = [store.window(start, end, 0, 3, 20, 1000).boxes for store in (whole, chunked)]
        busy = [store.window(start, end, 0, 3, 20, -1).busy for store in (whole, chunked)]
        np.testing.assert_array_equal(*boxes)
        np.testing.assert_array_equal(*busy)


def test_the_newest_spans_are_kept_even_if_the_end_of_the_file_is_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_async.records.read.rows._CHUNK", 10)
    monkeypatch.setattr("omni_async.records.read.spans._MOST_SPANS", 50)
    spans = [SpanLine("rollout-0", "generate", float(n), n + 0.5) for n in range(200)]
    store = SpanStore()
    for part in (spans[170:], spans[:170]):
        store.begin_region()
        store.add(Placed(span, 0, 1) for span in part)
    boxes = store.window(0.0, 300.0, 0, 1, 10, 1000).boxes
    assert boxes is not None and {*boxes["start"]} >= {float(n) for n in range(170, 200)}
    assert len(store) == len(boxes) <= 60 and len(store) + store.forgotten == 200
    assert (store.start, store.end) == (0.0, 199.5)

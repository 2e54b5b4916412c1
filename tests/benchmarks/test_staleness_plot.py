"""Tests the reward curves of the staleness experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.staleness_plan import Cell
from benchmarks.staleness_plot import curves, draw, moving_average, picture
from tests.benchmarks.staleness_world import result


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(1, 12))
def test_the_moving_average_looks_back_over_a_window_that_fills_up(values: list[float], window: int) -> None:
    naive = [np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    np.testing.assert_allclose(moving_average(values, window), naive, atol=1e-9)


def test_curves_meet_at_the_images_that_all_seeds_have() -> None:
    group = [
        result(Cell(2, "none", 0), rewards=(0.0, 0.0, 3.0), images=(10, 20, 30)),
        result(Cell(2, "none", 1), rewards=(1.0, 1.0, 1.0), images=(12, 24, 36)),
    ]
    images, rewards = curves(group)
    assert images.tolist() == [12, 20, 24, 30]
    np.testing.assert_allclose(rewards, [[0.0, 0.0, 0.4, 1.0], [1.0, 1.0, 1.0, 1.0]])


def test_a_panel_per_staleness_with_a_line_per_correction() -> None:
    results = [
        result(Cell(8, "bypass", 0), rewards=(0.0, 1.0)),
        result(Cell(0, "bypass", 0), rewards=(0.25, 0.75)),
        result(Cell(0, "bypass", 1), rewards=(0.75, 1.25)),
        result(Cell(0, "none", 0), rewards=(0.5, 0.5)),
    ]
    figure = picture(results)
    fresh, stale = figure.axes
    assert (fresh.get_title(), stale.get_title()) == ("S = 0", "S = 8")
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["none", "bypass"]
    drawn = [line for line in fresh.get_lines() if line.get_marker() == "None"]
    assert [line.get_ydata().tolist() for line in drawn] == [[0.5, 0.5], pytest.approx([0.5, 0.75])]
    assert all(line.get_xdata().tolist() == [4.0, 8.0] for line in drawn)
    [band] = [band for band in fresh.collections if np.ptp(band.get_paths()[0].vertices[:, 1]) > 0]
    assert band.get_paths()[0].vertices[:, 1].min() == 0.25 and band.get_paths()[0].vertices[:, 1].max() == 1.0
    validation = [(line.get_xdata()[0], line.get_ydata()[0]) for line in stale.get_lines() if line.get_marker() == "D"]
    assert validation == [(0, 0.25), (8, 0.5)]


def test_the_figure_is_a_file(tmp_path: Path) -> None:
    draw([result(Cell(0, "none", 0))], tmp_path / "reward.png")
    with Image.open(tmp_path / "reward.png") as image:
        assert image.format == "PNG" and image.width > image.height > 300

"""Tests that ranks reduce their metrics to those of one rank, however rows are dealt. Four processes over gloo."""

import pytest
import torch

from omni_async.layout import ParallelLayout
from omni_async.training.device import sum_of_rows
from omni_async.training.metrics import Metrics
from tests.training.ranks import on_ranks

WORLD, STEPS = 4, 3
ROWS = (1, 3, 9)  # ranks without any, and ranks with more than others
SEQUENCES = (1, 2, 4)


def reduced(layout: ParallelLayout, number: int) -> dict[str, float]:
    """Reduces `number` rows, of which every rank records those that it is dealt."""
    values = 500 * torch.randn(number, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    mine = list(layout.dealt(number))
    metrics = Metrics(layout)
    if mine:
        own, steps = values[mine], [row % STEPS for row in mine]
        for reduction in ("mean", "max", "absmax", "variance", "ess"):
            metrics.record(reduction, own, reduction)
        for reduction in ("mean", "variance", "ess"):
            metrics.record_by_step(reduction, own, steps, reduction)
    if 0 in mine:  # only where the first row is
        metrics.record("first", own[:1])
    return metrics.reduce(STEPS)


def work(rank: int) -> tuple[dict[tuple[int, int], dict[str, float]], dict[int, list[float]]]:
    layouts = {sequence: ParallelLayout(rank, WORLD, sequence) for sequence in SEQUENCES}
    found = {(sequence, rows): reduced(layout, rows) for sequence, layout in layouts.items() for rows in ROWS}
    own = torch.tensor([1.0, 2.0], dtype=torch.float64)
    sums = {sequence: sum_of_rows(layout, own).tolist() for sequence, layout in layouts.items()}
    assert own.tolist() == [1.0, 2.0]
    return found, sums


def test_rows_count_once_however_they_are_dealt(tmp_path):
    for found, sums in on_ranks(WORLD, tmp_path, work):
        for (sequence, rows), metrics in found.items():
            expected = reduced(ParallelLayout(), rows)
            assert {"mean", "variance", "ess", "first", "mean/step_00"} <= expected.keys()
            assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12), (sequence, rows)
        groups = {sequence: WORLD / sequence for sequence in SEQUENCES}
        assert sums == {sequence: [number, 2.0 * number] for sequence, number in groups.items()}

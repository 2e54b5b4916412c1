"""Tests the data-plane benchmark: what counts as a sample, how results are printed, and all arms once at a tiny size
on a real Ray."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import data_plane
from benchmarks.data_plane import Record, format_size, num_samples, parse_size, table
from benchmarks.data_plane_ours import make_config
from benchmarks.data_plane_work import Source, Tally, in_flight

SIZES = (64, 2**16, 2**20, 2**24, 2**28)


def test_every_payload_carries_its_number_and_is_counted_once() -> None:
    source, tally = Source(5000, count=4), Tally(5000, 6)
    for number in (3, 0, 1, 5, 4):
        tally.take(source.payload(number))
    assert tally.left == 1
    with pytest.raises(RuntimeError, match="sample 4 of 6 arrived twice"):
        tally.take(source.payload(4))
    with pytest.raises(RuntimeError, match="sample 6 of 6 arrived twice, or was never sent"):
        tally.take(source.payload(6))
    with pytest.raises(RuntimeError, match="a payload of 4096 bytes arrived, expected 5000"):
        tally.take(source.payload(2)[:4096])
    tally.take(source.payload(2))
    assert tally.left == 0


def test_a_batch_is_the_payloads_one_after_the_other() -> None:
    source = Source(64, count=8)
    batch = source.batch(12, 4).copy()
    assert batch.shape == (4, 64)
    assert all(np.array_equal(batch[i], source.payload(12 + i)) for i in range(4))
    with pytest.raises(ValueError, match="at least 8 bytes, got 7"):
        Source(7)


@pytest.mark.parametrize("nbytes", SIZES)
def test_runs_fit_every_arm(nbytes: int) -> None:
    """Checks that our arm trains whole updates, and that TransferQueue is given batches of 32."""
    samples, live = num_samples(nbytes), in_flight(nbytes)
    config = make_config(nbytes, samples)
    trainer = config.trainer
    assert trainer.updates * trainer.groups_per_update * config.rollout.group_size == samples
    assert samples % 32 == 0
    assert 32 <= live <= samples
    assert config.buffer.trajectories == config.buffer.groups * config.rollout.group_size == live


@pytest.mark.parametrize(("text", "nbytes"), [("8B", 8), ("64KiB", 2**16), ("1MiB", 2**20), ("16MiB", 2**24)])
def test_sizes_are_read_and_written(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert format_size(nbytes).replace(" ", "") == text


@pytest.mark.parametrize("text", ["", "64", "7B", "1GiB", "xKiB", "-1MiB"])
def test_a_size_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}'"):
        parse_size(text)


def test_the_table_compares_arms_of_the_same_repeat() -> None:
    seconds = {"omni_async": (1.0, 2.0, 1.0), "actor queue": (2.0, 8.0, 3.0)}
    records = [
        Record(arm, 2**20, repeat, 100, took)
        for arm, all_took in seconds.items()
        for repeat, took in enumerate(all_took)
    ]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table(records))
    text = console.export_text()
    assert "100 (50 to 100)" in text
    assert "105 (52 to 105)" in text
    assert "3.00 (2.00 to 4.00)" in text


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--samples", "100"], ["--sizes", "3"]])
def test_wrong_arguments_start_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        data_plane.main(arguments)
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_all_arms_carry_all_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arms, skipped = data_plane.choose_arms()
    assert data_plane.main(["--sizes", "16KiB", "--repeats", "1", "--samples", "128", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_bytes())
    assert [record["arm"] for record in results["records"]] == arms
    assert {"omni_async", "actor queue", "ray.util.queue"} <= set(arms)
    assert all(record["samples"] == 128 and record["seconds"] > 0 for record in results["records"])
    assert results["skipped"] == skipped
    printed = capsys.readouterr().out
    assert "16 KiB, repeat 1 of 1, omni_async:" in printed
    assert ("TransferQueue is left out" in printed) == ("TransferQueue" in skipped)

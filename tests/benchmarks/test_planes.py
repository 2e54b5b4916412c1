"""Tests the benchmarks of the control plane, the data plane and memory at a tiny size, all arms once on a real Ray."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks import buffer_bytes, control_plane, data_plane, load_peak
from benchmarks.control_plane import Roles, Shape, Stopwatch, measure, parse_shape
from benchmarks.data_plane import Record, format_size, num_samples, parse_size, table
from benchmarks.data_plane_ours import make_config
from benchmarks.data_plane_work import Source, Tally, in_flight
from omni_async.control.coordinator import Coordinator
from omni_async.types import LedgerEntry, Prompt


def test_everything_asked_for_is_trained_and_only_once_and_a_record_counts_three_events_for_each_group() -> None:
    entries: list[LedgerEntry] = []
    config = control_plane.make_config(Shape(5, 3, 4), updates=4)
    coordinator = Coordinator(config, "run", [Prompt(0, "a")], [], entries.append)
    asyncio.run(Roles(config, coordinator).play())
    assert sorted(entry.group for entry in entries) == list(range(12))
    assert {entry.event for entry in entries} == {"trained"}
    record = measure(Shape(2, 2, 3), repeat=0, updates=4)
    assert record.samples == 24
    assert record.group_events_per_s == record.samples_per_s == pytest.approx(24 / record.seconds)
    assert 0 < record.coordinator_us == pytest.approx(1e6 * record.coordinator_seconds / 24)


async def test_the_stopwatch_runs_while_a_call_runs_and_not_while_it_waits() -> None:
    class Clerk:
        def __init__(self) -> None:
            self.event = asyncio.Event()

        async def wait(self, what: str) -> str:
            await self.event.wait()
            return what

        async def fail(self) -> None:
            raise LookupError("nothing here")

    clerk = Clerk()
    watch = Stopwatch(clerk)  # type: ignore[arg-type]
    waiting = asyncio.create_task(watch.wait("tea"))
    await asyncio.sleep(0)
    before = watch.seconds
    await asyncio.sleep(0.02)
    assert watch.seconds == before > 0
    clerk.event.set()
    assert await waiting == "tea"
    assert watch.seconds > before
    with pytest.raises(LookupError, match="nothing here"):
        await watch.fail()


def test_the_command_prints_a_table_and_writes_every_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shapes", "1x2x2", "3x2x2", "--repeats", "2", "--samples", "12"]
    assert control_plane.main([*arguments, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_bytes())
    found = [(r["shape"]["engines"], r["repeat"], r["updates"]) for r in results["records"]]
    assert found == [(1, 0, 3), (3, 0, 3), (1, 1, 3), (3, 1, 3)]
    assert results["machine"]["cpus"] >= 1
    printed = capsys.readouterr().out
    assert "group events/s" in printed and "2/2 3x2x2" in printed


# ---- the data plane -----------------------------------------------------------------------------------------------

SIZES = (64, 2**16, 2**20, 2**24, 2**28)


def test_every_payload_carries_its_number_and_is_counted_once_and_a_batch_is_one_after_the_other() -> None:
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


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_shape, text) for text in ("8", "8x2", "0x1x2", "1x1x1", "axbxc")),
        *((parse_size, text) for text in ("", "64", "7B", "1GiB", "xKiB", "-1MiB")),
    ],
)
def test_a_shape_or_a_size_that_makes_no_sense_is_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}'"):
        parse(text)


def test_the_table_compares_arms_of_the_same_repeat() -> None:
    seconds = {"omni_async": (1.0, 2.0, 1.0), "actor queue": (2.0, 8.0, 3.0)}
    records = [Record(arm, 2**20, repeat, 100, seconds[arm][repeat]) for arm in seconds for repeat in range(3)]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(table(records))
    text = console.export_text()
    assert all(numbers in text for numbers in ("100 (50 to 100)", "105 (52 to 105)", "3.00 (2.00 to 4.00)"))


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


# ---- memory -------------------------------------------------------------------------------------------------------

_SMALL = ["--trajectory", "12KiB", "--media", "4KiB", "--updates", "8"]


def test_held_stays_within_the_bound_and_not_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert buffer_bytes.main([*_SMALL, "--max-bytes", "192KiB", "--out", str(tmp_path)]) == 0
    assert "most held 192 KiB, bound 192 KiB: within" in capsys.readouterr().out
    bounded, unbounded = json.loads((tmp_path / "results.json").read_text())["records"]
    for record in (bounded, unbounded):
        assert record["updates"] == 8
        assert max(held for _, held in record["curve"]) == record["counted"], "the coordinator counts what is held"
        assert record["curve"][-1][1] == 0, "nothing is left behind"
    assert unbounded["counted"] > 192 * 2**10
    assert (tmp_path / "buffer_bytes.png").stat().st_size > 0


@pytest.mark.thorough
def test_ranks_that_read_their_shards_take_less(capsys: pytest.CaptureFixture[str]) -> None:
    load_peak.main(["--layers", "2"])  # the ratio of so little is not that of a model
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()[1:5]] == [
        f"{arm:8} rank {rank}" for arm in ("whole", "shards") for rank in (0, 1)
    ]
    assert float(out.splitlines()[-1].removeprefix("shards / whole: ").split()[0]) < 0.9

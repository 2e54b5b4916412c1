"""Tests the benchmark of memory while loading, on a small model."""

from __future__ import annotations

import pytest

from benchmarks.load_peak import main


def test_ranks_that_read_their_shards_take_less(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--layers", "2"])  # the ratio of so little is not that of a model
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines()[1:5]] == [
        f"{arm:8} rank {rank}" for arm in ("whole", "shards") for rank in (0, 1)
    ]
    assert float(out.splitlines()[-1].removeprefix("shards / whole: ").split()[0]) < 0.9


def test_one_rank_shares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--ranks", "1"])
    assert ended.value.code == 2
    assert "expected --layers >= 1 and --ranks >= 2" in capsys.readouterr().err

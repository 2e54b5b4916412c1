"""Tests that ranks which gloo could not connect are started once more, and those with another error are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from benchmarks.ranks import on_ranks


def fail(rank: int, ranks: int, init_method: str, folder: Path, texts: list[str]) -> None:
    """Raises the next of `texts` each time, and nothing once there are none."""
    times = len([*folder.iterdir()])
    (folder / f"{times}").write_text(f"{rank} of {ranks} at {init_method}")
    if times < len(texts):
        raise RuntimeError(texts[times])


@pytest.mark.parametrize(
    ("texts", "started", "error"),
    [
        (["Gloo connectFullMesh failed with ..."], 2, None),
        (["Gloo connectFullMesh failed with ..."] * 2, 2, "connectFullMesh"),
        (["shapes differ"], 1, "shapes differ"),
    ],
)
def test_ranks_that_were_not_connected_are_started_once_more(
    tmp_path: Path, texts: list[str], started: int, error: str | None
) -> None:
    if error is None:
        on_ranks(1, fail, tmp_path, texts)
    else:
        with pytest.raises(ProcessRaisedException, match=error):
            on_ranks(1, fail, tmp_path, texts)
    said = {path.read_text() for path in tmp_path.iterdir()}
    assert len(said) == started, "each with a rendezvous of its own"
    assert all(one.startswith("0 of 1 at file://") for one in said)

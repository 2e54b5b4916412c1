"""Tests that a benchmark's result from elsewhere is shown, or refused in one line; nothing is written but the report,
in its own folder."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from foreign import changed, few, listing, of
from hypothesis import given
from hypothesis import strategies as st

from omni_async.bench.result import Overlap
from omni_async.cli import main


@few(12)
@given(data=st.data())
def test_a_report_of_any_result(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    folder = tmp_path / "overlap"
    folder.mkdir(exist_ok=True)
    written = msgspec.json.encode(data.draw(of(Overlap)))
    (folder / "overlap.json").write_bytes(data.draw(st.just(written) | changed(written)))
    code = main(["bench", "overlap", str(folder), "--report", "--out", str(folder)])
    said = capsys.readouterr()
    assert code in (0, 1, 2) and "Traceback" not in said.err
    assert len(said.err.splitlines()) == (code == 2)
    assert {name.split("/")[0] for name in listing(tmp_path)} == {"overlap"}
    assert set(listing(folder)) <= {"overlap.json", "overlap.md", "overlap.png"}

"""Tests `omni-async report`: one file that holds all it needs, and one line for what is no run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from omni_async.cli import main
from omni_async.commands.report.file import json_in_html, one_file


def test_a_report_is_one_file_that_names_no_other(emulated, tmp_path, capsys):
    out = tmp_path / "new" / "comparison.html"
    assert main(["report", str(emulated), str(emulated), "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    text = out.read_text()
    assert f'"title":{json.dumps(said[0], ensure_ascii=False)}' in text  # the verdict's
    assert said[1].startswith("Emulated: ")
    assert said[2].startswith(f"{out}: 1 run, 1.") and "MiB" in said[2]
    assert f"xdg-open {out}" in said[3]
    assert not re.search(r'<(script|link)\s[^>]*(src|href)="(?!data:)', text) and "default-src 'none'" in text
    assert main(["report", str(emulated)]) == 0 and (emulated / "report.html").is_file()


def test_what_a_run_says_cannot_end_a_script_or_begin_one(emulated):
    evil = "</script><script>alert(1)</script><!-- \u2028"
    assert "<" not in json_in_html({"prompt": evil}) and "\u2028" not in json_in_html({"prompt": evil})
    page = one_file({"title": "</title><script>alert(1)</script>", "sections": [], "runs": []})
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["{tmp}"], "{tmp} is not a run folder: it has no config.yaml"),
        (["{tmp}/gone"], "{tmp}/gone is not a run folder"),
        (["{tmp}/gone", "--out", "{tmp}"], "--out: {tmp} is a folder; name a file in it, such as {tmp}/report.html"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, line, tmp_path: Path, capsys):
    assert main(["report", *(each.format(tmp=tmp_path) for each in arguments)]) == 2
    assert capsys.readouterr().err.startswith(f"omni-async: {line.format(tmp=tmp_path)}")


def test_a_page_that_cannot_be_written_is_said(emulated, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(emulated), "--out", str(tmp_path / "file" / "page.html")]) == 1
    assert "--out: cannot write" in capsys.readouterr().err

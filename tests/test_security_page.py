"""Tests that docs/security.md has the bounds of the code, and names files that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.config.recipe import load_text
from tests.support.places import ROOT

_PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
# Rows of the page's tables, by their first words, and the modules and constants with their bounds.
_BOUNDS = [
    ("recipe, overrides", "config.tree", "_LARGEST_FILE _DEEPEST _LONGEST_CHAIN"),
    ("recipe, overrides", "config.yaml_text", "_MOST_VALUES _LONGEST_NUMBER"),
    ("table", "data.tables", "_LARGEST_FILE _LARGEST_IMAGES"),
    ("table", "data.rows", "LONGEST_LINE DEEPEST"),
    ("table", "data.tables", "_MOST_VALUES _MOST_COLUMNS _MOST_ROWS"),
    ("folder of a table", "data.folders", "_LARGEST_SIDECAR"),
    ("its images", "data.prompts", "_PIXELS_DECODED"),
    ("its images", "data.image_files", "_MAX_PIXELS MAX_IMAGE_BYTES"),
    ("preference file", "data.preferences", "_MAX_PAIRS _MAX_PROMPT_BYTES _MAX_PATH_BYTES"),
    ("its videos and sound", "data.media_files", "_MOST_BYTES"),
    ("model folder", "config.load", "LARGEST_JSON"),
    ("model folder", "config.tensor_files", "_LARGEST"),
    ("model folder", "runtime.preflight.weight_files", "_LARGEST_VOCABULARY"),
    ("checkpoint: files", "checkpoint.folders", "_LARGEST"),
    ("checkpoint: state", "checkpoint.state", "_LARGEST _MOST_VALUES _MOST _LARGEST_MEASURE"),
    ("checkpoint: tensors", "config.tensor_files", "_MOST"),
    ("folder of `sample`", "commands.evaluation.gallery", "_LARGEST_SETTINGS _LARGEST_SCORE"),
    ("profile, benchmark", "performance.profile", "_LARGEST_FILE"),
    ("profile, benchmark", "commands.bench.result", "_LARGEST_FILE"),
    ("profile, benchmark", "config.decoding", "MOST_VALUES"),
    ("run folder", "records.write.files", "LONGEST_LINE MOST_LINES _MOST_MEMORY"),
    ("run folder", "records.read.record", "_MOST_UPDATES _LARGEST_CONFIG"),
    ("run folder", "records.read.trace_file", "_LONGEST"),
    ("run folder", "records.write.summary", "_LARGEST_FILE"),
    ("run folder", "commands.report.pictures", "_MOST_PIXELS _MOST_DECODED _MOST_BYTES"),
    ("run folder", "commands.report.what_it_buys", "_MOST_SIMULATED"),
    ("scorer's answer", "rewards.base", "_LONGEST_TEXT MOST_PARTS LONGEST_NAME"),
    ("kept answer", "rewards.score_file", "_LARGEST"),
    ("answer of a reward server", "rewards.scorers.model_servers", "_LARGEST_ANSWER"),
    ("answer of a judge", "rewards.scorers.judging", "_LONGEST_ANSWER"),
    ("answer of a judge", "rewards.scorers.model_names", "MOST_NAMES"),
    ("request to `serve-reward`", "rewards.wire", "_MOST_SAMPLES _MOST_VALUES"),
    ("request to `watch`", "commands.watch.app", "_LARGEST _LARGEST_SAMPLE"),
    ("request to `watch`", "commands.watch.serve", "_MOST_CONNECTIONS"),
    ("a running job's", "runtime.driver.control_socket", "_LONGEST_REQUEST _PATIENCE_S _MOST_CLIENTS _ANSWER_S"),
    ("Prometheus metrics", "records.write.sinks.prometheus_sink", "_MOST_CLIENTS _PATIENCE_S"),
]


def written(number: float) -> Iterator[str]:
    """Yield the forms of a number on the page."""
    yield f"{number:,.0f}"
    yield f"{number:.0f}"
    yield from (f"{number / 2**power:g} {unit}" for power, unit in ((10, "KiB"), (20, "MiB"), (30, "GiB")))
    yield from (f"{number / 10**6:g} {unit}" for unit in ("MB", "million"))
    yield from (f"{base}^{power}" for base in (2, 10) for power in range(9, 101) if float(base**power) == number)
    yield {10: "ten", 10**6: "a million"}.get(int(number), "?")


@pytest.mark.parametrize(("row", "module", "names"), _BOUNDS)
def test_bounds_of_the_page(row: str, module: str, names: str) -> None:
    rows = "\n".join(line for line in _PAGE.splitlines() if line.startswith(f"| {row}"))
    for name in names.split():
        bound = getattr(import_module(f"omni_async.{module}"), name)
        forms = "|".join(map(re.escape, written(bound)))
        assert re.search(rf"(?<![\d,.^])({forms})(?![\d,.^]\d|\d)", rows), f"no row {row!r} has {name} = {bound}"


def test_named_files_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", _PAGE)
    assert named and all((ROOT / name).exists() for name in named)


def test_the_example_of_a_secret_is_a_recipe() -> None:
    example = _PAGE.partition("```yaml\n")[2].partition("```")[0]
    [scorer] = load_text("model: {pipeline: qwen_image, path: m}\ndata: {prompts: p}\n" + example).reward.scorers
    assert scorer.params == {"url": "https://judge.example", "api_key": "env:JUDGE_KEY"}

"""Tests that docs/security.md states the bounds that the code has, and files that exist."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from tests.config.recipe import load_text
from tests.support.places import ROOT

_ROOT = ROOT
_PAGE = (_ROOT / "docs/security.md").read_text(encoding="utf-8")
# By what begins its row: a phrase of the row, where its number is defined, and the number.
_BOUNDS = [
    ("recipe, overrides", "256 KiB a file", "config.tree._LARGEST_FILE", 2**18),
    ("recipe, overrides", "40,000 values and keys", "config.yaml_text._MOST_VALUES", 40_000),
    ("recipe, overrides", "50 levels", "config.tree._DEEPEST", 50),
    ("recipe, overrides", "1,000 characters a number", "config.yaml_text._LONGEST_NUMBER", 1000),
    ("recipe, overrides", "8 files in a chain", "config.tree._LONGEST_CHAIN", 8),
    ("prompt file", "1 GiB", "data.prompts._LARGEST_FILE", 2**30),
    ("prompt file", "2^20 characters a line", "data.prompts._LONGEST_LINE", 2**20),
    ("its images", "2^30 pixels", "data.prompts._PIXELS_DECODED", 2**30),
    ("its images", "64 million pixels", "data.image_files._MAX_PIXELS", 64_000_000),
    ("its images", "256 MiB encoded", "data.image_files.MAX_IMAGE_BYTES", 2**28),
    ("preference file", "10 million pairs", "data.preferences._MAX_PAIRS", 10**7),
    ("preference file", "2 GiB of prompts", "data.preferences._MAX_PROMPT_BYTES", 2**31),
    ("preference file", "64 KiB a path", "data.preferences._MAX_PATH_BYTES", 2**16),
    ("its videos and sound", "4 GiB decoded", "data.media_files._MOST_BYTES", 2**32),
    ("model folder", "10 MB a JSON file", "config.load.LARGEST_JSON", 10**7),
    ("model folder", "32 MiB a header", "config.tensor_files._LARGEST", 2**25),
    ("model folder", "256 MiB a vocabulary", "runtime.preflight.weight_files._LARGEST_VOCABULARY", 2**28),
    ("checkpoint: files", "64 MiB", "checkpoint.folders._LARGEST", 2**26),
    ("checkpoint: state", "128 MiB", "checkpoint.state._LARGEST", 2**27),
    ("checkpoint: state", "3 million values", "checkpoint.state._MOST_VALUES", 3_000_000),
    ("checkpoint: state", "10^12 a counter", "checkpoint.state._MOST", 10**12),
    ("checkpoint: state", "10^100 a score", "checkpoint.state._LARGEST_MEASURE", 1e100),
    ("checkpoint: tensors", "2 million values a header", "config.tensor_files._MOST", 2_000_000),
    ("folder of `sample`", "64 MiB of settings", "commands.evaluation.gallery._LARGEST_SETTINGS", 2**26),
    ("folder of `sample`", "10^100 a score", "commands.evaluation.gallery._LARGEST_SCORE", 1e100),
    ("profile, benchmark", "10 MB", "performance.profile._LARGEST_FILE", 10**7),
    ("profile, benchmark", "64 MiB", "commands.bench.result._LARGEST_FILE", 2**26),
    ("profile, benchmark", "a million values", "config.decoding.MOST_VALUES", 1_000_000),
    ("run folder", "16 MiB and 500,000 values a line", "records.write.files.LONGEST_LINE", 2**24),
    ("run folder", "300,000 lines", "records.write.files.MOST_LINES", 300_000),
    ("run folder", "100,000 of metrics", "records.read.record._MOST_UPDATES", 100_000),
    ("run folder", "250 MB of memory", "records.write.files._MOST_MEMORY", 250_000_000),
    ("run folder", "64 MiB of `trace.json`", "records.write.timeline._LARGEST_FILE", 2**26),
    ("run folder", "16 MiB of `summary.json`", "records.write.summary._LARGEST_FILE", 2**24),
    ("run folder", "256 KiB of `config.yaml`", "records.read.record._LARGEST_CONFIG", 2**18),
    ("run folder", "50 million pixels and 64 MiB an image", "commands.report.pictures._MOST_PIXELS", 50_000_000),
    ("run folder", "2^29 pixels", "commands.report.pictures._MOST_DECODED", 2**29),
    ("run folder", "6 MB of media", "commands.report.pictures._MOST_BYTES", 6_000_000),
    ("run folder", "500,000 simulated samples", "commands.report.what_it_buys._MOST_SIMULATED", 500_000),
    ("scorer's answer", "2,000 characters of a text", "rewards.base._LONGEST_TEXT", 2000),
    ("scorer's answer", "256 parts", "rewards.base.MOST_PARTS", 256),
    ("scorer's answer", "100 characters a name", "rewards.base.LONGEST_NAME", 100),
    ("kept answer", "256 KiB an entry", "rewards.score_file._LARGEST", 2**18),
    ("answer of a reward server", "64 MiB", "rewards.scorers.model_servers._LARGEST_ANSWER", 2**26),
    ("answer of a judge", "131,072 characters that are parsed", "rewards.scorers.judging._LONGEST_ANSWER", 2**17),
    ("answer of a judge", "1,000 names", "rewards.scorers.model_names.MOST_NAMES", 1000),
    ("request to `serve-reward`", "1024 samples", "rewards.wire._MOST_SAMPLES", 1024),
    ("request to `serve-reward`", "20,000 of a prompt's metadata", "rewards.wire._MOST_VALUES", 20_000),
    ("request to `watch`", "16 KiB a body", "commands.watch.app._LARGEST", 2**14),
    ("request to `watch`", "256 connections", "commands.watch.serve._MOST_CONNECTIONS", 256),
    ("request to `watch`", "64 MiB each", "commands.watch.app._LARGEST_SAMPLE", 2**26),
    ("a running job's", "64 KiB at most", "runtime.driver.control_socket._LONGEST_REQUEST", 2**16),
    ("a running job's", "within ten seconds", "runtime.driver.control_socket._PATIENCE_S", 10.0),
    ("a running job's", "64 clients at once", "runtime.driver.control_socket._MOST_CLIENTS", 64),
    ("a running job's", "waits 30 s", "runtime.driver.control_socket._ANSWER_S", 30.0),
    ("Prometheus metrics", "16 at once", "records.write.sinks.prometheus_sink._MOST_CLIENTS", 16),
    ("Prometheus metrics", "ten seconds each", "records.write.sinks.prometheus_sink._PATIENCE_S", 10.0),
]


@pytest.mark.parametrize(("row", "phrase", "name", "number"), _BOUNDS)
def test_a_bound_of_the_page_is_that_of_the_code(row: str, phrase: str, name: str, number: float) -> None:
    rows = [line for line in _PAGE.splitlines() if line.startswith(f"| {row}")]
    assert any(phrase in line for line in rows), f"no row {row!r} has {phrase!r}"
    module, _, constant = name.rpartition(".")
    assert getattr(import_module(f"omni_async.{module}"), constant) == number


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", _PAGE))
    assert len(named) > 30
    assert not [name for name in named if not (_ROOT / "omni_async" / name).is_file() and not (_ROOT / name).is_file()]


def test_the_example_of_a_secret_is_a_recipe() -> None:
    example = _PAGE.partition("```yaml\n")[2].partition("```")[0]
    scorer = load_text(
        f"model: {{pipeline: qwen_image, path: model}}\ndata: {{prompts: p.txt}}\n{example}"
    ).reward.scorers[0]
    assert scorer.params == {"url": "https://judge.example", "api_key": "env:JUDGE_KEY"}

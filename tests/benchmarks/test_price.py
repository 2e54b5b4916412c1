"""Tests the plain loop, and its comparison with the quickstart."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.price import Run, Tree, table

PLAIN = Path("benchmarks/plain_loop.py")


def test_the_plain_loop_imports_nothing_of_ours() -> None:
    found: set[str] = set()
    for node in ast.walk(ast.parse(PLAIN.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or ".").partition(".")[0])
    ours = {"omni_async", "omni_async_pipelines", "benchmarks", "recipes", "tests", "."}
    assert "diffusers" in found and not found & ours


def test_ratios_are_medians_over_pairs_of_runs() -> None:
    plain = [Run(seconds, 10, 5, 100, 100 / seconds, 2**30, 0.2, 0.9) for seconds in (1.0, 2.0, 4.0)]
    others = [Run(seconds, 20, 5, 100, 100 / seconds, 2**31, 0.2, 0.8) for seconds in (3.0, 4.0, 4.0)]
    lines = table({"plain": plain, "vllm_omni": others})
    assert lines[0] == "| medians | plain | vllm_omni |"
    assert "| training_cpu_s | 2 | 4 (2.00 x) |" in lines and "| last_reward | 0.9 | 0.8 |" in lines
    assert "| peak_memory_bytes | 1.00 GiB | 2.00 GiB (2.00 x) |" in lines


def test_a_tree_keeps_the_seconds_of_children_that_ended() -> None:
    work = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); print('ended', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        tree = Tree(process.pid)
        process.stdout.readline()
        before = tree.cpu_s()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ended\n"
        assert tree.cpu_s() >= before >= 0.2
        process.stdin.close()
    tree.stop()


@pytest.mark.thorough
def test_the_plain_loop_trains() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.plain_loop", "--updates=1"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["images"] == 90 + 48 + 90 and 0.1 < found["first_reward"] < 0.5
    assert 0 < found["training_cpu_s"] < found["cpu_s"]

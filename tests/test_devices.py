"""Tests that nothing is written for one maker's accelerators: torch.accelerator has what devices have in common."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE
from tests.support.places import ROOT

# Namespaces and libraries that torch has for one maker each.
_OF_ONE_MAKER = re.compile(r"\b(cuda|nccl|hccl|xccl)\b")
_CLASSES = re.compile(r"^ProcessGroup[A-Z]{3,}")


def names_of_one_maker(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of attributes and strings that are one maker's; comments and docstrings do not count."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                if _OF_ONE_MAKER.search(name) or _CLASSES.search(name):
                    yield getattr(node, "lineno", 0), name
            case ast.Constant(value=str(text)):
                if id(node) not in docstrings and _OF_ONE_MAKER.search(text):
                    yield node.lineno, text


def test_no_maker_is_named() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for package in ("omni_async", "pipelines")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in names_of_one_maker(path.read_text())
    }
    assert not found
    for source in ("torch.cuda.synchronize()", "device = f'cuda:{i}'", "import torch.cuda", "dist.ProcessGroupNCCL"):
        assert [*names_of_one_maker(source)], source


# What a machine may lack that has torch, a GPU and the packages that docs/devices.md names.
LACKS = ["ray", "vllm", "vllm_omni", "mlflow", "rapidocr", "onnxruntime", "rapidfuzz", "av", "soundfile", "playwright"]
COLLECT = (
    "import runpy, sys; sys.modules.update(dict.fromkeys({lacks})); runpy.run_module('pytest', run_name='__main__')"
)


@pytest.mark.thorough
def test_gpu_tests_need_no_ray() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [arguments] = re.findall(r"-m pytest (-m gpu .*)", makefile)
    command = f'{sys.executable} -c "$COLLECT" --collect-only {arguments.replace("$$", "$")}'
    environment = os.environ | {"COLLECT": COLLECT.format(lacks=LACKS)}
    done = subprocess.run(
        command, shell=True, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    files = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py")}
    skipped = re.compile(rf'(importorskip|find_spec)\("({"|".join(LACKS)})"')
    expected = {path for path, text in files.items() if ".mark.gpu" in text and not skipped.search(text)}
    found = {ROOT / line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == expected - {Path(__file__)}

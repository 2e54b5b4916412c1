"""Tests that the framework and its families are written for accelerators of any maker: what is one maker's alone stands
in the modules listed here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Namespaces and libraries that torch has for one maker each.
_OF_ONE_MAKER = re.compile(r"\b(cuda|nccl|hccl|xccl)\b")
_CLASSES = re.compile(r"^ProcessGroup[A-Z]{3,}")
# Modules that may name them, and why: none does. What devices have in common is in torch.accelerator, and collectives
# are found under the device's type.
LISTED: frozenset[str] = frozenset()


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


@pytest.mark.parametrize("package", ["omni_async", "pipelines"])
def test_no_module_is_written_for_one_makers_devices(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in LISTED
        for line, text in names_of_one_maker(path.read_text())
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.synchronize()",
        "x.cuda()",
        "device = 'cuda'",
        "device = f'cuda:{i}'",
        "backend = 'cpu:gloo,cuda:nccl'",
        "from torch import cuda",
        "import torch.cuda",
        "dist.ProcessGroupNCCL",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert [*names_of_one_maker(source)]


def test_the_check_leaves_comments_and_docstrings_alone() -> None:
    assert not [*names_of_one_maker('"""Runs on cuda."""\n# nccl too\ndef f():\n    """On cuda."""\n    g()')]

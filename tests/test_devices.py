"""Tests that nothing is written for one maker's accelerators: torch.accelerator has what devices have in common."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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


def test_no_module_is_written_for_one_makers_devices() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for package in ("omni_async", "pipelines")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in names_of_one_maker(path.read_text())
    }
    assert not found


def test_the_check_finds_code_and_leaves_comments_and_docstrings_alone() -> None:
    for source in (
        *("torch.cuda.synchronize()", "x.cuda()", "device = 'cuda'", "device = f'cuda:{i}'", "import torch.cuda"),
        *("backend = 'cpu:gloo,cuda:nccl'", "from torch import cuda", "dist.ProcessGroupNCCL"),
    ):
        assert [*names_of_one_maker(source)], source
    assert not [*names_of_one_maker('"""Runs on cuda."""\n# nccl too\ndef f():\n    """On cuda."""\n    g()')]

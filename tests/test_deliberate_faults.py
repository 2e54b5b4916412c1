"""Tests that the deliberate faults still fit the tree, without running the tests that catch them."""

from __future__ import annotations

import ast

from tests.deliberate_faults import FAULTS
from tests.support.places import ROOT


def test_every_fault_changes_one_place_and_names_tests_that_exist() -> None:
    for fault in FAULTS:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        assert source.count(fault.before) == 1, fault
        ast.parse(source.replace(fault.before, fault.after))  # a test would notice any syntax error
        missing = [name for name in fault.tests.split() if not (ROOT / "tests" / name).exists()]
        assert fault.after != fault.before and not missing, (fault, missing)

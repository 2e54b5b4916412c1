"""Tests that spans of versions are the list of versions they stand for, in fewer numbers."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.types import VersionSpans

versions = st.lists(st.integers(0, 3), max_size=20)


@given(versions, versions, st.integers(0, 25), st.integers(0, 25))
def test_spans_equal_their_list(made_of: list[int], other: list[int], start: int, size: int) -> None:
    spans = VersionSpans.of(made_of)
    assert [*spans] == made_of
    assert len(spans) == spans.num_steps == len(made_of)
    assert bool(spans) == bool(made_of)
    if made_of:
        assert spans.first == made_of[0]
        assert VersionSpans.same(made_of[0], size) == VersionSpans.of([made_of[0]] * size)
    assert (spans == VersionSpans.of(other)) == (made_of == other)
    assert spans.of_steps(range(start, start + size)) == VersionSpans.of(made_of[start : start + size])
    assert msgspec.json.decode(msgspec.json.encode(spans), type=VersionSpans) == spans
    changes = sum(a != b for a, b in pairwise(made_of))
    assert len(spans.spans) == (changes + 1 if made_of else 0), "they cost two numbers per change"


@pytest.mark.parametrize(
    ("spans", "why"),
    [(((1, 0),), "no steps"), (((1, 2), (2, -1)), "no steps"), (((1, 2), (1, 3)), "the same version")],
)
def test_wrong_spans(spans, why):
    with pytest.raises(ValueError, match=why):
        VersionSpans(spans)
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.json.decode(msgspec.json.encode({"spans": spans}), type=VersionSpans)
    with pytest.raises(IndexError):
        _ = VersionSpans().first

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
def test_they_are_the_list_that_they_were_made_of(made_of: list[int], other: list[int], start: int, size: int) -> None:
    spans = VersionSpans.of(made_of)
    assert [*spans] == made_of
    assert len(spans) == spans.num_steps == len(made_of)
    assert bool(spans) == bool(made_of)
    if made_of:
        assert spans.first == made_of[0]
    assert (spans == VersionSpans.of(other)) == (made_of == other)
    assert spans.of_steps(range(start, start + size)) == VersionSpans.of(made_of[start : start + size])
    assert msgspec.json.decode(msgspec.json.encode(spans), type=VersionSpans) == spans
    changes = sum(a != b for a, b in pairwise(made_of))
    assert len(spans.spans) == (changes + 1 if made_of else 0), "they cost two numbers per change"


@pytest.mark.parametrize("num_steps", [0, 1, 10_000])
def test_one_version_is_one_span_however_many_steps_it_took(num_steps: int) -> None:
    assert VersionSpans.same(7, num_steps) == VersionSpans.of([7] * num_steps)
    assert len(VersionSpans.same(7, num_steps).spans) <= 1


@pytest.mark.parametrize(
    ("spans", "why"),
    [(((1, 0),), "no steps"), (((1, 2), (2, -1)), "no steps"), (((1, 2), (1, 3)), "the same version")],
)
def test_spans_that_stand_for_no_list_or_could_be_shorter_are_refused(spans, why):
    with pytest.raises(ValueError, match=why):
        VersionSpans(spans)
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.json.decode(msgspec.json.encode({"spans": spans}), type=VersionSpans)


def test_no_steps_have_no_version() -> None:
    with pytest.raises(IndexError):
        _ = VersionSpans().first

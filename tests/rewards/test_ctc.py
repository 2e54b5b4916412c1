from __future__ import annotations

from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.rewards.ocr import text_probability


def by_enumeration(frames: np.ndarray, text: tuple[int, ...]) -> float:
    """Sums over every path whose collapse (repeats merged, blank 0 removed) is the text."""
    total = 0.0
    for path in product(range(frames.shape[1]), repeat=len(frames)):
        if tuple(k for k, _ in groupby(path) if k != 0) == text:
            total += float(np.prod([frames[t, k] for t, k in enumerate(path)]))
    return total


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.lists(st.integers(1, 2), min_size=1, max_size=4))
def test_equals_the_sum_over_all_paths(seed: int, num_frames: int, text: list[int]) -> None:
    frames = np.random.default_rng(seed).dirichlet(np.ones(3), size=num_frames)
    got = text_probability(frames, [[c] for c in text], [0])
    assert got ** len(text) == pytest.approx(by_enumeration(frames, tuple(text)), abs=1e-12)


def test_entries_of_one_character_add_up() -> None:
    frames = np.array([[0.2, 0.5, 0.3]])
    assert text_probability(frames, [[1, 2]], [0]) == pytest.approx(0.8)


def test_a_text_longer_than_the_frames_has_probability_zero() -> None:
    assert text_probability(np.full((2, 3), 1 / 3), [[1], [2], [1]], [0]) == 0.0
    assert text_probability(np.full((2, 3), 1 / 3), [[1], [1]], [0]) == 0.0  # a repeat needs a blank between

"""Tests recipes made to exhaust their reader: each ends in one line, soon."""

from __future__ import annotations

import time

import pytest
from recipe import MINIMAL, complaint, load_text

_NESTED = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
_MERGED = [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n".join(["a0: &a0 [x]", *_NESTED]), "more than 20000 values, aliases counted wherever they stand"),
        (
            "\n".join(["a0: &a0 {x: 1}", *_MERGED]),
            "could not determine a constructor for the tag 'tag:yaml.org,2002:merge'",
        ),
        ("run: {seed: 1" + ":1" * 120_000 + "}", "a number of 240001 characters"),
        ("run: {seed: 1" + ":1" * 400 + ".5}", "a value does not fit its type: OverflowError"),
        ("a: " + "[" * 200_000, "nested too deeply"),
        ("a: {" * 60_000, "nested too deeply"),
        ("#" * 2**18 + "\n", "larger than 262144 bytes, so no recipe"),
        ("run: " + "ü" * 2**17 + "\n", "larger than 262144 bytes, so no recipe"),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor for the tag"),
        ("run: !!python/object/new:os.system [ls]", "could not determine a constructor for the tag"),
    ],
    ids=[
        "aliases",
        "merges",
        "base 60",
        "base 60 float",
        "lists",
        "mappings",
        "large",
        "large in bytes",
        "apply",
        "new",
    ],
)
def test_a_recipe_that_would_take_all_time_or_memory_is_refused(text: str, said: str) -> None:
    started = time.process_time()
    assert said in complaint(text)
    assert time.process_time() - started < 10


def test_aliases_in_moderation_are_fine() -> None:
    assert load_text(MINIMAL + "\nrollout: {sampling: {height: &side 64, width: *side}}\n").rollout.sampling.width == 64

"""Builds each scorer's small checkpoint once."""

import functools

import pytest
import torch

from tests.rewards.scorer_world import BUILDERS


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(name)`: the files of a built-in scorer, in a folder that no test changes."""

    @functools.cache
    def built(build):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build(tmp_path_factory.mktemp("scorer") / "tiny")

    return lambda name: built(BUILDERS[name])

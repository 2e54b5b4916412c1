"""Starts reward servers that end with the test."""

import contextlib

import pytest

from tests.rewards.server.serving_world import asking, served, write_scorers


@pytest.fixture
def serve(tmp_path):
    """`serve(scorers, tell, reward, settings of the server)`: the address of a server of these scorers."""
    with contextlib.ExitStack() as stack:

        def start(*scorers, tell=lambda text: None, **settings):
            return stack.enter_context(served(write_scorers(tmp_path, *scorers, **settings), tell))

        yield start


@pytest.fixture
def client():
    """`client(url, settings)`: a blocking `score` of the scorer `http`."""
    with contextlib.ExitStack() as stack:
        yield lambda *urls, **params: stack.enter_context(asking(*urls, **params))

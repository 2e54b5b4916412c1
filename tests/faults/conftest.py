"""Provides the tiny model of the end-to-end tests."""

from tests.e2e.conftest import checkpoint

__all__ = ["checkpoint"]

"""Gives the version of omni_async without importing anything."""

__version__ = "0.1.0"

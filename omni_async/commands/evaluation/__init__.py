"""Implements `omni-async sample` and `omni-async eval`: what a model draws, and what several make of the same noise."""

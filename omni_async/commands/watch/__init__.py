"""Implements `omni-async watch`: the live page of a run."""

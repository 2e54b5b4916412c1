"""Implements `omni-async watch`: the page of a run, live."""

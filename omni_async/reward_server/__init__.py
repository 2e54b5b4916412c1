"""Serves scorers over HTTP, for the scorer `http` of runs elsewhere: `omni-async serve-reward`."""

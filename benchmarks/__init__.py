"""Experiments on the whole system, each one a command: `python -m benchmarks.<name> --help`."""

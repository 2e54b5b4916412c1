"""Finds this project's parts, and parts that installed packages register as entry points, by name. Imports no torch.

`families` are model families, `programs` rollout programs, `services` roles of other packages, and `backends` trainer
backends. `entry_points` does the search for all of them.
"""

"""Finds by name the parts that this project has and that installed packages register as entry points. Imports no torch.

`families` are model families, `programs` rollout programs, `services` roles of other packages, `backends` trainer
backends; `entry_points` does the search for all of them.
"""

"""Measures a recipe: the schedules side by side, and the parts of their difference.

`command` is `omni-async bench`. `run_overlap` plans the runs (plan.py), runs each (overlap.py), measures its folder
(measure.py), and compares the arms (comparison.py); table.py, page.py and figure.py show the `Overlap` of result.py,
whose `describe_machine` is part of every result.
"""

"""Contains the objectives, pure functions that `omni_async.algorithms.registry` lists.

Functions in `transition` take the `TransitionInputs` of base.py, functions in `forward` its `ForwardInputs`; all return
an `ObjectiveOutput`.
"""

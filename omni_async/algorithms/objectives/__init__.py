"""Contains the objectives, pure functions that `omni_async.algorithms.registry` lists.

Those in `transition` take the `TransitionInputs` of base.py, those in `forward` its `ForwardInputs`; all return an
`ObjectiveOutput`.
"""

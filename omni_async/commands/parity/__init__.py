"""Compares a model family with its upstream pipeline, and rollout engines with the trainer's arithmetic.

`omni-async parity FAMILY|RECIPE` prints a table of what was measured beside the most that is allowed. `case.Case` says
what a family is compared on (a `families.PipelineFamily` names its own); `model` compares the policy with diffusers'
pipeline, `engine` an engine with the policy, and `layers` finds where two denoisers part.
"""

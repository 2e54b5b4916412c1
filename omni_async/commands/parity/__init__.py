"""Compares a model family with its upstream pipeline, and rollout engines with the trainer's arithmetic.

`omni-async parity FAMILY|RECIPE` prints a table of measured values next to their bounds. `case.Case` describes the
basis of a family's comparison (a `families.PipelineFamily` names its own). `model` compares the policy with diffusers'
pipeline, `engine` an engine with the policy, and `layers` finds the first difference between two denoisers. `tokens`
compares policies and engines that draw tokens with transformers' model.
"""

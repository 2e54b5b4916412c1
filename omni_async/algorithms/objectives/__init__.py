"""Objectives. Importing this package registers them."""

from omni_async.algorithms.objectives import flow_grpo

__all__ = ["flow_grpo"]

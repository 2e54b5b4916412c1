"""Estimates the memory that each role of a recipe takes on an accelerator, and the memory of the hosts.

Models are built without weights on the meta device, from a checkpoint's configuration files or from a published
model's. `estimate.estimate` runs one step of each role there and counts live tensors; `verdict.judge` compares the
result with a device. Nothing here needs an accelerator or a checkpoint.
"""

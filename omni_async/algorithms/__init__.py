"""Defines the training objectives: pure tensor functions, and tables that import no torch.

`registry.find_objective` finds an `Objective`, `kinds.find_kind` the `Kind` of its rows. `validation.problems` refuses
recipes that cannot work, `advantages.aggregate_advantages` turns rewards into advantages, `correction.correct` corrects
for stale samples, and `objectives` contains the losses.
"""

"""Says what a policy is trained on, and by which loss: pure tensor functions, and tables that import no torch.

`registry.find_objective` and `kinds.find_kind` find an `Objective` and what rows of its `Kind` have in common,
`validation.problems` refuses recipes that cannot work, `advantages.aggregate_advantages` turns rewards into
advantages, `correction.correct` corrects for stale samples, and `objectives` holds the losses.
"""

"""Says what a policy is trained on, and by which loss: pure tensor functions, and tables that import no torch.

`registry.find_objective` and `kinds.find_kind` find objectives and what their rows have in common,
`validation.problems` refuses recipes that cannot work, `aggregation.aggregate_advantages` turns rewards into
advantages, `correction` corrects for stale samples, and `objectives` holds the losses.
"""

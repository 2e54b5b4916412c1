"""Finds errors in a recipe before anything heavy starts, and the checkpoint to resume from. Imports no torch.

- `check.preflight` turns a `Config` into `omni_async.roles.inputs.RunInputs` or raises a ConfigError of one line.
- `resume` finds the checkpoint to begin from.
- `scorers.try_scorers` lets a recipe's scorers score one sample, for `omni-async check`.
- `listing.listing` implements `omni-async list`.
"""

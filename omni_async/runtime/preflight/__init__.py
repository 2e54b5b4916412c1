"""Finds what is wrong with a recipe before anything heavy starts, and where its run goes on. Imports no torch.

`check.preflight` turns a `Config` into `omni_async.roles.inputs.RunInputs` or raises a ConfigError of one line;
`resume` finds the checkpoint to begin from; `scorers.try_scorers` lets a recipe's scorers score one sample, for
`omni-async check`, and `listing.listing` is `omni-async list`.
"""

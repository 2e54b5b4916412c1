"""Turns samples into rewards, with scorers that are foreign code and may fail in any way.

`base.Scorer` is what a scorer is; registry.py finds one by name and checks its parameters; `LoadedReward` holds a
recipe's scorers. A `panel.Panel` asks them side by side, each in batches of its own and behind a `guard` that waits for
one that is down, and returns a score or a `Failure`. A `Probe` of synthetic media finds a scorer that always fails:
`WrongScorer`. One file per scorer that is built in; `model_servers` asks those that are elsewhere.
"""

"""Turns samples into rewards, with scorers that are foreign code and may fail in any way.

`base.Scorer` is what a scorer is; registry.py finds one by name and checks its parameters; `WeightedScorer` is the
recipe's sum of them; a `guard.Panel` calls them, waits for those that are down, and returns scores, or a `Failure`. A
`Probe` of synthetic media finds a scorer that always fails: `WrongScorer`. `ocr`, `jpeg_size` and `motion_smoothness`
are built in.
"""

"""Turns samples into rewards, with scorers that are foreign code and may fail in any way.

`Scorer` (base.py) is what a scorer is; registry.py finds one by name and checks its parameters; `WeightedScorer`
(composition.py) is the recipe's sum of them; guard.py calls them and waits for those that are down; failures.py makes
their exceptions safe to keep, as base.py their answers. `ocr`, `jpeg_size` and `motion_smoothness` are built in.
"""

"""Turns samples into rewards, with scorers that are foreign code and may fail in any way.

- `base.Scorer` is the base class of scorers; registry.py finds a scorer by name and checks its parameters.
- `LoadedReward` holds a recipe's scorers; each built-in scorer has one file, and `model_servers` calls remote models.
- `panel.Panel` calls the scorers concurrently, each in its own batches, and returns a score or a `Failure`.
- Each scorer has a `guard`, which waits while the scorer is down.
- A `Probe` of synthetic media detects a scorer that always fails: `WrongScorer`.
"""

"""Turns samples into rewards, with scorers that are foreign code and may fail in any way.

- `base.Scorer` is the base class of scorers; registry.py finds a scorer by name and checks its parameters.
- `LoadedReward` holds a recipe's scorers. `scorers` has a file for each built-in scorer; `scorers.model_servers` calls
  remote models.
- `panel.Panel` calls the scorers concurrently, each in its own batches, and returns an `Answer`: a score or an error.
- `calls.ScorerCalls` calls a scorer with a time-out; `health.ScorerHealth` waits while the scorer is down.
- A `Probe` of synthetic media detects a scorer that always fails: `WrongScorer`.
"""

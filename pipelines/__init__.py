"""Contains the rollout pipelines, one package for each model family.

What the engine runs, and what trains its transformer."""

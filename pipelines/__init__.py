"""Contains the rollout pipelines, one package for each model family: what the engine runs, and what trains its
transformer."""

"""Searches, on the simulator, for the best staleness, buffers and split of devices for a recipe.

- `tuning.tune` searches and returns a `Tuned`; `omni_async.commands.tune` is `omni-async tune`.
- `keys` has the chosen keys and their values; `search` runs simulations, each once.
- `report` and `plot` show the result.

Imports no torch and no Ray.
"""

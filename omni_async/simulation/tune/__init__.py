"""Searches, on the simulator, for the staleness, the buffers and the split of devices that a recipe should have.

`tuning.tune` searches and returns a `Tuned`; `command` is `omni-async tune`. Beneath them: `keys` (what is chosen),
`search` (simulations, each once), and what is said and written: `report`, `plot`. Imports no torch and no Ray.
"""

"""Turns a YAML file and command-line overrides into one validated `Config`, quickly: imports neither torch nor Ray.

- `load` reads a file (see `load.py`), `of_tree` takes a recipe in memory, `of_model` a model without a recipe.
  Each mistake is a `ConfigError` of one line.
- `check` names the first combination that cannot work.
- `with_spec` and `with_settings` decode the sections defined by a model family and an objective.
- `resolved_yaml` writes a configuration that `load` reads back.

The keys are in `schema.py`, `rollout.py`, `reward.py`, `trainer.py` and `algorithm.py`.
"""

from omni_async.config.checks import check
from omni_async.config.load import load, of_model, of_tree, resolved_yaml, with_settings, with_spec
from omni_async.config.schema import Config
from omni_async.config.yaml_text import ConfigError

__all__ = [
    "Config",
    "ConfigError",
    "check",
    "load",
    "of_model",
    "of_tree",
    "resolved_yaml",
    "with_settings",
    "with_spec",
]

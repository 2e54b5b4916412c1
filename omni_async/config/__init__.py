"""Turns a YAML file and command-line overrides into one validated `Config`. Imports neither torch nor Ray, so it is
instant."""

from omni_async.config.checks import check
from omni_async.config.load import load, resolved_yaml, with_settings, with_spec
from omni_async.config.schema import Config
from omni_async.config.yaml_text import ConfigError

__all__ = ["Config", "ConfigError", "check", "load", "resolved_yaml", "with_settings", "with_spec"]

"""Names the emulated parts of a run, so that no reader takes their times and rewards for real ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_async.config.reading import read_file
from omni_async.config.redact import one_line, redact_text
from omni_async.records.read.record import run_config
from omni_async.records.write.rundir import RunDirectory
from omni_async.types import finite

_LONGEST = 60  # characters of a profile's name
_LARGEST_CONFIG = 2**18  # bytes
# In the text of a run's config.yaml, which takes 20 ms to parse.
_MAY_BE = re.compile(rb"^emulation:(?! null$)|engine: emulated", re.MULTILINE)


def emulated(config: Mapping[str, Any]) -> str:
    """Return which parts of a run are emulated, as a sentence without its full stop; empty if all parts are real.

    config: a recipe as plain data, as in the run's config.yaml; its values may have any type."""
    emulation, rollout = config.get("emulation"), config.get("rollout")
    if isinstance(emulation, Mapping):
        profile, scale = emulation.get("profile"), finite(emulation.get("time_scale", 1))
        name = redact_text(profile).rpartition("/")[2].removesuffix(".json") if isinstance(profile, str) else ""
        factor = "" if scale is None or scale == 1 else f" x {scale:g}"
        times = f"the times of profile {one_line(name, _LONGEST)}{factor}"
        return f"Emulated: engines, scorers and trainer take {times}; rewards are random"
    if isinstance(rollout, Mapping) and rollout.get("engine") == "emulated":
        return "Emulated engines: they run no model, and take the times of rollout.emulated"
    return ""


def emulated_run(folder: Path) -> str:
    """Return the sentence of `emulated` for the run in a folder; empty if its config.yaml cannot be read, too."""
    run = RunDirectory(folder)
    try:
        content = read_file(run.config_yaml, _LARGEST_CONFIG, within=folder)
    except (OSError, ValueError):
        return ""
    return emulated(run_config(run, {})) if _MAY_BE.search(content) else ""

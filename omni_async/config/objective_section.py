"""Finds the section that `algorithm.settings` is for an objective of another package."""

from __future__ import annotations

from importlib.metadata import entry_points

from omni_async.config.section import Section
from omni_async.entry_points import load_registered

OBJECTIVES = "omni_async.objectives"


def objective_section(name: str) -> type[Section] | None:
    """Return the section of the objective that another package installed as `name`; None if it brings none.

    Raises ValueError if the package cannot be imported."""
    for point in entry_points(group=OBJECTIVES, name=name):
        section: type[Section] | None = getattr(load_registered(point, object, "algorithm.name"), "settings", None)
        return section
    return None

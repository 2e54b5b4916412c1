"""Shows the configurations of the runs, their differences, and the commands for next steps."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from omni_async.commands.report.blocks import Block, Cell, Commands, Section, Table, Text
from omni_async.commands.report.shown import Shown, flat
from omni_async.config.draws import export_loader
from omni_async.config.redact import redact_text


def configuration(shown: Sequence[Shown]) -> Section:
    """Return the section with every value of every run, and with the differing values."""
    values = [flat(one.run.config) for one in shown]
    keys = [*dict.fromkeys(key for one in values for key in one)]
    rows: list[list[Cell]] = [[key, *(_value(one, key) for one in values)] for key in keys]
    columns = ["key", *(one.label for one in shown)]
    blocks: list[Block] = []
    if len(shown) > 1:
        differing = [row for row in rows if len({*row[1:]}) > 1]
        blocks.append(Table("differences", "What differs", columns, differing))
        if not differing:
            blocks = [Text("The configurations are equal.", "nothing")]
    blocks.append(Table("configuration", "All values", columns, rows, "Defaults included.", searchable=True))
    return Section("configuration", "Configuration", blocks=blocks)


def _value(values: dict[str, Any], key: str) -> str | None:
    if key not in values:
        return None
    value = values[key]
    return redact_text(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def next_steps(shown: Sequence[Shown]) -> Section:
    """Return the section with the commands to continue from here."""
    items: list[tuple[str, str]] = []
    for one in shown:
        run = shlex.quote(str(one.run.path))
        of = f" ({one.label})" if len(shown) > 1 else ""
        if one.run.status == "running":
            items.append((f"omni-async status {run}", f"How it is now{of}"))
            items.append((f"omni-async stop {run}", f"End it, with a checkpoint{of}"))
        if one.run.checkpoints:
            items.append((f"omni-async sample {run} --against base", f"Draw samples, before and after{of}"))
            items.append((f"omni-async eval {run}", f"Compare its checkpoints on the same prompts and seeds{of}"))
            loader = export_loader(one.run.setting("rollout.engine"))
            items.append((f"omni-async export {run} --out exported", f"A model that {loader} loads{of}"))
        if one.run.status in ("killed", "interrupted", "failed") and one.run.checkpoints:
            items.append((f"omni-async train RECIPE checkpoint.resume={run}", f"Go on from its last checkpoint{of}"))
    if not items:
        return Section("next", "What comes next", blocks=[Text("There is no checkpoint to resume from.", "nothing")])
    return Section("next", "What comes next", blocks=[Commands(items)])

"""Describes the control plane between two messages: for checkpoints, `omni-async status` and the metrics of an update.

Pure functions.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async.config.redact import redact_text
from omni_async.control.addresses import Addresses
from omni_async.control.control_state import ControlState
from omni_async.control.group_source import GroupSource
from omni_async.control.group_table import GroupTable
from omni_async.control.record import Record
from omni_async.control.sample_table import SampleTable
from omni_async.control.validation import Validation
from omni_async.control.versions import Versions


def buffer_statistics(groups: GroupTable, samples: SampleTable) -> dict[str, dict[str, Any]]:
    """Return what the bounded buffers hold, by name: slots, replay, trajectories, bytes."""
    return {
        **groups.statistics(),
        "trajectories": msgspec.structs.asdict(samples.statistics()),
        "bytes": msgspec.structs.asdict(samples.bytes.statistics()),
    }


def statistics(groups: GroupTable, samples: SampleTable, versions: Versions, addresses: Addresses) -> dict[str, Any]:
    """Return what buffers hold, how groups ended, and which versions and addresses there are."""
    return {
        "buffers": buffer_statistics(groups, samples),
        "conservation": groups.ledger.counters(),
        "engines": versions.engines(),
        "addresses": {name: redact_text(address) for name, address in addresses.known.items()},
    }


def control_state(
    versions: Versions,
    source: GroupSource,
    groups: GroupTable,
    samples: SampleTable,
    validation: Validation,
    record: Record,
) -> ControlState:
    """Return what a checkpoint keeps, with the groups that wait to be admitted again."""
    unfinished, ready = groups.state()
    unfinished_before, ready_before = source.state()
    return ControlState(
        version=versions.trained,
        next_group=source.next_group,
        images=samples.images,
        validated=validation.done,
        ledger=groups.ledger.state(),
        unfinished=unfinished + unfinished_before,
        ready=ready + ready_before,
        rewards=record.rewards,
        rounds=record.rounds(until=validation.done),
    )

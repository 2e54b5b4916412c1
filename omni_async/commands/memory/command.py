"""Prints the memory of a recipe, for `omni-async check --device`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from omni_async.commands.memory.amounts import GIB, Amount, Estimate
from omni_async.commands.memory.devices import bytes_of_device, shared_devices
from omni_async.commands.memory.verdict import Device, judge, ways_out
from omni_async.config import Config, ConfigError
from omni_async.config.draws import require_latents
from omni_async.roles.plan import require_trainable

_COLUMNS = ("weights", "states", "activations", "decode", "context", "device", "host")


def memory(config: Config, device: str) -> int:
    """Print a recipe's table of memory. Arguments and errors are the same as for `memory_report`.

    Raises:
        ConfigError: also for a recipe that does not fit, after its table."""
    with contextlib.redirect_stdout(sys.stderr):  # the output of a family's module is no part of the table
        text, refusal = memory_report(config, device)
    sys.stdout.write(text + "\n")
    if refusal is not None:
        raise ConfigError(refusal)
    return 0


def memory_report(config: Config, device: str) -> tuple[str, str | None]:
    """Return a recipe's table of memory, and one line on what does not fit; None if everything does.

    Args:
        config: the run's.
        device: the name of an accelerator, or its GiB.

    Raises:
        ConfigError: the device or the model is not known."""
    capacity = bytes_of_device(device)
    if config.emulation is not None:
        raise ConfigError("emulation: an emulated run has no model; remove the section to estimate its memory")
    require_latents(config, "check --device")
    require_trainable(config)
    shared = shared_devices(config)
    if not shared:
        raise ConfigError("--device: the recipe asks for no accelerator; set placement.rollout.gpus and the others")
    from omni_async.commands.memory.estimate import estimate  # imports torch

    found = estimate(config, capacity)
    devices = judge(found.roles, shared, capacity)
    text = "\n".join(_lines(found, devices, device))
    failed = [one for one in devices if not one.fits]
    if not failed:
        text = f"{text}\n\n{_fits(devices, device)}"
    return text, _refusal(failed[0], found.roles, device) if failed else None


def _lines(found: Estimate, devices: Sequence[Device], name: str) -> Iterator[str]:
    yield f"# {found.source}"
    yield from (f"# {one}" for one in found.assumed)
    yield ""
    yield from _aligned([("GiB of one process", *_COLUMNS), *map(_row, found.roles)])
    yield ""
    yield from _aligned(
        [
            (f"device of {devices[0].capacity / GIB:.1f} GiB ({name})", "GiB", "share", ""),
            *(
                (_together(one.roles), _gib(one.nbytes), f"{one.nbytes / one.capacity:.0%}", one.verdict)
                for one in devices
            ),
        ]
    )
    yield ""
    yield from _aligned([("host memory besides", "GiB"), *((s.purpose, _gib(s.nbytes)) for s in found.shared)])
    for one in devices:
        if not one.fits:
            yield ""
            yield f"{_together(one.roles)} gets smaller by:"
            yield from (f"  {way}" for way in ways_out(one, found.roles))


def _row(amount: Amount) -> tuple[str, ...]:
    weights = "unknown" if amount.weights is None else _gib(amount.weights)
    parts = (amount.states, amount.activations, amount.decode, amount.context, amount.device, amount.host)
    return f"{amount.role} x {amount.workers}", weights, *map(_gib, parts)


def _together(roles: Sequence[str]) -> str:
    counted = {role: roles.count(role) for role in roles}
    return " + ".join(role if number == 1 else f"{number} {role}" for role, number in counted.items())


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}" if nbytes else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines, the first column and texts to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell if i == 3 and len(row) == 4 else cell.rjust(widths[i]) for i, cell in enumerate(row) if i > 0]
        yield "  ".join(cells).rstrip()


def _fits(devices: Sequence[Device], name: str) -> str:
    """Return the verdict on devices that all fit, by the fullest of them."""
    fullest = max(devices, key=lambda one: one.nbytes - one.spare)
    unknown = [role for one in devices for role in one.unknown]
    verdict = "fits, as far as the models are known" if unknown else fullest.verdict
    amount = f"{fullest.nbytes / GIB:.1f} of {fullest.capacity / GIB:.1f} GiB"
    return f"{verdict}: the fullest device ({name}) has {_together(fullest.roles)}, {amount}"


def _refusal(device: Device, roles: Sequence[Amount], name: str) -> str:
    ways = "; ".join(ways_out(device, roles)) or "take a larger device"
    return (
        f"--device: {_together(device.roles)} takes {device.nbytes / GIB:.1f} GiB, expected at most"
        f" {device.capacity / GIB:.1f} ({name}); {ways}"
    )

"""Reads and writes profiles: the service times and payload sizes of one job on one kind of machine.

Runs write one (`profile.json`), emulated devices and the simulator replay it, and some built from published figures are
shipped.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from omni_async.config import Config, ConfigError
from omni_async.config.reading import TooLargeError, read_file
from omni_async.config.section import size_text
from omni_async.performance.service import NOTHING, ServiceTime

_SHIPPED = "omni_async.performance.profiles"
_LARGEST_FILE = 10_000_000

Bytes = Annotated[int, Meta(ge=0)]


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of one sample's trajectory, of one sample's media, and of one published version."""

    trajectory: Bytes = 0
    media: Bytes = 0
    weights: Bytes = 0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The service times of one job. Every stage is a `ServiceTime`:

    generate  one engine, a batch of samples (units: samples; at most rollout.max_batch)
    score     one reward worker, a batch of samples (units: samples; at most reward.batch)
    proximal  the trainer, a pass that recomputes a group's log-probs (units: samples of the rank that has most); only
              where the algorithm needs one
    train     the trainer, forward and backward of a group (units: samples of the rank that has most)
    step      the trainer, an optimizer step
    export    the trainer, copying a version out: the part of a publish that blocks it
    publish   a version on its way to the engines, from the copy to staged on all of them (blocks no role)
    swap      an engine pauses to switch
    switch    a device that the roles share passes to the next (unload one, wake the next); with placement.colocated

    `source` says where the numbers are from, `assumed` which of them are not from there."""

    name: str
    source: str
    assumed: str = ""
    generate: ServiceTime
    score: ServiceTime
    proximal: ServiceTime = NOTHING
    train: ServiceTime
    step: ServiceTime = NOTHING
    export: ServiceTime = NOTHING
    publish: ServiceTime = NOTHING
    swap: ServiceTime = NOTHING
    switch: ServiceTime = NOTHING
    payload: Payload = Payload()

    def scaled(self, factor: float) -> Profile:
        """Multiply every service time."""
        stages = {name: value.scaled(factor) for name, value in self.stages().items()}
        return msgspec.structs.replace(self, **stages)

    def stages(self) -> dict[str, ServiceTime]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if isinstance(value, ServiceTime)}


def shipped_profiles() -> list[str]:
    """List the names of the profiles that come with the package."""
    return sorted(
        path.name.removesuffix(".json") for path in resources.files(_SHIPPED).iterdir() if path.name.endswith(".json")
    )


def load_profile(name: str) -> Profile:
    """Load a shipped profile by name, or a file whose name ends in `.json`.

    Raises ConfigError, one line, if there is none, it is not one, or it says that nothing takes time."""
    if name.lower().endswith(".json"):
        return _read(Path(name).expanduser())
    if name not in shipped_profiles():
        raise ConfigError(
            f"emulation.profile: no profile {name!r}; shipped are {', '.join(shipped_profiles())}, or give a file that"
            " ends in .json"
        )
    with resources.as_file(resources.files(_SHIPPED) / f"{name}.json") as path:
        return _read(path)


def require_room(config: Config, payload: Payload) -> None:
    """Raise ConfigError if an update's samples, which are held together, are more than `buffer.max_bytes`."""
    samples = config.trainer.groups_per_update * config.rollout.group_size
    needed = samples * (payload.trajectory + payload.media)
    if config.buffer.bound is not None and config.buffer.bound < needed:
        raise ConfigError(
            f"buffer.max_bytes: the {samples} samples of an update are held together, by the profile"
            f" {size_text(needed)}: expected at least {needed}, got {config.buffer.max_bytes}"
        )


def encode_profile(profile: Profile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"


def write_profile(path: Path, profile: Profile) -> None:
    path.write_bytes(encode_profile(profile))


def is_empty(profile: Profile) -> bool:
    """Return whether every stage takes no time: nothing was measured."""
    return not any(service.mean() for service in profile.stages().values())


def _read(path: Path) -> Profile:
    try:
        profile = msgspec.json.decode(read_file(path, _LARGEST_FILE), type=Profile)
    except TooLargeError as error:
        raise ConfigError(f"emulation.profile: {path}: {error.strerror}, so no profile") from None
    except OSError as error:
        raise ConfigError(f"emulation.profile: {path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "unknown field `assess`" in str(error):
            raise ConfigError(f"emulation.profile: {path}: `assess` is called `proximal` now") from None
        raise ConfigError(f"emulation.profile: {path}: not a profile: {error}") from None
    if is_empty(profile):
        raise ConfigError(
            f"emulation.profile: {path}: every stage takes 0 s, as if nothing had been measured; give the profile of a"
            " run with updates"
        )
    return profile

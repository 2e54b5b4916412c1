"""Defines which samples keep their media after the score, and how many samples and engines hold the same at once.

Scorers read the media of every sample. After the score only the driver reads media, of the few samples that it shows.
"""

from __future__ import annotations

from omni_async.config.schema import Config

# Conditioning of at least this size is stored once for all samples of a prompt that an engine generates. Copying less
# takes no longer than the exchange with the store that another object costs.
SHARED_BYTES = 2**20


def is_shown(config: Config, version: int) -> bool:
    """Return whether the run shows samples of the update that makes `version`; emulated media are noise."""
    shown = version % config.tracking.images_every == 0 or version in (1, config.trainer.updates)
    return config.emulation is None and shown


def spread(total: int, count: int) -> range:
    """Return at most `count` of the positions below `total`, evenly apart."""
    return range(0, total, max(1, total // count))[:count]


def shown_of_group(config: Config, group: int, version: int) -> range:
    """Return the samples of a training group that may be shown, by their numbers in it.

    The update that will train the group is one of the S + 1 after its admission. Its place there is not known yet
    either, so its number determines the place: exactly, unless groups are rejected.

    Args:
        group: its number.
        version: the policy version of its admission."""
    per_update, size = config.trainer.groups_per_update, config.rollout.group_size
    if not any(is_shown(config, version + 1 + later) for later in range(config.staleness.max_updates + 1)):
        return range(0)
    first = group % per_update * size
    shown = spread(per_update * size, config.tracking.images)
    return range(-first % shown.step, min(size, shown.stop - first), shown.step)


def num_shown(config: Config) -> int:
    """Return how many samples of an update are shown, at most."""
    shown = 0 if config.emulation is not None else config.tracking.images
    return min(shown, config.trainer.groups_per_update * config.rollout.group_size)


def num_with_media(config: Config, groups: int) -> int:
    """Return how many samples of `groups` live groups hold media at once: those without a score, and those to show."""
    updates = -(-groups // config.trainer.groups_per_update)
    return min(groups * config.rollout.group_size, config.buffer.trajectories + updates * num_shown(config))


def num_conditionings(config: Config) -> int:
    """Return how often the conditioning of a group's prompt is stored, at most: once by each engine."""
    return min(config.rollout.group_size, len(config.engine_names))

"""Finds the Ray cluster that a job joins: `run.ray_address`, or the variable that Ray's own tools set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from omni_async.config.schema import Run

VARIABLE = "RAY_ADDRESS"  # `ray job submit` sets it for every job


class ClusterAddress(NamedTuple):
    """A cluster's address for `ray.init`, and the key or variable that names it."""

    address: str
    named_by: str


def cluster_address(run: Run, environment: Mapping[str, str] = os.environ) -> ClusterAddress | None:
    """Return the cluster that a run joins. None: it uses no Ray, or starts a local Ray.

    The recipe takes precedence over the environment. Raises ValueError, one line, for the address of a job server."""
    if run.runtime != "ray":
        return None
    if run.ray_address is not None:
        return ClusterAddress(run.ray_address, "run.ray_address")
    address = environment.get(VARIABLE, "").strip()
    if address in ("", "local"):  # Ray's word for a local Ray
        return None
    if address.startswith(("http://", "https://")):
        raise ValueError(
            f"{VARIABLE}: {address} is a job server, expected a cluster such as first-machine:6379; unset it, or set"
            " run.ray_address"
        )
    return ClusterAddress(address, VARIABLE)

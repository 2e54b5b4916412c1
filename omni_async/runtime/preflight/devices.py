"""Finds errors in a recipe's requests for accelerators, before anything starts. Imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from omni_async.accelerator import most_accelerators, vllm_without_cpus
from omni_async.config import Config, ConfigError
from omni_async.config.ray_cluster import ClusterAddress, cluster_address
from omni_async.config.role_table import roles_of
from omni_async.config.section import size_text
from omni_async.plugins.backends import find_backend
from omni_async.runtime.placement import plan_placements

_SHARED_MEMORY = Path("/dev/shm")
_SMALLEST_STORE = 75 * 2**20  # Ray's


def check_shares(config: Config) -> None:
    """Refuse accelerators that an actor would hold and leave idle."""
    users = {"rollout": "an engine", "trainer": "a rank"}
    if config.placement.colocated:  # Ray divides one accelerator, but not several, among actors that want all
        users["reward"] = "a reward worker"
    elif config.rollout.engine == "vllm" and config.run.runtime == "ray":
        del users["rollout"]  # vLLM splits a model over all of its devices
    for role, user in users.items():
        gpus = getattr(config.placement, role).gpus
        if gpus > 1:
            raise ConfigError(
                f"placement.{role}.gpus: {user} uses one accelerator, expected at most 1, got {gpus:g}; raise"
                f" {role}.workers instead"
            )


def check_backend(config: Config) -> None:
    """Refuse settings that the trainer's backend cannot run in one process.

    Without an accelerator, the process computes on the CPU."""
    trainer, found = config.trainer, most_accelerators(kind=config.placement.accelerator)
    if config.run.runtime != "inprocess" or found is None or found[0]:
        return
    try:
        find_backend(trainer.backend, workers=trainer.workers, offload=trainer.offload, on_cpu=True)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_vllm(config: Config) -> None:
    """Refuse vLLM on the CPU if its build has no kernels for CPUs. A machine without vLLM is not checked."""
    if (installed := vllm_without_cpus()) is None:
        return
    on_cpu = [f"reward.servers.{i}.resources" for i, one in enumerate(config.reward.servers) if one.replicas]
    if config.rollout.engine in ("vllm", "vllm_omni") and config.data.preferences is None:
        on_cpu.insert(0, "placement.rollout")
    for key in on_cpu:
        if config.resources[key].gpus == 0:
            instead = "transformers" if config.rollout.engine == "vllm" else "diffusers"
            other = f", or rollout.engine={instead}" * (key == "placement.rollout")
            raise ConfigError(
                f"{key}.gpus: 0 is the CPU, and the installed vLLM {installed} runs on accelerators alone; set"
                f" {key}.gpus=1{other}, or install its CPU build (make clean, then make install EXTRA=cpu)"
            )


def require_accelerators(config: Config) -> None:
    """Refuse a recipe whose roles request more accelerators than this machine has, unless the run joins a cluster."""
    asking = [
        (spec, number, gpus)
        for spec in roles_of(config).values()
        if (gpus := spec.resources(config).gpus) > 0 and (number := len(spec.workers(config)))
    ]
    in_process = config.run.runtime == "inprocess"
    if not asking or (not in_process and _joins_a_cluster(config)):
        return
    found = most_accelerators(kind=config.placement.accelerator)
    # In one process all roles use the same one.
    needed = min(1.0, *(gpus for _, _, gpus in asking)) if in_process else plan_placements(config).gpus
    if found is None or needed <= found[0]:
        return
    have, why = found
    asked = ", ".join(f"{spec.role} {number} x {gpus:g}" for spec, number, gpus in asking)
    keys = " or ".join(f"{spec.section}.gpus" for spec, _, _ in asking)
    elsewhere = "" if in_process else ", or name a cluster that has them with run.ray_address"
    raise ConfigError(
        f"{asking[0][0].section}.gpus: accelerators are asked for ({asked}), but this machine has"
        f" {have or 'none'} ({why}); lower {keys} (0 is the CPU), or the numbers of"
        f" workers{elsewhere}"
    )


def check_object_store(config: Config) -> None:
    """Refuse an object store that Ray cannot create: in another's cluster, too small, or beyond the shared memory."""
    size, key = config.placement.store_bytes, "placement.object_store"
    if size is None:
        return
    asked = config.placement.object_store
    if config.run.runtime != "ray" or joined_cluster(config) is not None:
        raise ConfigError(
            f"{key}: applies to a Ray that the run starts, and it starts none, got {asked}; remove it, or start the"
            " cluster's nodes with `ray start --object-store-memory=BYTES`"
        )
    most = psutil.disk_usage(str(_SHARED_MEMORY)).free if _SHARED_MEMORY.is_dir() else 0
    most = min(most, psutil.virtual_memory().available)
    if not _SMALLEST_STORE <= size <= most:
        raise ConfigError(
            f"{key}: expected 75MiB to {size_text(most)}, which are free in memory and {_SHARED_MEMORY}, got"
            f" {asked}; lower it, or enlarge the shared memory (docker run --shm-size)"
        )


def joined_cluster(config: Config) -> ClusterAddress | None:
    """Return the cluster that the run joins, or None if it starts a Ray. Raises ConfigError."""
    try:
        return cluster_address(config.run)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _joins_a_cluster(config: Config) -> bool:
    """Return whether Ray may have other machines: the run joins a cluster, or this process already has a Ray."""
    return joined_cluster(config) is not None or ("ray" in sys.modules and bool(sys.modules["ray"].is_initialized()))

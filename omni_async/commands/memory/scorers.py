"""Estimates the memory of models that score, in reward workers, pools and model servers.

Weights are counted in the files of a checkpoint, or known for a published model. The memory of a scorer's computation
is unknown without running it. Loads no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from omni_async.commands.memory.amounts import GIB, Amount
from omni_async.config import Config, ConfigError
from omni_async.config.reading import open_file
from omni_async.config.reward import Scorer, Server
from omni_async.config.tensor_files import read_header
from omni_async.rewards import registry
from omni_async.rewards.scorers.pretrained import folder_of
from omni_async.worker import REWARD

# Parameters of published models, by the name of their folder; HPSv3 is listed as its base, Qwen2-VL.
_PUBLISHED = {
    "CLIP-ViT-H-14-laion2B-s32B-b79K": 986_109_441,
    "PickScore_v1": 986_109_441,
    "Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen3-VL-8B-Instruct": 8_767_123_696,
    "larger_clap_general": 193_913_882,
}
_WEIGHTS = ("path", "weights", "head")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_VLLM_SHARE = 0.92  # share of the device that vLLM takes by default for weights and its KV cache
_SHARE = "--gpu-memory-utilization"


def estimate_scorers(config: Config, context: int, device: int) -> Iterator[Amount]:
    """Yield the memory of reward workers, pools and model servers that have accelerators.

    Args:
        config: the run's.
        context: bytes of a process's context.
        device: bytes of a device; model servers take a share of it."""
    reward = config.reward
    if config.placement.reward.gpus > 0 and config.scored:
        weights = _weights([scorer for scorer in reward.scorers if scorer.pool is None])
        yield Amount(role=REWARD, workers=reward.workers, weights=weights, context=context)
    for pool in reward.pools:
        if pool.resources.gpus > 0:
            weights = _weights([scorer for scorer in reward.scorers if scorer.pool == pool.name])
            yield Amount(role=pool.name, workers=pool.workers, weights=weights, context=context)
    for server in reward.servers:
        if server.resources.gpus > 0 and server.replicas:
            yield _server(server, context, device)


def _server(server: Server, context: int, device: int) -> Amount:
    elements = _elements(server.model)
    several = max(1, math.ceil(server.resources.gpus))
    weights = None if elements is None else elements * 2 // several
    share = _share(server)
    cache = max(0, int(share * device) - (weights or 0) - context)
    helps = (f"reward.servers.args: {_SHARE}, less than {share:g} ({share * device / GIB:.1f} GiB)",)
    return Amount(
        role=server.name,
        workers=server.replicas,
        weights=weights,
        states=cache,
        spare=cache,
        context=context,
        helps=helps,
    )


def _share(server: Server) -> float:
    """Return vLLM's share of a device. ConfigError if the argument is invalid."""
    words = [word for one in server.args for word in (one.split("=", 1) if one.startswith("--") else [one])]
    given = dict(pairwise(words)).get(_SHARE, str(_VLLM_SHARE))
    try:
        share = float(given)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(f"reward.servers.args: {_SHARE} of {server.name!r}: expected a number in (0, 1], got {given}")
    return share


def _weights(scorers: list[Scorer]) -> int | None:
    """Return the bytes of the scorers' models; None if any of them is unknown."""
    total = 0
    for scorer in scorers:
        try:
            costs, given = registry.cost_of(scorer), registry.arguments_of(scorer)
        except ValueError:
            return None  # of a package that is not installed here
        if costs != "model":
            continue
        counts = [_elements(str(given[name])) for name in _WEIGHTS if given.get(name) is not None]
        known = [count for count in counts if count is not None]
        if not known:
            return None
        total += max(known) * _BYTES.get(str(given.get("dtype")), 4)
    return total


def _elements(path: str) -> int | None:
    """Return the number of elements in a checkpoint's folder or file; None if unknown."""
    folder = folder_of(path)
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    counts = [_count(file) for file in files if file.suffix == ".safetensors"]
    return sum(counts) or _PUBLISHED.get(folder.name)


def _count(file: Path) -> int:
    """Return the number of elements of a file's tensors; 0 if the file is damaged, which preflight refuses."""
    try:
        with open_file(file) as opened:
            return sum(math.prod(one.shape) for one in read_header(opened, file.stat().st_size).tensors.values())
    except (OSError, ValueError):
        return 0

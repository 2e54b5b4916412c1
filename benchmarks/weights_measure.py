"""Runs the arms of the weight benchmark on Ray actors, in turns within every repeat.

A busy moment of the machine thus affects all arms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import ray

from benchmarks.local_ray import WAITING_CALLS, local_ray
from benchmarks.weights_model import SIZED, sized_config
from benchmarks.weights_roles import EngineHost, TrainerHost
from omni_async.config import Config
from omni_async.plugins.families import PipelineFamily, find_family
from omni_async.runtime.on_ray.shell import Proxy, actor_class

Log = Callable[[str], None]

# Most copies of a payload at once: the weights themselves in trainer and engine, the buckets, a copy of them to time
# and a new one, two versions in the object store, the file in the page cache, and a receiver's own memory.
_PAYLOADS_IN_MEMORY = 9


class PublishRecord(msgspec.Struct, frozen=True):
    """One publish, and plain copies of the same bytes, made just before in the same process (`CopyTimes`). Seconds."""

    payload: Literal["full", "lora"]
    model_mb: float
    transport: str
    repeat: int
    nbytes: int
    copy_tensors: float
    copy_blocks: float
    copy_new: float
    blocked: float
    swapped: float
    staged: float
    swap: float


class ThroughputRecord(msgspec.Struct, frozen=True):
    """A window of generation: `samples` in `seconds` while `publishes` versions arrived.

    `arm` is quiet, periodic or back_to_back."""

    arm: str
    repeat: int
    samples: int
    seconds: float
    publishes: int


def needed_bytes(megabytes: float) -> int:
    """Return the memory that a payload of this size takes on the machine."""
    return int(_PAYLOADS_IN_MEMORY * megabytes * 1e6)


def ray_session(store_bytes: int) -> AbstractContextManager[None]:
    """Start a local Ray whose workers compute in one thread each; do nothing if one runs already."""
    return local_ray(4, max(store_bytes, 200_000_000), OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")


@contextmanager
def hosts(
    config: Config,
    family: PipelineFamily,
    transports: Sequence[str],
    engines: int,
    folder: Path,
    engine_host: type[EngineHost] = EngineHost,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Start a trainer and as many engines, in separate actors; kill them at the end."""
    actors: list[Any] = []

    def spawn(name: str, build: Callable[[], Any]) -> Proxy:
        actors.append(actor_class().options(num_cpus=0).remote(build))
        return Proxy(name, actors[-1], WAITING_CALLS)

    try:
        names = [f"rollout-{i}" for i in range(engines)]
        found = {name: spawn(name, partial(engine_host, name, config, family, transports)) for name in names}
        address = ray.util.get_node_ip_address()
        trainer = spawn("trainer", partial(TrainerHost, config, family, transports, found, str(folder), address))
        yield trainer, found
    finally:
        for actor in actors:
            ray.kill(actor)


async def measure_publishes(
    megabytes: float,
    transports: Sequence[str],
    *,
    repeats: int,
    engines: int,
    lora_rank: int | None,
    folder: Path,
    log: Log,
) -> list[PublishRecord]:
    """Measure `repeats` publishes by every transport of a model of `megabytes`, after an uncounted one of each.

    With `lora_rank` its adapters are the payload."""
    config = sized_config(megabytes, lora_rank=lora_rank)
    payload = config.weights.payload
    records: list[PublishRecord] = []
    with hosts(config, SIZED, transports, engines, folder) as (trainer, found):
        await asyncio.gather(*(engine.start() for engine in found.values()))
        await trainer.start()
        for transport in transports:
            await trainer.publish(transport)
        for repeat in range(repeats):
            for transport in transports:
                await trainer.nudge(1e-4)
                copies = await trainer.copies()
                times = await trainer.publish(transport)
                records.append(
                    PublishRecord(
                        payload,
                        megabytes,
                        transport,
                        repeat,
                        times.nbytes,
                        copies.tensors,
                        copies.blocks,
                        copies.new,
                        times.blocked,
                        times.swapped,
                        times.staged,
                        times.swap,
                    )
                )
            log(f"{payload} {megabytes:g} MB: repeat {repeat + 1} of {repeats}")
    return records


async def measure_throughput(
    config: Config, transport: str, *, repeats: int, window_s: float, every_s: float, folder: Path, log: Log
) -> list[ThroughputRecord]:
    """Measure windows of the same number of samples, about `window_s` long.

    Without publishes, with a publish every `every_s`, and with consecutive publishes."""
    records: list[ThroughputRecord] = []
    with hosts(config, find_family(config.model.pipeline), [transport], 1, folder) as (trainer, found):
        [engine] = found.values()
        await engine.start()
        await trainer.start()
        await trainer.publish(transport)
        batch = config.rollout.max_batch
        await engine.generate(batch)
        samples = batch * max(1, round(window_s / await engine.generate(batch)))
        for repeat in range(repeats):
            for arm, pause in (("quiet", None), ("periodic", every_s), ("back_to_back", 0.0)):
                if pause is not None:
                    await trainer.publish_repeatedly(transport, pause)
                seconds = await engine.generate(samples)
                publishes = await trainer.stop_publishing() if pause is not None else 0
                records.append(ThroughputRecord(arm, repeat, samples, seconds, publishes))
            log(f"generation: repeat {repeat + 1} of {repeats}")
    return records

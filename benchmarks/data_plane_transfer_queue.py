"""Implements the TransferQueue arm of the data-plane benchmark, with its default storage (two units, over ZeroMQ).

The settings are the best of those tried: batches of 32 samples both ways, four times the group of the other arms, two
incoming batches in flight. The producer is not held back: it may run ahead by the whole run. Needs the extra `bench`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks.data_plane_work import Source, Tally

_FIELD = "payload"
_BATCH = 32
_CONCURRENT_PUTS = 2
# Delay before an incomplete batch is requested again; the queue's own loaders wait a second.
_POLL_S = 0.001


def installed() -> bool:
    return find_spec("transfer_queue") is not None


def open_queue() -> None:
    """Start TransferQueue's controller and storage as named actors of the current Ray. Call once, before any role."""
    import transfer_queue
    from omegaconf import OmegaConf

    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))


def close_queue() -> None:
    import transfer_queue

    transfer_queue.close()


def _client() -> Any:
    import torch
    import transfer_queue

    torch.set_num_threads(1)
    transfer_queue.init()
    return transfer_queue.get_client()


class TransferProducer:
    def __init__(self, nbytes: int) -> None:
        self._client = _client()
        self._source = Source(nbytes, count=_CONCURRENT_PUTS * _BATCH)

    async def run(self, samples: int, partition: str) -> None:
        batches = iter(range(0, samples, _BATCH))
        await asyncio.gather(*(self._put_each(batches, partition) for _ in range(_CONCURRENT_PUTS)))

    async def _put_each(self, batches: Iterator[int], partition: str) -> None:
        for first in batches:
            await asyncio.to_thread(self._put, first, partition)

    def _put(self, first: int, partition: str) -> None:
        from tensordict import TensorDict

        self._client.put(
            TensorDict({_FIELD: self._source.batch(first, _BATCH)}, batch_size=[_BATCH]), partition_id=partition
        )


class TransferTrainer:
    def __init__(self, nbytes: int) -> None:
        self._client = _client()
        self._nbytes = nbytes

    async def run(self, samples: int, partition: str) -> int:
        """Return the number of samples missing at the end: 0."""
        tally = Tally(self._nbytes, samples)
        while tally.left:
            batch = await asyncio.to_thread(self._client.get_meta, [_FIELD], _BATCH, partition, task_name="train")
            if batch.size == 0:
                await asyncio.sleep(_POLL_S)
                continue
            payloads = (await asyncio.to_thread(self._client.get_data, batch))[_FIELD]
            for payload in payloads.unbind(0):
                tally.take(payload)
            await asyncio.to_thread(self._client.clear_samples, batch)
        return tally.left

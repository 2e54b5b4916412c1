"""Runs a vLLM-Omni engine in a process of its own, through a pipe: its torch.distributed would disturb other tests."""

import asyncio
import contextlib
import multiprocessing as mp
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from omni_async.rollout.base import Trajectory
from omni_async.types import SampleRequest

EXTENSION = "tests.rollout.vllm_extension.CountingExtension"


class RemoteEngine:
    """An engine in a child process: commands are methods of `_Server` or the engine; what they raise is raised here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, command: str, *arguments: Any) -> Any:
        self._connection.send((command, arguments))
        return self.answer()

    def answer(self) -> Any:
        if not self._connection.poll(280):
            raise TimeoutError("the engine's process does not answer")
        failed, value = self._connection.recv()
        if failed:
            raise value
        return value


class _Server:
    def __init__(self, checkpoint: str, family: str, options: dict[str, Any]) -> None:
        from omni_async.plugins.families import find_family
        from omni_async.rollout.vllm_omni_engine import VllmOmniEngine

        found = msgspec.structs.replace(find_family(family), vllm_extension=EXTENSION)
        self.engine = VllmOmniEngine("engine", found, path=checkpoint, **options)

    async def generate(self, requests: list[SampleRequest]) -> list[Trajectory | BaseException]:
        return list(await asyncio.gather(*[self.engine.generate(r) for r in requests], return_exceptions=True))

    async def swap_in_flight(self, requests: list[SampleRequest], version: int, after: int) -> Any:
        """Swaps once every sample has taken `after` steps."""
        running = asyncio.create_task(self.generate(requests))
        while (await self.engine._call("steps_taken", len(requests)))["steps"] < after:  # noqa: ASYNC110
            await asyncio.sleep(0)
        report = await self.engine.swap(version)
        return report, await running

    async def swap_while_running(self, requests: list[SampleRequest], version: int) -> Any:
        """Swaps once the first sample is done and others are still to come."""
        running = [asyncio.create_task(self.engine.generate(request)) for request in requests]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        report = await self.engine.swap(version)
        return report, await asyncio.gather(*running)

    async def is_grad_ready(self, request: SampleRequest) -> bool:
        """Returns whether a trainer in this process could differentiate through the trajectory's tensors."""
        made = await self.engine.generate(request)
        return not any(t.is_inference() for t in made.tensors.flatten_keys().values())


async def _serve(connection: Connection, *engine: Any) -> None:
    server = _Server(*engine)
    connection.send((False, await server.engine.start()))
    while (message := await asyncio.to_thread(connection.recv)) is not None:
        command, arguments = message
        try:
            of = server if hasattr(server, command) else server.engine
            answer = (False, await getattr(of, command)(*arguments))
        except Exception as error:  # noqa: BLE001 - raised in the test
            answer = (True, error)
        connection.send(answer)
    await server.engine.close()


def _main(*arguments: Any) -> None:
    import omni_async  # noqa: F401 - makes a mixed installation importable

    asyncio.run(_serve(*arguments))


@contextlib.contextmanager
def running_engine(checkpoint: str, family: str = "qwen_image", **options: Any) -> Iterator[tuple[RemoteEngine, Any]]:
    """Starts the engine and yields it with its first report."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, checkpoint, family, options))
    process.start()
    theirs.close()
    remote = RemoteEngine(ours)
    try:
        yield remote, remote.answer()
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()

"""Hosts any role in one Ray actor class, and provides the proxy through which roles call each other.

Ray runs every concurrency group of an async actor on a separate event loop, but a role must run on one. So the role has
its own loop, in its own thread, and the actor's methods forward calls to it:
- The default group forwards calls that may wait long.
- The group `control` forwards calls that must get through while the default group is crowded, among them the check that
  the role's loop is responsive.

There is only one named group. Ray starts the threads of named groups with a variable that it reassigns for the next
group, so on a busy machine two threads may run the same loop, and calls to the other never return ("this event loop is
already running").
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from omni_async.accelerator import showing
from omni_async.config.section import MOST_WORKERS
from omni_async.records.write.devices import Device, DeviceSampler
from omni_async.runtime.cluster import PeerLost, StartError, traceback_of
from omni_async.runtime.start_times import BUILD, LOAD, PROCESS, Stage, StartClock


class Shell:
    """An actor around the role that `build()` creates. Becomes a Ray actor through `actor_class`.

    The process and its children see the accelerators that Ray gave the actor, and no others, and their numerical
    libraries use `threads` threads. An exception of the role goes to its caller; only this process has its traceback,
    and prints it."""

    def __init__(self, build: Callable[[], Any], threads: int) -> None:
        self._start = StartClock()
        self._start.end(PROCESS)
        # In the process, because Ray keeps none ready for an actor with an environment. `build` imports the libraries;
        # for NumPy, which Ray may have imported by now, Ray has set the number of the actor's CPUs.
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)))
        # Ray hides no accelerators from an actor without any, and hides none at all if the cluster's owner set
        # RAY_EXPERIMENTAL_NOSET_*. Nothing has used a device yet.
        given = ray.get_runtime_context().get_accelerator_ids()
        os.environ.update(showing(given))
        self._devices = DeviceSampler()
        if any(given.values()):
            self._devices.start()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="role", daemon=True).start()
        self._role = asyncio.run_coroutine_threadsafe(_traced(self._make(build)), self._loop).result()
        self._start.end(BUILD)

    @staticmethod
    async def _make(build: Callable[[], Any]) -> Any:
        return build()

    async def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_traced(work), self._loop))

    async def long_call(self, method: str, args: tuple[Any, ...]) -> Any:
        return await self._on_loop(getattr(self._role, method)(*args))

    @ray.method(concurrency_group="control")
    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return await self._on_loop(getattr(self._role, method)(*args))

    @ray.method(concurrency_group="control")
    async def whereabouts(self) -> Whereabouts:
        return Whereabouts(os.getpid(), psutil.Process().create_time(), ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="control")
    async def stages(self, loaded: bool) -> list[Stage]:
        """Return the stages of this process's start. `loaded`: the role has loaded, so that stage ends now."""
        if loaded:
            self._start.end(LOAD)
        return self._start.stages

    @ray.method(concurrency_group="control")
    async def ping(self) -> list[Device]:
        """Return the accelerators that this process sees, as last read, once the role's loop has answered."""
        await self._on_loop(asyncio.sleep(0))
        return self._devices.devices


async def _traced(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except Exception as error:
        sys.stderr.write(traceback_of(error))
        raise


# Each worker has two calls of the coordinator that wait: for work, and for the end of the run. Two roles scale to
# MOST_WORKERS; the rest is for services and others. A waiting call takes 60 KB, a free place nothing.
_WAITING_CALLS = 6 * MOST_WORKERS


def actor_class() -> Any:
    limits: dict[str, Any] = {"max_concurrency": _WAITING_CALLS, "concurrency_groups": {"control": 256}}
    decorate: Any = ray.remote(**limits)
    return decorate(Shell)


# Ray's errors for a process that is gone.
_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.WorkerCrashedError,
)


class Proxy:
    """A role in another process: `await proxy.method(*args)`.

    Picklable, so roles can receive each other's proxies. `waiting_calls`: the methods that may wait long; all others
    use the concurrency group `control`."""

    def __init__(self, name: str, actor: Any, waiting_calls: frozenset[str]) -> None:
        self._name = name
        self._actor = actor
        self._waiting_calls = waiting_calls

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        send = self._actor.long_call if method in self._waiting_calls else self._actor.call

        async def call(*args: Any) -> Any:
            try:
                return await send.remote(method, args)
            except ray.exceptions.RayTaskError as error:
                # The role's own exception, not Ray's wrapper with its call path.
                raise getattr(error, "cause", None) or error from None
            except _GONE as error:
                if getattr(error, "actor_init_failed", False):  # another process would fail in the same way
                    raise StartError(f"{self._name}: {_last_line(error)}") from None
                raise PeerLost(f"{self._name} is gone: {_cause(error)}") from None

        return call

    def __reduce__(self) -> tuple[Any, ...]:
        return Proxy, (self._name, self._actor, self._waiting_calls)


def _last_line(error: BaseException) -> str:
    """Return the last line of a traceback, which names the exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]


def _cause(error: BaseException) -> str:
    """Return the reason from Ray's long message about a dead actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = [line for line in lines if any(word in line for word in ("killed", "node", "died"))]
    return [*why, *lines, "no reason is known"][0][:200]


# ---- the process of an actor -----------------------------------------------------------------------------------------

_END_TIMEOUT_S = 20.0


class Whereabouts(NamedTuple):
    """A process: its number, when it was created (numbers are reused), and its node."""

    pid: int
    created: float
    node: str


def end_process(where: Whereabouts) -> None:
    """Send SIGKILL to the process and its children, if it still exists. A lost node has none.

    Ray asks a process to end, but a stopped one (SIGSTOP, a debugger, a device that hangs) does not react: it would
    keep its memory and its accelerator."""
    if where.node == ray.get_runtime_context().get_node_id():
        _kill(where)
        return
    there = NodeAffinitySchedulingStrategy(where.node, soft=False)
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(_kill)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(remote.options(scheduling_strategy=there).remote(where), timeout=_END_TIMEOUT_S)


def _kill(where: Whereabouts) -> None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(where.pid)
        if process.create_time() != where.created:
            return
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.Error):
                one.kill()

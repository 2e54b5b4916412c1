"""Starts or joins Ray without its log output, and detects its loss before Ray kills this process."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import threading
import time
from typing import Any, TypeVar

import ray

from omni_async.aio.threads import DaemonThread, in_daemon_thread
from omni_async.config.ray_cluster import ClusterAddress
from omni_async.config.redact import redact_text
from omni_async.runtime.cluster import StartError
from omni_async.runtime.on_ray.local import LocalRay, StartFailed

logger = logging.getLogger(__name__)

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
_CHECK_S = 10.0
_DISCONNECT_S = 10.0
_PROBE_S = 10.0
# After a failed start on a busy machine, wait before the next try.
_PAUSE_S = 1.0

T = TypeVar("T")


class Connection:
    """This process's connection to Ray.

    `started`: `connect` made the connection, so `close` ends it, and also ends Ray if `connect` started it. `local`:
    Ray's processes, if this process started them."""

    def __init__(self, started: bool, local: LocalRay | None) -> None:
        self.started = started
        self.local = local
        self._lost: asyncio.Future[str] | None = None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None and self._lost.done() and not self._lost.cancelled()

    async def lost(self, health_timeout_s: float) -> str:
        """Wait until Ray is lost and return the reason.

        Another owner's cluster is lost once its head has not answered for `health_timeout_s`."""
        if self._lost is None:
            waiting = in_daemon_thread(self.local.wait_lost) if self.local else _until_silent(health_timeout_s)
            self._lost = asyncio.ensure_future(waiting)
        return await asyncio.shield(self._lost)

    def close(self) -> None:
        """Leave Ray, and end it if `connect` started it. Returns within seconds, whatever state Ray is in."""
        global _current
        if not self.started:
            return
        self.started = False
        _current = None
        _leave()
        if self.local is not None:
            self.local.end()


_current: Connection | None = None


def connect(
    cluster: ClusterAddress | None,
    cpus: int,
    timeout_s: float = 600.0,
    stop: threading.Event | None = None,
    store_bytes: int | None = None,
) -> Connection:
    """Join `cluster`, or start a local Ray with at least `cpus` CPUs.

    An existing connection of this process is used, and not ended by `close`.

    Args:
        cluster: the cluster to join, from `cluster_address`; None: a local Ray.
        cpus: number requested by the job; a Ray of this machine has at least the machine's number.
        timeout_s: seconds during which a failed start is retried.
        stop: set when the connection is no longer wanted.
        store_bytes: size of the object store of a started Ray; None: Ray's choice.

    Raises:
        StartError: one line, if Ray cannot be reached or started."""
    global _current
    if ray.is_initialized():
        return Connection(False, _current.local if _current else None)
    logging.getLogger("ray").setLevel(logging.ERROR)
    stop = stop or threading.Event()
    made = _join(*cluster) if cluster is not None else _start(cpus, timeout_s, stop, store_bytes)
    if stop.is_set():  # the caller may have left, so nobody else would close it
        made.close()
        raise StartError("Ray was started, and is not wanted any more")
    _current = made
    return made


def _start(cpus: int, timeout_s: float, stop: threading.Event, store_bytes: int | None) -> Connection:
    """Start a local Ray. On a busy machine Ray gives up after 30 s; then the start is retried."""
    # As many CPUs as the roles request: on a small machine they share the real ones, so that their work overlaps.
    cpus = max(cpus, os.cpu_count() or 1)
    deadline, tries = time.monotonic() + timeout_s, 0
    while True:
        tries += 1
        local = LocalRay(cpus, store_bytes)
        try:
            found = local.address(deadline - time.monotonic(), stop)
            reread_environment()
            _init(address=found)
            return Connection(True, local)
        except Exception as error:  # Ray raises bare ones, too
            local.end()
            _leave()
            reason = _one_line(error)
            logs = f"logs: {local.folder}"
            if isinstance(error, StartFailed) and error.final:
                raise StartError(f"Ray cannot be started on this machine: {reason}; its {logs}") from error
            if time.monotonic() + _PAUSE_S >= deadline:
                often = f"run.startup_timeout_s = {timeout_s:g}, tried {tries} time{'s' * (tries != 1)}"
                raise StartError(
                    f"Ray did not start within {often}: {reason}; is the machine overloaded? Its {logs}"
                ) from error
            shutil.rmtree(local.folder, ignore_errors=True)
            left = deadline - time.monotonic()
            logger.warning("Ray did not start (%s); trying again, for up to %.0f s more", reason, left)
            stop.wait(_PAUSE_S)


def _join(address: str, named_by: str) -> Connection:
    # Set before any import in workers: otherwise vLLM and diffusers contact a hub.
    environment = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "RAY_DEDUP_LOGS": "0"}
    try:
        _require_listener(address)
    except OSError as error:
        raise StartError(f"{named_by}: nobody answers at {address}: {_one_line(error)}") from error
    try:
        reread_environment()
        _init(address=address, runtime_env={"env_vars": environment})
    except Exception as error:
        _leave()
        refused = f"{named_by}: cannot join Ray at {address}: {_one_line(error)}"
        raise StartError(refused + _about_tokens()) from error
    return Connection(True, None)


def _init(**options: Any) -> None:
    """Call `ray.init` in a thread that then ends.

    Ray counts objects and actors by thread, and the thread that joins keeps the driver's identity. With two such
    threads in a process that joined twice, new objects get the ids of others: a reader gets the wrong value, or Ray
    aborts the process."""
    joining = DaemonThread("join Ray")
    try:
        joining.submit(ray.init, **options, **_QUIET).result()
    finally:
        joining.shutdown()


def _require_listener(address: str) -> None:
    """Raise OSError if no process listens at the address. Ray itself would retry for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()


def _about_tokens() -> str:
    """Return a hint about the token that a cluster may require of a joining process.

    Without a token, Ray only reports that it cannot connect."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        where = "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        return f"; the token in {where} must be the cluster's, on every machine"
    where = "RAY_AUTH_MODE=token in the environment, here and where a node joins"
    return f"; a cluster that asks for a token is joined with {where}"


def reread_environment() -> None:
    """Make Ray read its token again: it may have been missing or different when Ray was imported."""
    extension: Any = ray._raylet
    extension.Config.initialize("")
    extension.AuthenticationTokenLoader.instance().reset_cache()


def _leave() -> None:
    """End this process's connection, or the rest of an incomplete one.

    The wait is bounded, because the shutdown may wait for a lost global store."""
    leaving = threading.Thread(target=_shut_down, name="leave-ray", daemon=True)
    leaving.start()
    leaving.join(_DISCONNECT_S)
    if leaving.is_alive():
        logger.warning("Ray does not let go of this process after %g s", _DISCONNECT_S)


def _shut_down() -> None:
    """Shut down Ray's client while other threads run.

    If another thread dropped a reference after the core worker is gone, the process would end without a message."""
    worker: Any = ray._private.worker.global_worker
    if (core := getattr(worker, "core_worker", None)) is not None:
        worker.core_worker = _WithoutCounting(core)
    ray.shutdown()


class _WithoutCounting:
    """A core worker that ignores dropped references and actor handles, because it is shutting down."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def remove_object_ref_reference(self, reference: Any) -> None:
        pass

    def remove_actor_handle_reference(self, actor: Any) -> None:
        pass


def _one_line(error: BaseException) -> str:
    return redact_text(" ".join(str(error).split()))[:500] or type(error).__name__


async def _until_silent(health_timeout_s: float) -> str:
    """Wait until another owner's cluster is lost, and return how.

    Either its head does not answer, or the head reports that this process's node is gone."""
    here = ray.get_runtime_context().get_node_id()
    while True:
        await asyncio.sleep(min(_CHECK_S, health_timeout_s / 4))
        try:
            async with asyncio.timeout(health_timeout_s):
                nodes = await in_daemon_thread(ray.nodes)
        except TimeoutError:
            return f"its head has not answered for {health_timeout_s:g} s"
        except Exception as error:  # noqa: BLE001 (a client's connection may break in many ways)
            return f"its head does not answer: {_one_line(error)}"
        if not any(node["NodeID"] == here and node["Alive"] for node in nodes):
            return "the node of this process has left it"

"""Runs a worker of `reward.servers`: a vLLM server in separate processes, as a service of the run.

It is ready when it answers and has the model under the recipe's name. It is lost, and replaced, when its process ends,
reports that its engine is dead, or does not answer for a while. It ends with its worker, however the worker ends: it
reads a pipe that the worker holds. Its random token is passed in its environment; only the run knows it, from the
address. Waits for the process's start, at most `run.startup_timeout_s`, and for its end.

If the worker has no accelerator, the server runs on CPUs, which needs vLLM's CPU build.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import aiohttp

from omni_async.compat import child_environment
from omni_async.config.reading import open_file
from omni_async.config.redact import one_line
from omni_async.config.reward import Server
from omni_async.config.writing import open_append
from omni_async.plugins.services import Service, ServiceSite
from omni_async.records.write.rundir import RunDirectory
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.model_names import served_names
from omni_async.rewards.scorers.model_servers import read_body
from omni_async.roles.builders import ServiceHost, WorkerContext

_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_TARGET_DEVICE": "cpu"}
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_ASK_S = 0.5  # between health checks of a starting server
_WATCH_S = 5.0  # between health checks of a running server
_ANSWER_S = 30.0  # a computing server may answer a health check this late; later, it counts as lost
_GRACE_S = 5.0
_LONGEST_TAIL = 600
_READ_BACK = 1 << 18  # bytes; two processes print tracebacks after the first failure
# Errors of vLLM's processes that follow from the failure of another one, which has printed the reason.
_FOLLOWS = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed")
# How vLLM, or a process of it, reports a port that another process has.
_ADDRESS_IN_USE = re.compile(r"\bEADDRINUSE\b|address already in use", re.IGNORECASE)
# The prefix of a line: the process, and for log lines also level, time and place.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) ?)?([A-Z]+ \S+ \S+ \[[^\]\n]*\] )?", re.MULTILINE)
# The last line of a traceback, and indented lines after it, where some exceptions have their reason.
_RAISED = re.compile(r"^[\w.]+(?:Error|Exception)\b(?:: .*)?(?:\n[ \t].+){0,2}", re.MULTILINE)

# vLLM's log line if its kernels did not load. It then fails at the first kernel that it calls.
_NOT_LOADED = re.compile(r"Failed to import from vllm\.\w+: \w+\((?:'([^'\n]+)'|\"([^\"\n]+)\")")


class ServerNotStarted(RuntimeError):
    """The server ended, did not answer in time, or serves another model."""


class PortTaken(ServerNotStarted):
    """Another process uses the port of the server, or a port that vLLM chose for its own processes."""


def build(context: WorkerContext) -> ServiceHost:
    """Build the worker in its process; the server starts when it does."""
    server = next(one for one in context.config.reward.servers if one.name == context.worker.role)
    service = VllmServer(context.service_site(), server, RunDirectory(context.folder).logs)
    return ServiceHost(context.name, service, context.coordinator)


class VllmServer(Service):
    """A vLLM server.

    `logs`: the folder for its output, a file per worker. `devices`: the environment variables that show it its
    accelerators, as `accelerator.showing` returns them; None: it sees its worker's accelerators."""

    def __init__(self, site: ServiceSite, server: Server, logs: Path, devices: Mapping[str, str] | None = None) -> None:
        self._site, self._server, self._devices = site, server, devices or {}
        self._log = logs / f"{site.name}.log"
        self._token = secrets.token_urlsafe(32)
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._url = ""
        self._printed_from = 0  # where the output of the last process begins in the log

    async def start(self) -> str:
        self._log.parent.mkdir(parents=True, exist_ok=True)  # another machine may not see the run's folder
        await self._site.tell(f"{self._site.name}: vLLM loads {self._server.model}, and prints to {self._log}")
        headers = {"Authorization": f"Bearer {self._token}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_ANSWER_S))
        try:
            await self._start_on_a_free_port()
        except PortTaken as error:
            await self._site.tell(f"{self._site.name}: {error}; starting once more on another port")
            await self._end_process()
            await self._start_on_a_free_port()
        return self._url.replace("://", f"://:{self._token}@", 1)

    async def _start_on_a_free_port(self) -> None:
        host = self._site.host
        with open_append(self._log) as log, reserved_port(host) as port:
            self._printed_from = log.tell()
            self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._process = await asyncio.create_subprocess_exec(
                *self._command(port),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(os.environ),
                start_new_session=True,
            )
            await self._until_ready()

    def _command(self, port: int) -> list[str]:
        server = self._server
        own = ["--model", server.model, "--served-model-name", server.served_as, "--port", str(port)]
        return [
            *(sys.executable, "-m", "omni_async.roles.vllm_process"),
            *own,
            *("--host", self._site.host),
            *("--uvicorn-log-level", "warning"),  # a line for every answer would fill the disk
            *server.args,
        ]

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        found = {**inherited, **_QUIET, **self._devices, "VLLM_API_KEY": self._token}
        if self._server.resources.gpus == 0:
            found |= _CPU | {"OMP_NUM_THREADS": str(max(1, int(self._server.resources.cpus)))}
        return found | child_environment()

    async def _until_ready(self) -> None:
        """Wait until the server answers with the model. Raises ServerNotStarted if it ends or has another model."""
        assert self._process is not None
        while await self._health() != 200:
            if self._process.returncode is not None:
                code, reason = self._process.returncode, self._tail()
                error = PortTaken if _ADDRESS_IN_USE.search(reason) else ServerNotStarted
                raise error(f"vLLM ended with {code}: {reason} (all of it is in {self._log})")
            await asyncio.sleep(_ASK_S)
        served = await self._served()
        if self._server.served_as not in served:
            raise ServerNotStarted(f"expected a server of {self._server.served_as!r}, it has {', '.join(served)}")

    async def _served(self) -> list[str]:
        """Return the names of the server's models. Raises PortTaken if the server rejects our token."""
        assert self._session is not None
        async with self._session.get(f"{self._url}/v1/models") as response:
            if response.status != 200:
                raise PortTaken(f"what answers at {self._url} is another server: {response.status} to our token")
            try:
                return served_names(await read_body(response))
            except ScoreError as error:
                raise PortTaken(f"what answers at {self._url} is another server: {error}") from None

    async def _health(self) -> int | None:
        """Return the status of the server's answer; None if it does not answer."""
        assert self._session is not None
        try:
            async with self._session.get(f"{self._url}/health") as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def run(self) -> None:
        """Serve until cancelled. Raises RuntimeError if the process ends, or no longer answers."""
        assert self._process is not None
        ended, now = asyncio.ensure_future(self._process.wait()), asyncio.get_running_loop().time
        well_at = now()
        try:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=_WATCH_S)
                if done:
                    raise RuntimeError(f"vLLM ended with {ended.result()}: {self._tail()}")
                status = await self._health()
                if status == 200:
                    well_at = now()
                elif status is not None:
                    raise RuntimeError(f"vLLM answers /health with {status}: {self._tail()}")
                elif now() - well_at >= _ANSWER_S:
                    raise RuntimeError(f"vLLM did not answer /health for {_ANSWER_S:g} s")
        finally:
            ended.cancel()

    def _printed(self) -> str:
        """Return the end of the newest process's output."""
        try:
            with open_file(self._log) as log:
                log.seek(max(self._printed_from, log.seek(0, os.SEEK_END) - _READ_BACK))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _tail(self) -> str:
        """Return the end of the server's output, as a line without its token."""
        return one_line(_reason(self._printed()).replace(self._token, "***"), _LONGEST_TAIL) or "nothing was printed"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._end_process()

    async def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
                    if not _group_lives(process.pid):
                        return


def _reason(printed: str) -> str:
    """Return vLLM's last printed reason for its end: an exception, otherwise a line."""
    text = _PREFIX.sub("", printed.replace("\r", "\n"))
    raised = [found[0] for found in _RAISED.finditer(text)]
    first = [one for one in raised if not _FOLLOWS.search(one)]
    reason = (first or raised or text.strip().splitlines() or [""])[-1]
    if kernels := _NOT_LOADED.search(text):
        package = " (on Debian: apt install libnuma1)" if "libnuma" in kernels[0] else ""
        return f"its kernels did not load: {kernels[1] or kernels[2]}{package}; {reason}"
    return reason


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Yield a free TCP port of `host` and keep it until the context ends.

    A socket that is bound but does not listen keeps the port. The kernel then gives it to no other process that
    requests a free port. A server that sets SO_REUSEADDR and names the port, as vLLM does, can listen there. Any other
    program that names the port and sets the option can take it, too."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as keeping:
        keeping.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeping.bind((host, 0))
        yield int(keeping.getsockname()[1])

"""Runs a worker of `reward.servers`: a vLLM server in processes of its own, as a service of the run.

It is ready when it answers and has the model under the recipe's name; it is lost, and replaced, when its process ends
or does not answer for a while. It ends with its worker, however that ends: it reads a pipe that the worker holds. Its
token is drawn at random, handed over in its environment and known to the run alone, by the address. Waits for the
process's start, `run.startup_timeout_s` at most, and for its end.

Where the worker has no accelerator the server is one for CPUs, which vLLM's CPU build has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from omni_async.compat import is_mixed
from omni_async.config.redact import one_line
from omni_async.config.stages import Server
from omni_async.runtime.builders import ServiceHost, WorkerContext
from omni_async.services import Service, ServiceSite

_PREPARED = Path(__file__).parent / "prepared"
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_TARGET_DEVICE": "cpu"}
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
_ASK_S = 0.5  # between two looks at a server that starts
_WATCH_S = 5.0  # between two looks at one that runs
_ANSWER_S = 30.0  # a server that computes may take so long to say that it is well
_GRACE_S = 5.0
_LONGEST_TAIL = 600


class ServerNotStarted(RuntimeError):
    """The server ended, or did not answer in time, or serves another model."""


def build(context: WorkerContext) -> ServiceHost:
    """Build the worker in its process; the server starts when it does."""
    server = next(one for one in context.config.reward.servers if one.name == context.worker.role)
    service = VllmServer(context.service_site(), server, context.folder / "servers")
    return ServiceHost(context.name, service, context.coordinator)


class VllmServer(Service):
    """A vLLM server. `logs`: the folder that what it prints is written to, a file for each worker."""

    def __init__(self, site: ServiceSite, server: Server, logs: Path) -> None:
        self._site, self._server = site, server
        self._log = logs / f"{site.name}.log"
        self._token = secrets.token_urlsafe(32)
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._url = ""

    async def start(self) -> str:
        port = _free_port(self._site.host)
        self._url = f"http://{self._site.host}:{port}"
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(port),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(os.environ),
                start_new_session=True,
            )
        headers = {"Authorization": f"Bearer {self._token}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_ANSWER_S))
        await self._until_ready()
        return self._url.replace("://", f"://:{self._token}@", 1)

    def _command(self, port: int) -> list[str]:
        server = self._server
        own = ["--model", server.model, "--served-model-name", server.served_as, "--port", str(port)]
        return [
            *(sys.executable, "-m", "omni_async.reward_server.vllm_process"),
            *own,
            *("--host", self._site.host),
            *server.args,
        ]

    def _environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        found = {**inherited, **_QUIET, "VLLM_API_KEY": self._token}
        if self._server.resources.gpus == 0:
            found |= _CPU | {"OMP_NUM_THREADS": str(max(1, int(self._server.resources.cpus)))}
        if is_mixed():
            found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PREPARED), *sys.path]))
        return found

    async def _until_ready(self) -> None:
        """Wait until the server answers with the model. Raises ServerNotStarted if it ends or has another."""
        assert self._process is not None
        while not await self._is_well():
            if self._process.returncode is not None:
                code = self._process.returncode
                raise ServerNotStarted(f"vLLM ended with {code}: {self._tail()} (all of it is in {self._log})")
            await asyncio.sleep(_ASK_S)
        assert self._session is not None
        async with self._session.get(f"{self._url}/v1/models") as response:
            served = [str(one.get("id")) for one in (await response.json(content_type=None))["data"]]
        if self._server.served_as not in served:
            raise ServerNotStarted(f"expected a server of {self._server.served_as!r}, it has {', '.join(served)}")

    async def _is_well(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get(f"{self._url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def run(self) -> None:
        """Serve until it is cancelled. Raises RuntimeError if the process ends, or does not answer any more."""
        assert self._process is not None
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                done, _ = await asyncio.wait({ended}, timeout=_WATCH_S)
                if done:
                    raise RuntimeError(f"vLLM ended with {ended.result()}: {self._tail()}")
                if not await self._is_well():
                    raise RuntimeError(f"vLLM did not answer /health within {_ANSWER_S:g} s")
        finally:
            ended.cancel()

    def _tail(self) -> str:
        """Return the end of what the server printed, as a line without its token."""
        try:
            text = self._log.read_bytes()[-20 * _LONGEST_TAIL :].decode("utf-8", "replace")
        except OSError:
            return "nothing was printed"
        lines = [line for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line] or lines
        return one_line(errors[-1].replace(self._token, "***"), _LONGEST_TAIL) if errors else "nothing was printed"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
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


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])

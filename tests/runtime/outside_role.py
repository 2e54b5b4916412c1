"""Provides a service as another package would bring it: a server that counts how often it is asked. It imports nothing
of the framework but what packages are meant to."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

from omni_async.config.section import Section, doc
from omni_async.plugins.services import Service, ServiceRole, ServiceSite


class CounterSettings(Section, kw_only=True, frozen=True):
    first: Annotated[int, doc("The first number.", ge=0, most=1000)] = 0
    start: Annotated[Literal["", "fails", "never", "asks"], doc("What goes wrong at the start.")] = ""


class Counter(Service):
    """Answers each connection with its name, process and next number. Sent "break", it fails."""

    def __init__(self, site: ServiceSite) -> None:
        self._site = site
        self._next = site.settings.first
        self._broken = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        match self._site.settings.start:
            case "fails":
                raise OSError("told not to start")
            case "never":
                await asyncio.Event().wait()
            case "asks":
                await self._site.addresses("nobody")
        self._server = await asyncio.start_server(self._answer, self._site.host)
        await self._site.tell(f"{self._site.name} counts from {self._next}")
        return f"{self._site.host}:{self._server.sockets[0].getsockname()[1]}"

    async def run(self) -> None:
        await self._broken.wait()
        raise OSError("told to break")

    async def drain(self) -> None:
        await self._site.tell(f"{self._site.name} drains")

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline() == b"break\n":
            self._broken.set()
        writer.write(f"{self._site.name} {os.getpid()} {self._next}\n".encode())
        self._next += 1
        writer.close()


def build(site: ServiceSite) -> Service:
    return Counter(site)


def build_none(site: ServiceSite) -> int:
    return 1


ROLE = ServiceRole(f"{__name__}:build", CounterSettings, loading="opening its port")
NONE = ServiceRole(f"{__name__}:build_none")

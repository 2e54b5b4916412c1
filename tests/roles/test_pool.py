"""Tests who is answered by a worker of a pool; tests/e2e has whole runs with pools."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from omni_async.plugins.services import ServiceSite
from omni_async.roles.pool import PoolService
from tests.rewards.server.serving_world import RECORDER
from tests.roles.actor_world import Desk
from tests.roles.test_vllm_server import texts_in
from tests.support.configs import build
from tests.support.ports import listening_at

POOLED = {"reward.pools": [{"name": "readers"}], "reward.scorers": [RECORDER | {"pool": "readers"}]}


def worker(number: int, desk: Desk) -> PoolService:
    config = build({}, POOLED)
    host = f"127.0.0.{number + 1}"
    site = ServiceSite(f"readers-{number}", number, config, None, host, desk.phase, desk.service_lost)
    return PoolService(site, config.reward.pools[0])


async def status(address: str, method: str, token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as client, client.request(method, address) as response:
        return response.status


async def test_workers_answer_their_token_alone(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    desk = Desk()
    workers = [worker(number, desk) for number in range(2)]
    try:
        found: list[Any] = [urlsplit(await one.start()) for one in workers]
        assert [listening_at(one.port) for one in found] == [["127.0.0.1"], ["127.0.0.2"]]
        first, second = (one.password for one in found)
        assert min(len(first), len(second)) >= 32 and first != second
        at = f"http://127.0.0.1:{found[0].port}/0"
        for token in (None, second, first[:-1], ""):
            assert await status(f"{at}/metrics", "GET", token) == 401
            assert await status(f"{at}/score", "POST", token) == 401
        assert await status(f"{at}/metrics", "GET", first) == 200
    finally:
        for one in workers:
            await one.close()
    assert not texts_in(tmp_path)
    assert not [token for token in (first, second) if token in caplog.text + "".join(desk.phases)]

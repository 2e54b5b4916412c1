"""Tests that wrong requests, ten thousand of them, are refused, and that nothing else of a server changes."""

from __future__ import annotations

import http.client
import random
from collections import Counter
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest

from omni_async.rewards import wire
from tests.rewards.server.serving_world import MEDIA, PROMPTS, TOKEN, asking, command, write_scorers

LARGEST = 2**16
FORMS = (wire.MSGPACK, wire.JSON)
PLAIN = (None, True, -1, 2**63, 1e308, "", "x" * 1000, "\0", [], {}, [[]], b"\xff", {"a": {"b": [1]}}, msgspec.UNSET)


def whole(form: str) -> bytes:
    samples = tuple(
        wire.sent_sample(media, prompt, str(prompt.index)) for media, prompt in zip(MEDIA, PROMPTS, strict=True)
    )
    return wire.encode(wire.Request(1, samples), form)


def malformed(draw: random.Random, form: str) -> bytes:
    """Returns bytes at random, or a request with a required field that is gone or something else."""
    if draw.random() < 0.3:
        return draw.randbytes(draw.randrange(300))
    tree = msgspec.msgpack.decode(whole(wire.MSGPACK))
    sample = draw.choice(tree["samples"])
    image = sample["media"]["image"]
    name, place = draw.choice(
        [("version", tree), ("samples", tree), ("prompt", sample), ("media", sample), ("text", sample["prompt"])]
        + [(name, image) for name in ("dtype", "shape", "data")]
    )
    wrong = draw.choice(PLAIN)
    if (
        wrong is msgspec.UNSET
        or (name == "version" and wrong is True)
        or (name == "text" and isinstance(wrong, str | bytes))
    ):
        del place[name]
    else:
        place[name] = wrong
    return (msgspec.msgpack if form == wire.MSGPACK else msgspec.json).encode(tree)


def wrong_request(draw: random.Random) -> tuple[str, str, bytes, dict[str, str], int]:
    """Returns method, path, body, headers, and the status that it must get."""
    form = draw.choice(FORMS)
    headers = {"Content-Type": form, "Authorization": f"Bearer {TOKEN}"}
    kind = draw.choice(["malformed", "truncated", "oversized", "stranger", "elsewhere", "type"])
    body = whole(form)
    match kind:
        case "malformed":
            return "POST", wire.PATH, malformed(draw, form), headers, 400
        case "truncated":
            return "POST", wire.PATH, body[: draw.randrange(len(body))], headers, 400
        case "oversized":
            return "POST", wire.PATH, bytes(LARGEST + draw.randrange(1, 5000)), headers, 413
        case "stranger":
            given = draw.choice(
                ["", TOKEN, "Bearer", f"Bearer {TOKEN[: draw.randrange(len(TOKEN))]}", "Bearer \xff\xfe"]
            )
            return "POST", wire.PATH, body, headers | {"Authorization": given}, 401
        case "elsewhere":
            return "POST", draw.choice(["/", "/v1", "/v1/score/x", "/%00"]), body, headers, 404
        case _:
            other = draw.choice(
                ["", "text/plain", "application/x-python-pickle", "multipart/form-data; boundary=x", "\xe9"]
            )
            return "POST", wire.PATH, body, headers | {"Content-Type": other}, 415


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_wrong_requests_get_a_4xx_and_nothing_else_changes(tmp_path, count):
    server = {"token": "env:SERVE_TOKEN", "max_request": "64KiB", "requests_per_s": 1e6, "burst": 1_000_000}
    path = write_scorers(tmp_path, {"name": "jpeg_size"}, **server)
    draw, seen = random.Random(7), Counter()
    with command(path, SERVE_TOKEN=TOKEN) as (process, url), asking(url, token=TOKEN) as score:
        before = score()
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        sizes = []
        for number in range(count):
            method, where, body, headers, status = wrong_request(draw)
            connection.request(method, where, body, headers)
            response = connection.getresponse()
            response.read()
            assert response.status == status, (where, body[:200], headers)
            seen[status] += 1
            if number in (count // 10, count - 1):
                sizes.append(psutil.Process(process.pid).memory_info().rss)
        assert seen.keys() == {400, 401, 404, 413, 415} and min(seen.values()) > count / 20
        assert sizes[1] - sizes[0] < 2**24, sizes
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        lines = connection.getresponse().read().decode().splitlines()
        assert [line for line in lines if line.startswith("omni_async_reward_samples_total")] == [
            'omni_async_reward_samples_total{outcome="scored"} 4.0'
        ]
        assert "omni_async_reward_held_bytes 0.0" in lines and "omni_async_reward_waiting 0.0" in lines
        connection.close()
        assert score() == before

"""Tests that MessagePack is bounded before it is decoded: the values that it has, and the values that it claims."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest

from omni_async.config.decoding import decode_msgpack
from omni_async.rewards import wire

PLAIN = [None, True, False, 1, -1, -33, 200, -200, 40_000, 2**31, -(2**31), 2**63, -(2**63), 1.5, ""]
PLAIN += ["x" * 31, "x" * 40, "y" * 300, "z" * 70_000, b"", b"a" * 300, b"b" * 70_000]
PLAIN += [msgspec.msgpack.Ext(5, b"y" * size) for size in (1, 2, 4, 8, 16, 17, 300, 70_000)]


def drawn(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(12)
    if depth < 4 and kind < 3:
        return [drawn(draw, depth + 1) for _ in range(draw.choice([0, 1, 5, 20]))]
    if depth < 4 and kind < 5:
        return {f"k{i}" * draw.choice([1, 20, 200]): drawn(draw, depth + 1) for i in range(draw.choice([0, 3, 17]))}
    return draw.choice(PLAIN)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


def test_every_value_is_counted() -> None:
    draw = random.Random(1)
    wide = [[0] * 70_000, {str(i): 0 for i in range(70_000)}]
    for value in [*PLAIN, *wide, *(drawn(draw) for _ in range(200))]:
        content, values = msgspec.msgpack.encode(value), count(value)
        assert decode_msgpack(content, most=values) == value
        if values > 1:
            with pytest.raises(msgspec.DecodeError, match=f"more than {values - 1} values"):
                decode_msgpack(content, most=values - 1)


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf", b"\x91" * 100_000, b"\xa1\xff", b"\xdb\xff\xff\xff\xff"]
)
def test_wrong_messages(content: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_msgpack(content)


HEAD = b"\x82\xa7version\x01\xa7samples\x91\x82\xa6prompt\x82\xa4text\xa0\xa8metadata\x81\xa1x\xdd"


@pytest.mark.parametrize(("unit", "number"), [(b"\x00", 2**24), (b"\x80", 2**24), (b"\x80", 100_000)])
def test_many_values_take_little_memory(unit: bytes, number: int) -> None:
    body = HEAD + struct.pack(">I", number) + unit * number + b"\xa5media\x80"
    tracemalloc.start()
    try:
        with pytest.raises(wire.WireError, match=r"more than 250000 values|more than 20000 values|media"):
            wire.sample_of(wire.decode_request(body, wire.MSGPACK).samples[0])
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("unit", [b"0", b"{}", b'{"":0}'])
def test_many_values_in_json(unit: bytes) -> None:
    lists = b",".join([unit] * 500_000)
    for body in (
        b'{"version":1,"samples":[{"prompt":{"text":"","metadata":{"x":[' + lists + b']}},"media":{}}]}',
        b'{"version":1,"samples":[' + b",".join([b'{"prompt":{"text":""},"media":{}}'] * 60_000) + b"]}",
    ):
        with pytest.raises(wire.WireError, match="more than 250000 values"):
            wire.decode_request(body, wire.JSON)


def test_answers_of_many_parts() -> None:
    parts = b"\xdf" + struct.pack(">I", 400_000) + b"".join(b"\xa3%03x\x01" % (i % 4096) for i in range(400_000))
    body = b"\x82\xa7version\x01\xa6scores\x91\x82\xa5value\x01\xa5parts" + parts
    with pytest.raises(wire.WireError, match="more than 600000 values"):
        wire.decode_answer(body, wire.MSGPACK)
    assert wire.decode_refusal(b'{"error": "no", "x": [' + b"0," * 2000 + b"0]}", wire.JSON) == ""
    assert wire.decode_refusal(b"\x82\xa5error\xa2no\xa1x\xdc\x08\x00" + b"\x00" * 2048, wire.MSGPACK) == ""

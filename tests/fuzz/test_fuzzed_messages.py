"""Tests every message and file format of ours: a written one comes back, and anything else is refused by the decoder's
own errors."""

from __future__ import annotations

import contextlib
import inspect

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async import types
from omni_async.checkpoint.folders import Manifest
from omni_async.checkpoint.state import State
from omni_async.commands.bench.result import Overlap
from omni_async.control import control_state, events
from omni_async.performance.profile import Profile
from omni_async.records.write.summary import Summary
from tests.fuzz.foreign import DEEP, changed, of
from tests.support.examples import few

MESSAGES = [
    found
    for module in (types, events, control_state)
    for _, found in inspect.getmembers(module, inspect.isclass)
    if issubclass(found, msgspec.Struct) and found.__module__ == module.__name__
] + [Overlap, Manifest, State, Profile, Summary]
FORMATS = [msgspec.json, msgspec.msgpack]
REFUSALS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


ODD = st.sampled_from([DEEP, b'{"a":' * 2000, b"\xdf" + b"\xff" * 4, b"\xc6" + b"\xff" * 9, b"9" * 9999])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
@few(15)
@given(st.data(), st.binary(max_size=60) | ODD)
def test_a_message_comes_back_and_a_changed_one_or_any_bytes_are_a_message_or_refused(message, data, content):
    sent = data.draw(of(message))
    for wire in FORMATS:
        encoded = wire.encode(sent)
        assert wire.decode(encoded, type=message) == sent
        for received in (data.draw(changed(encoded)), content):
            with contextlib.suppress(*REFUSALS):
                assert isinstance(wire.decode(received, type=message), message)

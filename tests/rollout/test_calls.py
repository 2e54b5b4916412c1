"""Tests how a program's calls become one sample: their requests, seeds, versions and tensors."""

import asyncio
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from omni_async.data.image_files import drawn_image, read_prompt_image
from omni_async.rollout.base import EngineError
from omni_async.rollout.calls import Draw, draw_calls
from omni_async.rollout.stepping import ZeroVelocity
from omni_async.types import Prompt, SampleRequest, SdeWindow, VersionSpans
from tests.rollout.conftest import make_request
from tests.support.places import ROOT

N = 4


class Engine:
    """Draws samples of velocity 0, each call under the next version."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []
        self._draw = ZeroVelocity(lambda spec: (3, 4))

    async def __call__(self, request: SampleRequest) -> Any:
        self.asked.append(request)
        await asyncio.sleep(0)
        call = len(self.asked) - 1
        return self._draw(request, VersionSpans.of((call, call, call + 1, call + 1)))


def asked_for(calls: int, **fields: Any) -> SampleRequest:
    fields = {"window": SdeWindow(1, 2), "num_inference_steps": N, "seed": 7, **fields}
    return replace(make_request(**fields), calls=calls)


def editing(times: int) -> Any:
    async def program(prompt: Prompt, draw: Draw) -> None:
        media = await draw(prompt)
        for call in range(1, times):
            media = await draw(replace(prompt, text=f"edit {call}", images=(drawn_image(media, "drawn"),)))

    return program


async def test_calls_become_one_sample():
    engine, request = Engine(), asked_for(3, initial_seed=3)
    sample = await draw_calls(editing(3), request, engine)
    assert [one.sample_id for one in engine.asked] == [f"{request.sample_id}.c{call}" for call in range(3)]
    assert [one.prompt.text for one in engine.asked] == [request.prompt.text, "edit 1", "edit 2"]
    assert {one.calls for one in engine.asked} == {1}
    assert engine.asked[0].seed == 7 and len({one.seed for one in engine.asked}) == 3
    assert engine.asked[0].initial_seed == 3 and len({one.initial_seed for one in engine.asked}) == 3
    assert list(sample.versions) == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert [sample.tensors[f"call{call}", "latents"].shape for call in range(3)] == [(3, 3, 4)] * 3
    alone = await Engine()(engine.asked[2])
    assert (sample.media.image == alone.media.image).all(), "the media are the last call's"
    again = Engine()
    assert ((await draw_calls(editing(3), request, again)).tensors == sample.tensors).all()
    assert again.asked == engine.asked

    (image,) = engine.asked[1].prompt.images
    drawn = (await Engine()(engine.asked[0])).media.image
    assert (read_prompt_image(image).image == drawn.numpy()).all(), "without loss"
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(engine.asked[1].prompt), type=Prompt)
    assert travelled == engine.asked[1].prompt


async def no_prompt(prompt: Prompt, draw: Any) -> None:
    await draw(prompt.text)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (editing(1), "made 1 of rollout.calls = 2"),
        (editing(3), "more than rollout.calls = 2"),
        (no_prompt, "drew a str, expected a Prompt"),
    ],
)
async def test_wrong_programs_are_refused(program, reason):
    engine = Engine()
    with pytest.raises(ValueError, match=reason):
        await draw_calls(program, asked_for(2), engine)
    assert bool(engine.asked) == (program is not no_prompt)


async def in_a_task_group(prompt: Prompt, draw: Draw) -> None:
    async with asyncio.TaskGroup() as tasks:
        for call in range(2):
            tasks.create_task(draw(replace(prompt, text=f"{call}")))


async def regardless(prompt: Prompt, draw: Draw) -> None:
    for _ in range(2):
        with suppress(Exception):
            await draw(prompt)


async def test_concurrent_calls():
    engine = Engine()
    sample = await draw_calls(in_a_task_group, asked_for(2), engine)
    assert [one.prompt.text for one in engine.asked] == ["0", "1"]
    assert [*sample.tensors.keys()] == ["call0", "call1"]


@pytest.mark.parametrize("program", [in_a_task_group, regardless])
async def test_broken_engines_are_no_failed_sample(program):
    async def broken(request: SampleRequest) -> Any:
        raise EngineError("it is gone")

    with pytest.raises(EngineError, match="it is gone"):
        await draw_calls(program, asked_for(2), broken)


async def test_the_documented_program():
    page = (ROOT / "docs" / "programs.md").read_text()
    source = re.search(r"```python\n(# redraw.py\n.*?)```", page, re.S)
    namespace: dict[str, Any] = {}
    exec(source[1], namespace)
    engine = Engine()
    await draw_calls(namespace["build"](SimpleNamespace(rollout=SimpleNamespace(calls=3))), asked_for(3), engine)
    assert len(engine.asked) == 3
    assert all(one.prompt.text.endswith((", brighter", ", darker")) for one in engine.asked[1:])

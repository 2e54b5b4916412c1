import asyncio
from typing import Any

import pytest
import torch

from omni_async.rollout.base import EngineError
from omni_async.rollout.payloads import Staged
from omni_async.rollout.push_check import PushCheck
from omni_async.tokens.packing import Answered, pack
from tests.rollout.conftest import publish
from tests.rollout.token_answers import trained, versions
from tests.support.token_world import ToySampling, ToyTokenPolicy, toy_prompt

POLICY = ToyTokenPolicy()
PROMPT = POLICY.prepare(toy_prompt(0), ToySampling())
MODELS = versions(POLICY, 3, scale=0.5)
TOKENS = [3, 1, 4]


class Answer:
    def __init__(self, version: int) -> None:
        packed = pack([Answered(PROMPT, torch.tensor(TOKENS))])
        self.tokens = TOKENS
        self.log_probs = POLICY.log_probs(MODELS[version], packed, 1.0).tolist()


def pushed(version: int) -> Staged:
    return Staged(*publish(version, trained(POLICY, MODELS[version])), 0.0)


async def test_the_first_push_is_checked_once():
    check, draws, failures = PushCheck("engine", POLICY, "float32"), list[int](), list[Any]()

    async def draw(limit: int) -> Answer:
        draws.append(limit)
        await asyncio.sleep(0)
        return Answer(1)

    await check.once(draw, PROMPT, failures.append)
    assert not draws, "nothing was pushed"
    check.pushed(pushed(1))
    await asyncio.gather(*[check.once(draw, PROMPT, failures.append) for _ in range(3)])
    check.pushed(pushed(2))
    await check.once(draw, PROMPT, failures.append)
    assert len(draws) == 1 and not failures


async def test_an_engine_that_keeps_old_weights_is_an_error():
    check, failures = PushCheck("engine", POLICY, "float32"), list[Any]()
    check.pushed(pushed(1))

    async def draw(limit: int) -> Answer:
        return Answer(0)

    with pytest.raises(EngineError, match=r"after the push of version 1 its log-probs differ .* by \S+ nats; expected"):
        await check.once(draw, PROMPT, failures.append)
    assert len(failures) == 1


async def test_a_swap_before_the_answer_is_drawn_checks_the_new_version():
    check, versions_drawn = PushCheck("engine", POLICY, "float32"), list[int]()
    check.pushed(pushed(1))

    async def draw(limit: int) -> Answer:
        versions_drawn.append(2)
        if len(versions_drawn) == 1:
            check.pushed(pushed(2))
        return Answer(2)

    await check.once(draw, PROMPT, lambda error: None)
    assert len(versions_drawn) == 2

"""Requests for answers, versions of a token policy, and log-probs of answers computed another way."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from omni_async.algorithms.registry import TOKENS
from omni_async.diffusion.components import named_parameters
from omni_async.rollout.base import Trajectory
from omni_async.rollout.transformers_engine import TransformersEngine
from omni_async.tokens.packing import Answered, pack
from omni_async.tokens.policy import TokenPolicy, is_frozen
from omni_async.types import Prompt, SampleRequest
from tests.support.patience import PATIENCE

Models = Mapping[int, Mapping[str, nn.Module]]  # the components of each version


def make_request(prompt: Prompt, spec: Any, number: int = 0, fields: Sequence[str] = TOKENS) -> SampleRequest:
    where = f"g0.s{number}", "train", 0, number
    return SampleRequest(*where, prompt, 1000 + number, spec, 10, 0.0, "flow", None, tuple(fields))


@asynccontextmanager
async def running(policy: TokenPolicy, **options: Any) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(
        "engine", policy, **({"dtype": torch.float32, "max_batch": 8, "device": "cpu"} | options)
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def together(engine: TransformersEngine, requests: Sequence[SampleRequest]) -> list[Trajectory]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def answers(policy: TokenPolicy, requests: Sequence[SampleRequest], **options: Any) -> list[Trajectory]:
    async with running(policy, **options) as engine:
        return await together(engine, requests)


class Pausing:
    """Lets a policy stop before its forward passes number `at` until the test has called the engine."""

    at: tuple[int, ...] = (3,)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.calls = 0
        self.reached, self.resumed = threading.Semaphore(0), threading.Semaphore(0)

    def _pass(self) -> None:
        if self.calls in self.at:
            self.reached.release()
            assert self.resumed.acquire(timeout=PATIENCE)
        self.calls += 1

    def prefill(self, *args: Any) -> Any:
        self._pass()
        return super().prefill(*args)

    def decode(self, *args: Any) -> Any:
        self._pass()
        return super().decode(*args)

    async def while_paused(self, meanwhile: Coroutine[Any, Any, Any]) -> Any:
        assert await asyncio.to_thread(self.reached.acquire, True, PATIENCE)
        task = asyncio.create_task(meanwhile)
        await asyncio.sleep(0)
        self.resumed.release()
        return await task


def trained(policy: TokenPolicy, components: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Returns the weights that a version consists of."""
    found = named_parameters(components)
    return {name: weight.detach() for name, weight in found if not is_frozen(policy, name)}


def versions(policy: TokenPolicy, number: int, scale: float) -> Models:
    """Returns so many versions: the checkpoint, and then each with noise on every trained weight."""
    models = {version: policy.load_components(torch.float32) for version in range(number)}
    for version, components in models.items():
        generator = torch.Generator().manual_seed(version)
        for weight in trained(policy, components).values() if version else ():
            weight += scale * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return models


# ---- log-probs of an answer, computed another way --------------------------------------------------------------------


def in_float64(models: Models, made: Trajectory) -> Models:
    """Returns copies of the versions that drew an answer, without rounding of note: it would add to the engine's."""
    doubled: dict[int, dict[str, nn.Module]] = {}
    for version in set(made.versions):
        doubled[version] = {name: copy.deepcopy(one).double() for name, one in models[version].items()}
    return doubled


@torch.no_grad()
def whole(policy: TokenPolicy, models: Models, request: SampleRequest, made: Trajectory) -> Tensor:
    """Computes each token's log-prob from its whole context, by a forward pass of the version that drew it."""
    prompt, tokens = policy.prepare(request.prompt, request.spec), made.tensors["tokens"].long()
    packed = pack([Answered(prompt, tokens)])
    of_version = {v: policy.log_probs(models[v], packed, request.spec.temperature) for v in set(made.versions)}
    return torch.stack([of_version[version][k] for k, version in enumerate(made.versions)])


@torch.no_grad()
def continued(policy: TokenPolicy, models: Models, request: SampleRequest, made: Trajectory) -> Tensor:
    """Computes each token's log-prob with the keys and values of the versions that computed them."""
    prompt, tokens = policy.prepare(request.prompt, request.spec), made.tensors["tokens"].long()
    found: list[Tensor] = []
    for k, version in enumerate(made.versions):
        if k == 0:
            logits, cache = policy.prefill(models[version], [prompt], torch.empty(1, 0, dtype=torch.int64))
        else:
            position = torch.tensor([prompt.next_position + k - 1])
            logits = policy.decode(models[version], cache, tokens[k - 1 : k], position)
        found.append((logits[0] / request.spec.temperature).log_softmax(-1)[tokens[k]])
    return torch.stack(found)


def check_answer(
    policy: TokenPolicy, request: SampleRequest, made: Trajectory, log_probs: Tensor, bound: float = 1e-6
) -> None:
    """Compares an answer with its request and with log-probs computed another way."""
    fields = made.tensors
    tokens = fields["tokens"].tolist()
    kinds = {"prompt": torch.int32, "tokens": torch.int32, "log_probs": torch.float32}
    assert {name: fields[name].dtype for name in sorted(fields.keys())} == dict(sorted(kinds.items()))
    assert torch.equal(fields["prompt"].long(), policy.prepare(request.prompt, request.spec).ids)
    assert len(tokens) == len(fields["log_probs"]) == made.versions.num_steps <= request.spec.most_tokens
    assert not set(tokens[:-1]) & set(policy.stop_tokens), "it ends at its first stop token"
    stopped = tokens[-1] in policy.stop_tokens
    assert stopped or len(tokens) == request.spec.most_tokens
    assert contents(made) == (policy.text(tokens), "stop" if stopped else "length", len(tokens))
    assert_close(fields["log_probs"], log_probs, rtol=0, atol=bound)


def contents(made: Trajectory) -> tuple[Any, ...]:
    return made.media.text, made.media.finish, made.media.tokens


def same_bits(one: Trajectory, other: Trajectory) -> bool:
    fields = (torch.equal(one.tensors[key], other.tensors[key]) for key in TOKENS)
    return contents(one) == contents(other) and all(fields)

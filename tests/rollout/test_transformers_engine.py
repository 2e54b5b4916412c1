import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omni_async.diffusion.components import named_parameters
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.transformers_engine import TransformersEngine, draw
from omni_async.training.loading import WholeModel
from omni_async.types import Prompt, SampleRequest, VersionSpans
from omni_async.weights.lora import merged_weights
from tests.rollout.conftest import damaged, publish
from tests.rollout.token_answers import (
    Models,
    Pausing,
    answers,
    check_answer,
    contents,
    continued,
    make_request,
    running,
    same_bits,
    together,
    trained,
    versions,
    whole,
)
from tests.support.token_world import IMAGE, ToySampling, ToyTokenPolicy, toy_prompt


class Talkative(ToyTokenPolicy):
    """A policy whose answers are long: they end with the token of images, which no answer may contain elsewhere."""

    stop_tokens = (IMAGE,)


class PausingToy(Pausing, Talkative):
    pass


LONG = ToySampling(max_tokens=24, temperature=0.8)


def ask(number: int, spec: ToySampling = LONG, images: int = 0, of: int | None = None, **changes: Any) -> SampleRequest:
    """Makes request `number`, of prompt number `of`: 0, 4, 8 ... have two tokens, 1, 5, 9 ... three."""
    return make_request(toy_prompt(number if of is None else of, images), spec, number, **changes)


@pytest.fixture(scope="module")
def models() -> Models:
    return versions(Talkative(), 4, scale=0.5)


# ---- log-probs under the versions that are recorded ------------------------------------------------------------------


async def test_answers_agree_with_the_policy(models):
    policy = Talkative()
    requests = [ask(number, spec, number % 3) for number in range(12) for spec in (LONG, ToySampling(max_tokens=1))]
    made = await answers(policy, requests)
    for request, one in zip(requests, made, strict=True):
        assert one.versions == VersionSpans.same(0, len(one.versions))
        check_answer(policy, request, one, whole(policy, models, request, one))
        check_answer(policy, request, one, continued(policy, models, request, one))
    assert {one.media.finish for one in made} == {"stop", "length"}
    [bare] = await answers(policy, [ask(0, fields=())])
    assert not bare.tensors.keys() and contents(bare) == contents(made[0])


@pytest.mark.parametrize("images", [0, 2])
@pytest.mark.parametrize(("kv", "reference", "other"), [("keep", continued, whole), ("recompute", whole, continued)])
async def test_three_swaps_in_one_answer(models, kv, reference, other, images):
    policy = PausingToy("0")
    policy.at = (3, 7, 12)
    requests = [ask(number, images=images, of=3 + 4 * number) for number in range(16)]
    async with running(policy, kv=kv, max_batch=16) as engine:
        in_flight = asyncio.create_task(together(engine, requests))
        for version in (1, 2, 3):
            published = publish(version, trained(policy, models[version]))
            await engine.stage(*published)
            report = await policy.while_paused(engine.swap(version))
            assert (report.version, report.digest) == (version, published[0].digest)
        made = await in_flight
        after = await together(engine, requests)
    plain = Talkative()
    long = [one for one in made if one.versions.num_steps > 16]
    assert len(long) >= 2
    assert all(one.versions.spans[:3] == ((0, 4), (1, 4), (2, 5)) and one.versions.spans[3][0] == 3 for one in long)
    for request, one in zip(requests, made, strict=True):
        check_answer(plain, request, one, reference(plain, models, request, one))
    request, one = next(pair for pair in zip(requests, made, strict=True) if pair[1] is long[0])
    assert (other(plain, models, request, one) - one.tensors["log_probs"]).abs().max() > 1e-3, "the caches differ"
    for request, one in zip(requests, after, strict=True):
        assert {*one.versions} == {3}
        check_answer(plain, request, one, whole(plain, models, request, one))


async def test_adapters_are_merged(models):
    policy, generator = Talkative(), torch.Generator().manual_seed(1)
    base = trained(policy, models[0])
    chosen = [name.removesuffix(".weight") for name in base if name.endswith(("out.weight", "qkv.weight"))]
    for version in (1, 2):
        pieces = {}
        for name in chosen:
            rows, columns = base[f"{name}.weight"].shape
            pieces[f"{name}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            pieces[f"{name}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
        components = policy.load_components(torch.float32)
        for name, weight in merged_weights(base, pieces, scale=2.0):
            trained(policy, components)[name].copy_(weight)
        if version == 1:  # the second must not add to the first
            first = publish(1, pieces, lora={"rank": 2, "alpha": 4.0})
    async with running(policy) as engine:
        for published in (first, publish(2, pieces, lora={"rank": 2, "alpha": 4.0})):
            await engine.stage(*published)
            await engine.swap(published[0].version)
        request = ask(0)
        one = await engine.generate(request)
    check_answer(policy, request, one, whole(policy, {2: components}, request, one))


async def test_frozen_weights_stay_and_the_digest_is_of_all_others(models):
    policy = Talkative()
    weights = trained(policy, models[0])
    assert weights and not any(name.startswith("thinker.tower") for name in weights)
    engine = TransformersEngine("engine", policy, dtype=torch.float32, max_batch=1, device="cpu")
    trainers = WholeModel(policy, torch.float32).digest(torch.float32)
    assert (await engine.start()).digest == trainers == publish(0, weights)[0].digest
    await engine.stage(*publish(1, dict(named_parameters(models[1]))))
    with pytest.raises(
        EngineError, match=r"version 1 could not be loaded: .*'thinker\.tower\.\S+ is .*, expected nothing"
    ) as failure:
        await engine.swap(1)
    assert failure.value.__cause__ is not None, "its traceback shows the place"
    await engine.close()


# ---- samples and their neighbours ------------------------------------------------------------------------------------


async def test_batches_do_not_change_answers():
    """In float64, because float32 products of different batches may round differently."""
    requests = [ask(number, images=number % 2, of=number % 5) for number in range(16)]
    policy, how = Talkative(), {"dtype": torch.float64}
    alone = [made for request in requests for made in await answers(policy, [request], **how)]
    for max_batch in (3, 16):
        batched = await answers(policy, requests, max_batch=max_batch, **how)
        assert all(map(same_bits, alone, batched))
    assert len({made.media.text for made in alone}) > 10, "seeds differ"


async def test_answers_that_end_leave_the_batch():
    """Requests of other lengths or specs do not join it."""
    passes: list[tuple[str, int]] = []

    class Watched(Talkative):
        def prefill(self, components: Any, prompts: Any, so_far: Tensor) -> Any:
            passes.append(("prefill", len(prompts)))
            return super().prefill(components, prompts, so_far)

        def decode(self, components: Any, cache: Any, tokens: Tensor, positions: Tensor) -> Tensor:
            passes.append(("decode", len(tokens)))
            return super().decode(components, cache, tokens, positions)

    requests = [ask(number, of=4 * number) for number in range(6)]
    others = [ask(6, of=1), ask(7, ToySampling(max_tokens=1), of=0)]
    made = await answers(Watched(), [*requests, *others], max_batch=4)
    lengths = [one.versions.num_steps for one in made]
    batches = [lengths[:4], lengths[4:6], lengths[6:7], lengths[7:]]
    expected = []
    for batch in batches:
        expected.append(("prefill", len(batch)))
        expected += [("decode", sum(length > step for length in batch)) for step in range(1, max(batch))]
    assert passes == expected and len(set(lengths[:4])) > 1


async def test_no_answer_is_lost_in_a_hundred_swaps(models):
    policy = Talkative()
    requests = [ask(number, images=number % 2, of=number % 6) for number in range(60)]
    async with running(policy, max_batch=4, kv="recompute") as engine:
        in_flight = asyncio.create_task(together(engine, requests))
        for version in range(1, 101):
            await engine.stage(*publish(version, trained(policy, models[version % 4])))
            assert (await engine.swap(version)).version == version
        made = await in_flight
        assert {*(await engine.generate(ask(0))).versions} == {100}
    assert len({version for one in made for version in one.versions}) > 1
    of_any = {version: models[version % 4] for version in range(101)}
    for request, one in zip(requests, made, strict=True):
        assert [*one.versions] == sorted(one.versions)
        check_answer(policy, request, one, whole(policy, of_any, request, one))


def test_tokens_are_drawn_by_inverting_the_distribution():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 7, generator=generator)
    logits[0, [0, 3, 6]] = -math.inf
    chosen = logits.double().softmax(-1)[0].numpy()
    edges, how = [0.0, 1 - 2.0**-53], {"dtype": torch.float64}
    uniform = torch.cat([torch.tensor(edges, **how), torch.rand(1000, generator=generator, **how)])
    tokens, log_probs = draw(logits.expand(len(uniform), -1), uniform)
    expected = np.searchsorted(chosen.cumsum() / chosen.sum(), uniform.numpy(), side="right")
    assert (tokens.numpy() == expected).mean() > 0.99 and not {0, 3, 6} & {*tokens.tolist()}
    assert np.abs(np.bincount(tokens, minlength=7) / len(tokens) - chosen).max() < 0.05
    assert torch.equal(log_probs, logits.log_softmax(-1)[0, tokens])


async def test_prompts_are_prepared_once():
    class Counting(Talkative):
        prepared: tuple[str, ...] = ()

        def prepare(self, prompt: Prompt, spec: Any) -> Any:
            self.prepared += (prompt.text,)
            return super().prepare(prompt, spec)

    policy = Counting()
    requests = [ask(number, images=1, of=number // 3) for number in range(9)]
    async with running(policy) as engine:
        made = [await together(engine, requests) for _ in range(2)]
    assert policy.prepared == tuple(toy_prompt(number).text for number in range(3))
    assert [[one.encoded for one in again] for again in made] == [[1, 0, 0] * 3, [0] * 9]
    tight = Counting()
    async with running(tight, conditioning_bytes=1) as engine:
        for request in (ask(0), ask(0), ask(1), ask(0)):
            await engine.generate(request)
    assert len(tight.prepared) == 3, "one prompt stays"


# ---- errors ----------------------------------------------------------------------------------------------------------


async def test_unusable_prompts_fail_alone():
    class Broken(Talkative):
        def prepare(self, prompt: Prompt, spec: Any) -> Any:
            if prompt.text == "?!":
                raise OSError("no disk")
            return super().prepare(prompt, spec)

    prompts = [toy_prompt(0), Prompt(1, "no digit"), Prompt(2, "?!"), toy_prompt(4)]
    async with running(Broken()) as engine:
        requests = [make_request(prompt, LONG, number) for number, prompt in enumerate(prompts)]
        fine, refused, broken, other = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
        assert isinstance(fine, Trajectory) and isinstance(other, Trajectory)
        assert isinstance(refused, ValueError) and "neither a digit nor an image" in str(refused)
        assert isinstance(broken, EngineError) and "engine: OSError: no disk" in str(broken)
        with pytest.raises(ValueError, match=r"request g0\.s0: answers have no \['latents'\]"):
            await engine.generate(ask(0, fields=("latents", "tokens")))


async def test_weights_that_are_not_numbers_are_an_error_of_the_engine(models):
    policy = Talkative()
    weights = trained(policy, models[0])
    spoilt = weights | {"thinker.head.weight": torch.full_like(weights["thinker.head.weight"], math.nan)}
    async with running(policy) as engine:
        await engine.stage(*publish(1, spoilt))
        await engine.swap(1)
        with pytest.raises(EngineError, match=r"engine: token 0 of g0\.s0 has the log-prob nan under version 1"):
            await engine.generate(ask(0))


async def test_close_fails_all_answers():
    policy = PausingToy("0")
    policy.at = (0,)
    async with running(policy, max_batch=1) as engine:
        tasks = asyncio.gather(*[engine.generate(ask(number)) for number in range(2)], return_exceptions=True)
        await policy.while_paused(engine.close())
        assert [type(outcome) for outcome in await tasks] == [EngineError, EngineError]
        with pytest.raises(EngineError, match="engine is not running"):
            await engine.generate(ask(0))


async def test_cancelled_callers_do_not_disturb_others():
    requests = [ask(number, of=4 * number) for number in range(3)]
    async with running(Talkative(), dtype=torch.float64) as engine:
        tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        assert same_bits(await tasks[1], await engine.generate(requests[1]))


async def test_other_versions_than_the_staged_are_refused(models):
    policy = Talkative()
    published = publish(2, trained(policy, models[1]))
    async with running(policy) as engine:
        with pytest.raises(EngineError, match=r"engine: .*digest"):
            await engine.stage(*damaged(published))
        await engine.stage(*published)
        with pytest.raises(EngineError, match="asked for version 1, staged is 2"):
            await engine.swap(1)
        assert (await engine.swap(2)).version == 2


async def test_request_batching_swaps_after_the_batch(models):
    policy = PausingToy("0")
    policy.at = (2,)
    async with running(policy, batching="request", max_batch=4) as engine:
        in_flight = asyncio.create_task(together(engine, [ask(number, of=4 * number) for number in range(6)]))
        await engine.stage(*publish(1, trained(policy, models[1])))
        await policy.while_paused(engine.swap(1))
        assert [{*one.versions} for one in await in_flight] == [{0}] * 4 + [{1}] * 2

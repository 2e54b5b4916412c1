"""Tests the engine of tokens on a real vLLM, against forward passes of the recipe's small thinker in transformers.

All tests share one engine, and so one event loop."""

import asyncio
import io
import os
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import soundfile
import torch
from omni_async_pipelines.qwen_omni import FAMILY
from omni_async_pipelines.qwen_omni.policy import QwenOmniPolicy
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling

pytest.importorskip("vllm")

from omni_async.data.audio_files import prompt_audio
from omni_async.data.image_files import prompt_image
from omni_async.data.video_files import prompt_video
from omni_async.media import Media
from omni_async.records.write.images import write_media
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.vllm_engine import VllmEngine
from omni_async.store import LocalStore
from omni_async.types import Prompt, PromptAudio, SampleRequest, WeightReport
from omni_async.weights.lora import merged_weights
from omni_async.weights.transport import collective
from omni_async.weights.transport.base import receive, sending
from omni_async.weights.transport.collective import CollectiveReceiver, CollectiveSender
from omni_async.weights.transport.disk import DiskReceiver, DiskSender
from omni_async.weights.transport.object_store import ObjectStoreReceiver, ObjectStoreSender
from tests.rollout.conftest import damaged, publish
from tests.rollout.token_answers import (
    Models,
    check_answer,
    continued,
    in_float64,
    make_request,
    trained,
    versions,
    whole,
)
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes/quickstart/read_digits"
PATH = str(RECIPE / "checkpoint")
CONTEXT = 512
BOUND = 1e-5
SPEC = QwenOmniSampling(max_tokens=60, temperature=1.25)


class TalkativeThinker(QwenOmniPolicy):
    """A policy whose answers are long: they end with the token of images."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (self.processor.tokenizer.convert_tokens_to_ids(self.processor.image_token),)


@pytest.fixture(scope="module")
def policy() -> TalkativeThinker:
    return TalkativeThinker(PATH)


@pytest.fixture(scope="module")
def models(policy: TalkativeThinker) -> Models:
    return versions(policy, 4, scale=0.05)


@pytest.fixture(scope="module")
def world(policy: TalkativeThinker) -> Iterator[SimpleNamespace]:
    """Provides the engine, and a function that runs a coroutine on its event loop."""
    before = dict(os.environ)
    family = msgspec.structs.replace(FAMILY, policy=f"{__name__}:TalkativeThinker")
    options = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": CONTEXT}
    with asyncio.Runner() as runner:
        engine = VllmEngine("engine", family, path=PATH, dtype="float32", max_batch=8, engine_args=options)
        try:
            report = runner.run(engine.start())
            assert (report.version, report.digest) == (0, "")
            yield SimpleNamespace(engine=engine, run=runner.run)
        finally:
            runner.run(engine.close())
            os.environ.clear()
            os.environ.update(before)


@pytest.fixture
def run(world: SimpleNamespace, policy: TalkativeThinker, models: Models) -> Iterator[Any]:
    """Runs coroutines; afterwards the engine has the checkpoint's weights, pauses, and keeps keys and values."""
    yield world.run
    world.engine._recompute, world.engine._pauses = False, True
    world.run(push(world.engine, policy, models, 0))


@pytest.fixture
def engine(world: SimpleNamespace, run: Any) -> VllmEngine:
    return world.engine


def prompts() -> list[Prompt]:
    """Returns two prompts of text, two with an image, and one with audio and an image."""
    texts = [Prompt(number, "Read the digits." * (1 + number)) for number in range(2)]
    files = [f"images/validation_0{number}_0.png" for number in range(2)]
    images = [prompt_image(RECIPE / file, file) for file in files]
    seen = [Prompt(2 + number, "Read the digits.", images=(image,)) for number, image in enumerate(images)]
    sound = io.BytesIO()
    soundfile.write(sound, np.random.default_rng(0).normal(0, 0.1, 16_000), 16_000, format="WAV")
    heard = prompt_audio(PromptAudio("noise.wav", "", sound.getvalue()), "noise.wav")
    return [*texts, *seen, Prompt(4, "Read the digits.", images=(images[0],), audio=(heard,))]


def asked(number: int = 8, spec: QwenOmniSampling = SPEC, **changes: Any) -> list[SampleRequest]:
    every = prompts()
    return [make_request(every[k % len(every)], spec, k, **changes) for k in range(number)]


async def together(engine: VllmEngine, requests: Sequence[SampleRequest]) -> list[Trajectory]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def push(engine: VllmEngine, policy: QwenOmniPolicy, models: Models, version: int) -> Coroutine[Any, Any, WeightReport]:
    published = publish(version, trained(policy, models[version]))  # before answers begin, which it would hold up

    async def swap() -> WeightReport:
        await engine.stage(*published)
        report = await engine.swap(version)
        assert (report.version, report.digest) == (version, published[0].digest)
        return report

    return swap()


async def swapping(engine: VllmEngine, requests: Sequence[SampleRequest], *swaps: tuple[int, Coroutine]) -> Any:
    """Awaits each coroutine as soon as an answer has so many tokens. Returns the answers."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    for count, swap in swaps:
        while max((len(one.tokens) for one in engine._running.values()), default=0) < count:
            assert not all(task.done() for task in tasks), "the answers are too short"
            await asyncio.sleep(0)
        await swap
    return await asyncio.gather(*tasks)


# ---- log-probs under the versions that are recorded ------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_answers_agree_with_transformers_before_and_after_a_push(run, engine, policy, models, kv):
    """The images of the second round were seen before the swap."""
    engine._recompute = kv == "recompute"
    for version in (0, 1):
        run(push(engine, policy, models, version)) if version else None
        for request, one in zip(asked(), run(together(engine, asked())), strict=True):
            assert {*one.versions} == {version}
            check_answer(policy, request, one, whole(policy, models, request, one), BOUND)
    assert engine._push_check._passed


@pytest.mark.parametrize(("kv", "reference", "other"), [("keep", continued, whole), ("recompute", whole, continued)])
def test_three_swaps_in_one_answer(run, engine, policy, models, kv, reference, other):
    engine._recompute = kv == "recompute"
    swaps = [(count, push(engine, policy, models, version)) for version, count in enumerate((10, 22, 34), 1)]
    made = run(swapping(engine, asked(), *swaps))
    long = [k for k, one in enumerate(made) if [version for version, _ in one.versions.spans] == [0, 1, 2, 3]]
    assert len(long) >= 2
    for request, one in zip(asked(), made, strict=True):
        check_answer(policy, request, one, reference(policy, models, request, one), BOUND)
    request, one = asked()[long[0]], made[long[0]]
    assert (other(policy, models, request, one) - one.tensors["log_probs"]).abs().max() > 1e-3, "the caches differ"
    for request, one in zip(asked(), run(together(engine, asked())), strict=True):
        assert {*one.versions} == {3}
        check_answer(policy, request, one, whole(policy, models, request, one), BOUND)


@pytest.mark.thorough
def test_answers_to_videos_agree_with_transformers(run, engine, policy, models, tmp_path):
    """The videos of the second round were seen before the swap."""
    filmed = []
    for number, (frames, width) in enumerate(((4, 84), (3, 56), (2, 84))):
        film = np.random.default_rng(number).integers(0, 256, (frames, 3, 56, width), np.uint8)
        [file] = write_media(Media(video=film, fps=2.0), tmp_path / f"{number}")
        video = prompt_video(file, file.name)[0]
        filmed.append(Prompt(number, "What moves?", video=(video,)))
    filmed.append(msgspec.structs.replace(prompts()[4], video=filmed[2].video))
    requests = [make_request(filmed[k % 4], SPEC, k) for k in range(8)]
    for version in (0, 1):
        run(push(engine, policy, models, version)) if version else None
        for request, one in zip(requests, run(together(engine, requests)), strict=True):
            expected = whole(policy, models, request, one)
            check_answer(policy, request, one, expected, 3 * BOUND)  # vLLM rounds prompts of 161 to 309 tokens
            assert (one.tensors["log_probs"] - expected).abs().mean() <= BOUND / 10


@pytest.mark.thorough
def test_three_swaps_in_one_answer_without_pauses(run, engine, policy, models, monkeypatch, caplog):
    """Every kind of prompt is submitted again with its images and its audio."""

    async def pause_generation(*, wait_for_inflight_requests: bool = False) -> None:
        raise AssertionError("it is not called")

    monkeypatch.setattr(engine._vllm, "pause_generation", pause_generation)
    swaps = [(count, push(engine, policy, models, version)) for version, count in enumerate((10, 22, 34), 1)]
    made = run(swapping(engine, asked(), *swaps))
    assert "unexpected keyword argument 'mode'" in caplog.text and caplog.text.count("abort all answers") == 1
    spans = [[version for version, _ in one.versions.spans] for one in made]
    assert all(len(set(of)) == len(of) for of in spans) and spans.count([0, 1, 2, 3]) >= 2
    aborted = [one.prompt for one, of in zip(asked(), spans, strict=True) if len(of) > 1]
    assert {(len(prompt.images), len(prompt.audio)) for prompt in aborted} == {(0, 0), (1, 0), (1, 1)}
    for request, one in zip(asked(), made, strict=True):
        check_answer(policy, request, one, whole(policy, models, request, one), BOUND)
    for request, one in zip(asked(), run(together(engine, asked())), strict=True):
        assert {*one.versions} == {3}
        check_answer(policy, request, one, whole(policy, models, request, one), BOUND)


@pytest.mark.thorough
@pytest.mark.parametrize(("pauses", "reference"), [(True, continued), (False, whole)])
def test_no_answer_is_lost_in_100_swaps(run, engine, policy, models, pauses, reference):
    engine._pauses = pauses
    pushed = {version: models[version % len(models)] for version in range(101)}

    async def draw(request: SampleRequest, swapping: asyncio.Task[None]) -> list[Trajectory]:
        made = []
        while not swapping.done():
            made.append(await engine.generate(request))
        return made

    async def swap() -> None:
        for version in range(1, 101):
            while not any(len(one.tokens) > len(one.versions) for one in engine._running.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)  # until a token has the version before
            await push(engine, policy, pushed, version)

    async def main() -> list[list[Trajectory]]:
        swapping = asyncio.create_task(swap())
        made = await asyncio.gather(*(draw(request, swapping) for request in asked()))
        await swapping
        return made

    made = run(main())
    assert not engine._running
    spans = [one.versions.spans for every in made for one in every]
    assert len({version for span in spans for version, _ in span}) > 50 and max(map(len, spans)) > 3
    for request, every in zip(asked(), made, strict=True):
        assert all(one.versions.num_steps == len(one.tensors["tokens"]) for one in every)
        longest = max(every, key=lambda one: len(one.versions.spans))
        check_answer(policy, request, longest, reference(policy, in_float64(pushed, longest), request, longest), BOUND)


def test_a_long_prompt_is_computed_again_by_each_version(run, engine, policy, models):
    """Blocks of its keys and values are shared within a version alone."""
    prompt = Prompt(0, "Read the digits. " * 60)
    spec = msgspec.structs.replace(SPEC, max_tokens=120)
    requests = [make_request(prompt, spec, number) for number in range(4)]
    assert len(policy.prepare(prompt, spec).ids) > 2 * 128, "several blocks"
    first = run(swapping(engine, requests, (5, push(engine, policy, models, 1))))
    assert any({*one.versions} == {0, 1} for one in first)
    for request, one in zip(requests, run(together(engine, requests)), strict=True):
        check_answer(policy, request, one, whole(policy, in_float64(models, one), request, one), BOUND)


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["object_store", "disk", "collective", "collective by device"])
def test_versions_arrive_by_every_transport(run, engine, policy, models, transport, tmp_path, monkeypatch):
    """The carrier of devices runs here with gloo."""
    monkeypatch.setattr(collective, "current_device", lambda: torch.device("cpu"))
    store, carrier = LocalStore(), "device" if "device" in transport else "cpu"
    sender, receiver = {
        "object_store": (ObjectStoreSender(store), ObjectStoreReceiver(store)),
        "disk": (DiskSender(tmp_path), DiskReceiver()),
    }.get(transport) or (CollectiveSender("127.0.0.1", carrier, PATIENCE), CollectiveReceiver("engine", PATIENCE))

    async def carry(version: int) -> None:
        manifest, buckets = publish(version, trained(policy, models[version]))
        assert len(buckets) > 1
        async with sending(sender, manifest, buckets) as transfer:
            assert await engine.stage(*await receive(receiver, manifest, transfer)) == manifest.digest
            assert (await engine.swap(version)).digest == manifest.digest

    async def main() -> list[Trajectory]:
        await sender.init({"engine": receiver.init})
        made = await swapping(engine, asked(), (10, carry(1)), (22, carry(2)))
        return [*made, *await together(engine, asked())]

    made = run(main())
    assert {1, 2} <= {version for one in made[:8] for version in one.versions}
    for request, one in zip(asked() * 2, made, strict=True):
        check_answer(policy, request, one, continued(policy, models, request, one), BOUND)
    assert all({*one.versions} == {2} for one in made[8:])


def test_adapters_are_merged(run, engine, policy, models):
    base, generator = trained(policy, models[0]), torch.Generator().manual_seed(1)
    components = policy.load_components(torch.float32)
    # A version replaces the last one entirely, also if it adapts other layers.
    for version, adapted in enumerate(("q_proj.weight", "q_proj.weight", "layers.0.mlp.down_proj.weight"), 1):
        pieces = {}
        for name in [name for name in base if name.endswith(adapted)]:
            rows, columns = base[name].shape
            module = name.removesuffix(".weight")
            pieces[f"{module}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
            pieces[f"{module}.lora_B.weight"] = 0.1 * torch.randn(rows, 2, generator=generator)
        run(engine.stage(*publish(version, pieces, lora={"rank": 2, "alpha": 4.0})))
        run(engine.swap(version))
    for name, weight in merged_weights(base, pieces, scale=2.0):
        trained(policy, components)[name].copy_(weight)
    for request, one in zip(asked(4), run(together(engine, asked(4))), strict=True):
        check_answer(policy, request, one, whole(policy, {3: components}, request, one), BOUND)


def test_answers_depend_on_their_seeds(run, engine):
    again = [run(together(engine, asked())) for _ in range(2)]
    assert [one.media.text for one in again[0]] == [one.media.text for one in again[1]]
    assert len({one.media.text for one in again[0]}) > 6
    [bare] = run(together(engine, asked(1, fields=())))
    assert not bare.tensors.keys() and bare.media.parts == ("text",)


def test_prompts_are_prepared_once(run, engine):
    prompt = Prompt(0, "Which digits are these?")
    requests = [make_request(prompt, SPEC, number) for number in range(6)]
    made = [run(together(engine, requests)) for _ in range(2)]
    assert [[one.encoded for one in again] for again in made] == [[1, 0, 0, 0, 0, 0], [0] * 6]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_cancelled_answers_leave_the_engine_usable(run, engine, policy, models):
    async def main() -> list[Trajectory]:
        tasks = [asyncio.create_task(engine.generate(request)) for request in asked()]
        while not any(one.tokens for one in engine._running.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        await push(engine, policy, models, 1)
        tasks[1].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in [*outcomes[::2], outcomes[1]])
        assert not engine._running
        return await together(engine, asked())

    for request, one in zip(asked(), run(main()), strict=True):
        check_answer(policy, request, one, whole(policy, models, request, one), BOUND)


def test_versions_that_do_not_fit_are_refused_and_answers_continue(run, engine, policy, models):
    weights = trained(policy, models[1])
    name = next(iter(weights))

    async def refused(published: Any) -> None:
        await engine.stage(*published)
        with pytest.raises(EngineError, match=r"version 1 could not be loaded: weights of version 1 do not fit"):
            await engine.swap(1)

    lacking = publish(1, {other: weight for other, weight in weights.items() if other != name})
    misshapen = publish(1, weights | {name: weights[name][..., :-1].contiguous()})
    made = run(swapping(engine, asked(), (5, refused(lacking)), (10, refused(misshapen))))
    for request, one in zip(asked(), made, strict=True):
        assert {*one.versions} == {0}
        check_answer(policy, request, one, whole(policy, models, request, one), BOUND)
    with pytest.raises(EngineError, match=r"engine: .*digest"):
        run(engine.stage(*damaged(lacking)))
    with pytest.raises(EngineError, match="asked for version 7, staged is None"):
        run(engine.swap(7))


def test_unusable_requests_fail_alone(run, engine):
    too_long = QwenOmniSampling(max_tokens=CONTEXT)
    unusable = [
        (asked(1, too_long)[0], f"vLLM's context has {CONTEXT}; shorten the prompt, lower rollout.sampling.max_tokens"),
        (asked(1, QwenOmniSampling(temperature=0.001))[0], "vLLM draws at 0.01 at least, got 0.001"),
        (make_request(Prompt(9, "<|IMAGE|>"), SPEC), "it holds <|IMAGE|>"),
        (asked(1, fields=("latents",))[0], "answers have no ['latents']"),
    ]
    requests = [request for request, _ in unusable]

    async def main() -> list[Any]:
        return list(await asyncio.gather(*map(engine.generate, [*requests, *asked(1)]), return_exceptions=True))

    *failed, fine = run(main())
    for failure, (_, expected) in zip(failed, unusable, strict=True):
        assert isinstance(failure, ValueError) and expected in str(failure)
    assert isinstance(fine, Trajectory)

"""Tests the preference reader: a dataset's pairs become scored samples, and one bad pair stays one bad pair. With a
real file, codec and coordinator it runs in tests/e2e/test_inprocess.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from tensordict import TensorDict

from omni_async.aio.clock import ManualClock
from omni_async.config import ConfigError
from omni_async.media import Media
from omni_async.roles.preferences import PreferenceReader, fit
from omni_async.rollout.base import EngineError
from omni_async.store import LocalStore
from omni_async.types import Prompt, SampleRequest, Score, ScoreJob
from tests.roles.actor_world import Desk, failure_of, make_config, make_request
from tests.support.images import as_media
from tests.support.loops import settle
from tests.support.patience import PATIENCE


class PlainPairs:
    """A dataset in which pair i is two plain images, of brightness 10 i and 10 i + 1. `unreadable` pairs raise."""

    def __init__(self, *unreadable: int) -> None:
        self.unreadable = set(unreadable)
        self.read: list[int] = []

    def media(self, pair: int) -> tuple[Media, Media]:
        self.read.append(pair)
        if pair in self.unreadable:
            raise ConfigError(f"row {pair}, column chosen: not a PNG, JPEG or WebP image")
        sizes = (64, 48, 3), (32, 96, 3)
        return tuple(as_media(np.full(size, 10 * pair + i, np.uint8)) for i, size in enumerate(sizes))


SPEC = QwenImageSampling(height=32, width=48)


class FlatCodec:
    """A codec of six tokens of four channels, each the image's mean; a prompt is its length. With a `go`, images wait
    for it in the reader's thread."""

    def __init__(self) -> None:
        self.device: Any = None
        self.batches: list[tuple[int, ...]] = []
        self.prompts: list[tuple[str, str | None]] = []
        self.value: float | None = None  # of every latent, in place of the mean
        self.go: threading.Event | None = None
        self.entered = threading.Event()
        self.let_go: list[bool] = []

    def to(self, device: Any) -> FlatCodec:
        self.device = device
        return self

    def encode(self, prompt: Prompt, spec: QwenImageSampling) -> TensorDict:
        self.prompts.append((prompt.text, spec.negative_prompt if spec.guided else None))
        return TensorDict({"length": torch.tensor(len(prompt.text))}, batch_size=[])

    def encode_media(self, media: list[Media], spec: QwenImageSampling) -> torch.Tensor:
        pixels = torch.stack([torch.as_tensor(one.image) for one in media])
        self.entered.set()
        if self.go is not None:
            self.let_go.append(self.go.wait(PATIENCE))
        self.batches.append(tuple(pixels.shape))
        means = pixels.float().mean((1, 2, 3)) if self.value is None else torch.full((len(pixels),), self.value)
        return means[:, None, None].expand(-1, 6, 4)


class FlatPolicy:
    path = "nowhere"
    dtype: torch.dtype | None = None

    def __init__(self, blocked: bool = False) -> None:
        self.codec = FlatCodec()
        self.codec.go = threading.Event() if blocked else None

    def load_codec(self, dtype: torch.dtype) -> FlatCodec:
        self.dtype = dtype
        return self.codec

    def sigmas(self, num_inference_steps: int, spec: QwenImageSampling) -> torch.Tensor:
        return torch.linspace(1, 0, num_inference_steps + 1)


def sample_of_pair(pair: int, sample: int, **changes: Any) -> SampleRequest:
    """Makes a request in which group g is of pair g."""
    fields = {"group": pair, "sample": sample, "prompt": Prompt(pair, f"prompt {pair}")}
    made = make_request(0, window=None, kind="train")
    return msgspec.structs.replace(made, sample_id=changes.pop("sample_id", f"g{pair}.s{sample}"), **(fields | changes))


def both(*pairs: int, **changes: Any) -> list[SampleRequest]:
    return [sample_of_pair(pair, sample, **changes) for pair in pairs for sample in (0, 1)]


@asynccontextmanager
async def on_stage(
    pairs: Any = None, policy: Any = None, clock: Any = None, device: Any = None, **changes: Any
) -> AsyncIterator[tuple[Desk, asyncio.Task[None]]]:
    desk, config = Desk(), make_config(**({"rollout.group_size": 2} | changes))
    pairs, policy, clock = pairs or PlainPairs(), policy or FlatPolicy(), clock or ManualClock()
    reader = PreferenceReader("rollout-0", config, pairs, policy, desk, LocalStore(), clock, device)
    await reader.start()
    run = asyncio.create_task(reader.run())
    yield desk, run
    desk.close()
    if not run.done():
        await run


async def read(*requests: SampleRequest, **stage: Any) -> Desk:
    """Returns the desk once all requests are done or have failed."""
    async with on_stage(**stage) as (desk, _):
        desk.offer(*requests)
        await desk.until(lambda: len(desk.done) + len(desk.failed) == len(requests))
    return desk


async def test_a_pair_becomes_two_trajectories_without_steps():
    desk = await read(*both(3))
    for sample, result in enumerate(desk.done):
        assert (result.sample_id, result.engine) == (f"g3.s{sample}", "rollout-0")
        assert (result.version, result.step_versions.spans) == (0, ())
        assert set(result.trajectory.keys()) == {"final", "conditioning", "sigmas", "steps"}
        assert result.trajectory.batch_size == torch.Size([])
        assert torch.equal(result.trajectory["final"], torch.full((6, 4), 30.0 + sample))
        assert result.trajectory["final"].dtype == torch.float32
        assert torch.equal(result.trajectory["sigmas"], torch.linspace(1, 0, 6))
        assert (result.trajectory["steps"].shape, result.trajectory["steps"].dtype) == ((0,), torch.int64)
        assert result.trajectory["conditioning"]["length"] == len("prompt 3")
        assert_array_equal(result.media.pixels, np.full((32, 48, 3), 30 + sample, np.uint8))


async def test_the_chosen_image_scores_one_and_the_rejected_one_zero():
    names = ["g7.s1", "g7.s0", "g12.s1", "g12.s0"]
    async with on_stage() as (desk, _):
        desk.offer(*(ScoreJob(name, "train", Prompt(5, "x"), None, sample=int(name[-1])) for name in names))
        await desk.until(lambda: len(desk.scores) == 4)
    assert [desk.scores[name].score for name in names] == [Score(0.0), Score(1.0)] * 2


async def test_a_pair_that_cannot_be_decoded_is_reported_read_again_and_the_others_go_on():
    pairs, why = PlainPairs(1), "ConfigError: row 1, column chosen: not a PNG, JPEG or WebP image"
    async with on_stage(pairs) as (desk, _):
        desk.offer(*both(0, 1, 2))
        await desk.until(lambda: len(desk.done) == 4)
        assert [result.sample_id for result in desk.done] == ["g0.s0", "g0.s1", "g2.s0", "g2.s1"]
        assert desk.failed == [("g1.s0", why), ("g1.s1", why)]
        assert set(desk.asked) == {(4, 4)}, "as rollout.max_inflight allows"
        pairs.unreadable.clear()
        desk.offer(sample_of_pair(1, 0, attempt=2))
        await desk.until(lambda: len(desk.done) == 5)
    assert pairs.read == [0, 1, 1, 2, 1]
    assert desk.scored_batches == []


async def test_latents_that_are_not_numbers_and_what_a_dataset_does_not_hold_are_failures():
    for value in (float("nan"), float("inf")):
        policy = FlatPolicy()
        policy.codec.value = value
        desk = await read(sample_of_pair(4, 0), policy=policy)
        assert desk.failed == [("g4.s0", "ValueError: pair 4: the VAE's latents are not finite")]
    asked = sample_of_pair(0, 2), sample_of_pair(0, 0, kind="validation", sample_id="v0.p0.s0")
    desk = await read(*asked, sample_of_pair(1, 0))
    named = "ValueError: a preference dataset has two training samples per prompt; sample {} is neither of them"
    assert desk.failed == [(name, named.format(name)) for name in ("g0.s2", "v0.p0.s0")]


@pytest.mark.parametrize(("scale", "negative"), [(1.0, None), (4.0, "ugly")])
async def test_a_pair_is_read_and_encoded_whole_for_both_samples_and_a_prompt_once_with_its_negative_if_guided(
    scale, negative
):
    pairs, policy = PlainPairs(), FlatPolicy()
    spec = QwenImageSampling(height=32, width=48, true_cfg_scale=scale, negative_prompt="ugly")
    await read(*both(1, 2, 1, spec=spec), sample_of_pair(9, 1, spec=spec), pairs=pairs, policy=policy)
    assert pairs.read == [1, 2, 1, 9]
    assert policy.codec.batches == [(2, 3, 32, 48)] * 4
    assert policy.codec.prompts == [(f"prompt {pair}", negative) for pair in (1, 2, 9)]


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
async def test_the_codec_has_the_models_dtype_and_without_an_accelerator_lives_on_the_cpu(dtype, expected):
    policy = FlatPolicy()
    await read(sample_of_pair(0, 0), policy=policy, **{"model.dtype": dtype, "placement.rollout": {"gpus": 0}})
    assert policy.dtype == expected
    assert policy.codec.device == torch.device("cpu")
    await read(sample_of_pair(0, 0), policy=policy, device="meta", **{"placement.rollout": {"gpus": 1}})
    assert policy.codec.device == "meta"


async def test_the_event_loop_turns_while_it_encodes():
    policy = FlatPolicy(blocked=True)
    async with on_stage(policy=policy) as (desk, _):
        desk.offer(sample_of_pair(0, 0), ScoreJob("g8.s0", "train", Prompt(8, "x"), None))
        await desk.until(lambda: len(desk.scores) == 1)  # scored while the thread is busy
        policy.codec.go.set()
        await desk.until(lambda: len(desk.done) == 1)
    assert policy.codec.let_go == [True]


async def test_a_run_that_ends_waits_for_no_sample_and_reads_no_further():
    pairs, policy = PlainPairs(), FlatPolicy(blocked=True)
    async with on_stage(pairs, policy) as (desk, _):
        desk.offer(*(sample_of_pair(pair, 0) for pair in range(4)))
        assert await asyncio.to_thread(policy.codec.entered.wait, PATIENCE)
    assert not policy.codec.let_go  # the run is over, and the thread still blocked
    policy.codec.go.set()
    assert pairs.read == [0]
    assert desk.done == desk.failed == []


async def test_a_sample_that_takes_too_long_or_a_coordinator_that_refuses_ends_the_reader():
    policy = FlatPolicy(blocked=True)
    async with on_stage(policy=policy, **{"rollout.timeout_s": 0.02}) as (desk, run):
        desk.offer(sample_of_pair(0, 0))
        error = await failure_of(run)
        policy.codec.go.set()
        assert isinstance(error, EngineError)
        assert str(error) == "rollout-0: sample g0.s0 took longer than rollout.timeout_s = 0.02"
    async with on_stage() as (desk, run):
        desk.refuses = ValueError("2 step versions expected")
        desk.offer(sample_of_pair(0, 0))
        assert await failure_of(run) is desk.refuses


async def test_its_times_are_told():
    clock, policy = ManualClock(100.0), FlatPolicy()
    encode = policy.codec.encode_media

    def slow(media: list[Media], spec: QwenImageSampling) -> torch.Tensor:
        clock.advance(3.0)
        return encode(media, spec)

    policy.codec.encode_media = slow
    async with on_stage(policy=policy, clock=clock) as (desk, _):
        await settle()
        clock.advance(2.0)
        desk.offer(sample_of_pair(5, 0), ScoreJob("g5.s1", "train", Prompt(5, "x"), None))
        await desk.until(lambda: len(desk.done) == len(desk.scores) == 1)
    spans = {span.kind: (span.actor, span.start, span.end, span.args) for span in desk.spans if span.kind != "score"}
    assert spans == {
        "backpressured": ("rollout-0", 100.0, 102.0, {}),
        "read": ("rollout-0", 102.0, 105.0, {"sample": "g5.s0", "pair": 5}),
    }
    assert [span.args for span in desk.spans if span.kind == "score"] == [{"samples": 1}]
    assert (desk.done[0].started, desk.done[0].finished) == (102.0, 105.0)


def fitted(image: np.ndarray, height: int, width: int) -> np.ndarray:
    return fit(as_media(image), height, width).pixels


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)


def test_an_image_of_the_right_size_stays_as_it_is_and_others_are_cut_off_evenly_and_scaled_and_not_squeezed():
    assert_array_equal(fitted(noise(32, 48), 32, 48), noise(32, 48))
    assert_array_equal(fitted(noise(32, 60), 32, 48), noise(32, 60)[:, 6:54])
    assert_array_equal(fitted(noise(40, 48), 32, 48), noise(40, 48)[4:36])
    wide = np.zeros((128, 400, 3), np.uint8)
    wide[32:96, 168:232] = 255  # a white square of half the height in the middle stays one
    small, expected = fitted(wide, 32, 32), np.zeros((32, 32, 3), np.uint8)
    expected[8:24, 8:24] = 255
    assert np.abs(small.astype(int) - expected).mean() < 5
    assert (small[10:22, 10:22] > 200).all() and (small[:6] < 55).all()


sides = st.integers(1, 70)


@given(sides, sides, sides, sides, st.integers(0, 255))
@example(1, 70, 64, 64, 200)
@example(7, 3, 49, 21, 1)
def test_a_plain_image_stays_plain_at_every_size(rows, columns, height, width, value):
    found = fitted(np.full((rows, columns, 3), value, np.uint8), height, width)
    assert_array_equal(found, np.full((height, width, 3), value, np.uint8))

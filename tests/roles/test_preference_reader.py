"""Tests the preference reader: a dataset's pairs become scored samples. tests/e2e has a real file and codec."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

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

    def media(self, pair: int) -> tuple[Media, ...]:
        self.read.append(pair)
        if pair in self.unreadable:
            raise ConfigError(f"row {pair}, column chosen: not a PNG, JPEG or WebP image")
        sizes = (64, 48, 3), (32, 96, 3)
        return tuple(as_media(np.full(size, 10 * pair + i, np.uint8)) for i, size in enumerate(sizes))


class Flat:
    """A policy and its codec. Latents are six tokens of four channels, each the image's mean times `factor`; a prompt
    is its length. Images wait for `go` in the reader's thread."""

    path = "nowhere"
    dtype: torch.dtype | None = None
    device: Any = None

    def __init__(self, blocked: bool = False, factor: float = 1.0, clock: ManualClock | None = None) -> None:
        self.batches: list[tuple[int, ...]] = []
        self.prompts: list[tuple[str, str | None]] = []
        self.factor, self.clock = factor, clock
        self.go, self.entered = threading.Event(), threading.Event()
        if not blocked:
            self.go.set()

    def load_codec(self, dtype: torch.dtype) -> Flat:
        self.dtype = dtype
        return self

    def to(self, device: Any) -> Flat:
        self.device = device
        return self

    def sigmas(self, num_inference_steps: int, spec: QwenImageSampling) -> torch.Tensor:
        return torch.linspace(1, 0, num_inference_steps + 1)

    def encode(self, prompt: Prompt, spec: QwenImageSampling) -> TensorDict:
        self.prompts.append((prompt.text, spec.negative_prompt if spec.guided else None))
        return TensorDict({"length": torch.tensor(len(prompt.text))}, batch_size=[])

    def encode_media(self, media: list[Media], spec: QwenImageSampling) -> torch.Tensor:
        self.entered.set()
        assert self.go.wait(PATIENCE)
        if self.clock:
            self.clock.advance(3.0)
        pixels = torch.stack([torch.as_tensor(one.image) for one in media])
        self.batches.append(tuple(pixels.shape))
        return self.factor * pixels.float().mean((1, 2, 3))[:, None, None].expand(-1, 6, 4)


def sample_of_pair(pair: int, sample: int, **changes: Any) -> SampleRequest:
    prompt, name = Prompt(pair, f"prompt {pair}"), changes.pop("sample_id", f"g{pair}.s{sample}")
    return make_request(0, window=None, group=pair, sample=sample, prompt=prompt, sample_id=name, **changes)


def both(*pairs: int, **changes: Any) -> list[SampleRequest]:
    return [sample_of_pair(pair, sample, **changes) for pair in pairs for sample in (0, 1)]


def job(name: str) -> ScoreJob:
    return ScoreJob(name, "train", Prompt(5, "x"), None, sample=int(name[-1]))


@asynccontextmanager
async def on_stage(
    pairs: Any = None, policy: Any = None, clock: Any = None, device: Any = None, **changes: Any
) -> AsyncIterator[tuple[Desk, asyncio.Task[None]]]:
    desk, config = Desk(), make_config(**({"rollout.group_size": 2} | changes))
    pairs, policy, clock = pairs or PlainPairs(), policy or Flat(), clock or ManualClock()
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


async def test_pairs_become_trajectories():
    policy = Flat()
    desk = await read(*both(3), policy=policy)
    for sample, result in enumerate(desk.done):
        assert (result.sample_id, result.engine) == (f"g3.s{sample}", "rollout-0")
        assert (result.version, result.step_versions.spans) == (0, ())
        assert set(result.trajectory.keys()) == {"final", "conditioning", "sigmas", "steps"}
        assert result.trajectory.batch_size == torch.Size([])
        assert torch.equal(result.trajectory["final"], torch.full((6, 4), 30.0 + sample))
        assert torch.equal(result.trajectory["sigmas"], torch.linspace(1, 0, 6))
        assert (result.trajectory["steps"].shape, result.trajectory["steps"].dtype) == ((0,), torch.int64)
        assert result.trajectory["conditioning"]["length"] == len("prompt 3")
        assert_array_equal(result.media.pixels, np.full((32, 48, 3), 30 + sample, np.uint8))
    assert (policy.dtype, policy.device) == (torch.float32, torch.device("cpu"))
    other = {"model.dtype": "bfloat16", "placement.rollout": {"gpus": 1}}
    await read(sample_of_pair(0, 0), policy=policy, device="meta", **other)
    assert (policy.dtype, policy.device) == (torch.bfloat16, "meta")


async def test_unreadable_pairs_fail_alone_and_are_read_again():
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


async def test_failures_of_samples():
    desk = await read(sample_of_pair(4, 0), policy=Flat(factor=float("nan")))
    assert desk.failed == [("g4.s0", "ValueError: pair 4: the VAE's latents are not finite")]
    validation = sample_of_pair(0, 0, kind="validation", sample_id="v0")
    desk = await read(sample_of_pair(0, 2), validation, sample_of_pair(1, 0))
    named = "ValueError: a preference dataset has two training samples per prompt; sample {} is neither of them"
    assert desk.failed == [(name, named.format(name)) for name in ("g0.s2", "v0")]


@pytest.mark.parametrize(("scale", "negative"), [(1.0, None), (4.0, "ugly")])
async def test_pairs_and_prompts_are_encoded_once(scale, negative):
    pairs, policy = PlainPairs(), Flat()
    spec = QwenImageSampling(height=32, width=48, true_cfg_scale=scale, negative_prompt="ugly")
    await read(*both(1, 2, 1, spec=spec), sample_of_pair(9, 1, spec=spec), pairs=pairs, policy=policy)
    assert pairs.read == [1, 2, 1, 9]
    assert policy.batches == [(2, 3, 32, 48)] * 4
    assert policy.prompts == [(f"prompt {pair}", negative) for pair in (1, 2, 9)]


async def test_scores_and_the_end_do_not_wait_for_the_thread():
    pairs, policy = PlainPairs(), Flat(blocked=True)
    names = ["g7.s1", "g7.s0", "g12.s1", "g12.s0"]
    async with on_stage(pairs, policy) as (desk, _):
        desk.offer(*(sample_of_pair(pair, 0) for pair in range(4)))
        assert await asyncio.to_thread(policy.entered.wait, PATIENCE)
        desk.offer(*map(job, names))
        await desk.until(lambda: len(desk.scores) == 4)
    policy.go.set()
    assert [desk.scores[name].score for name in names] == [Score(0.0), Score(1.0)] * 2
    assert (pairs.read, desk.done, desk.failed) == ([0], [], [])


async def test_slow_samples_and_refusals_end_the_reader():
    policy = Flat(blocked=True)
    async with on_stage(policy=policy, **{"rollout.timeout_s": 0.02}) as (desk, run):
        desk.offer(sample_of_pair(0, 0))
        with pytest.raises(EngineError, match=r"^rollout-0: sample g0.s0 took longer than rollout.timeout_s = 0.02$"):
            await run
        policy.go.set()
    async with on_stage() as (desk, run):
        desk.refuses = ValueError("2 step versions expected")
        desk.offer(sample_of_pair(0, 0))
        assert await failure_of(run) is desk.refuses


async def test_spans():
    clock = ManualClock(100.0)
    async with on_stage(policy=Flat(clock=clock), clock=clock) as (desk, _):
        await settle()
        clock.advance(2.0)
        desk.offer(sample_of_pair(5, 0), job("g5.s1"))
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


def test_images_are_cut_and_scaled_evenly():
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    assert_array_equal(fitted(noise, 40, 60), noise)
    assert_array_equal(fitted(noise, 40, 48), noise[:, 6:54])
    assert_array_equal(fitted(noise, 32, 60), noise[4:36])
    wide = np.zeros((128, 400, 3), np.uint8)
    wide[32:96, 168:232] = 255  # a square of half the height in the middle
    small, expected = fitted(wide, 32, 32), np.zeros((32, 32, 3), np.uint8)
    expected[8:24, 8:24] = 255
    assert np.abs(small.astype(int) - expected).mean() < 5
    assert (small[10:22, 10:22] > 200).all() and (small[:6] < 55).all()


sides = st.integers(1, 70)


@given(sides, sides, sides, sides, st.integers(0, 255))
@example(1, 70, 64, 64, 200)
@example(7, 3, 49, 21, 1)
def test_plain_images_stay_plain(rows, columns, height, width, value):
    found = fitted(np.full((rows, columns, 3), value, np.uint8), height, width)
    assert_array_equal(found, np.full((height, width, 3), value, np.uint8))

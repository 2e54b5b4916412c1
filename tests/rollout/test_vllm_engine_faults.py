"""Tests what the vLLM engine does when vLLM fails or answers late, with a small vLLM in its place."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from omni_async_pipelines import qwen3_omni
from omni_async_pipelines.qwen3_omni.policy import Qwen3OmniPolicy
from omni_async_pipelines.qwen3_omni.tiny import build

pytest.importorskip("vllm")

from omni_async.rollout import vllm_engine
from omni_async.rollout.base import EngineError
from omni_async.rollout.payloads import Staged
from omni_async.rollout.vllm_engine import VllmEngine
from omni_async.rollout.vllm_token_worker import TokenWorkerExtension, _Checkpoint
from omni_async.weights.digest import verify
from tests.rollout.conftest import publish
from tests.rollout.token_answers import make_request, trained, versions
from tests.support.token_world import FAMILY, ToySampling, ToyTokenPolicy, toy_prompt

pytestmark = pytest.mark.slow  # importing vLLM takes long

SPEC = ToySampling(max_tokens=6)


class ReadByVllmToy(ToyTokenPolicy):
    def vllm_prompt(self, prompt: Any, spec: Any) -> dict[str, Any]:
        return {"prompt": prompt.text}


class SmallVllm:
    """Sends the tokens that a test sends; its worker counts them. It learns of an answer once `admits` is set."""

    def __init__(self, policy: ToyTokenPolicy) -> None:
        self.model_config = SimpleNamespace(max_model_len=100, is_encoder_decoder=False)
        self.renderer = self
        self.policy = policy
        self.admits = asyncio.Event()
        self.admits.set()
        self.submitted: dict[str, tuple[Any, Any]] = {}
        self.queues: dict[str, asyncio.Queue[Any]] = {}
        self.counts: dict[str, int] = {}
        self.calls: list[str] = []
        self.salts: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.errored = False
        self.answering = asyncio.Event()
        self.answering.set()
        self.workers = [{"refused": None}]
        self.during_swap: Callable[[], None] = lambda: None

    async def render_cmpl_async(self, prompts: list[Any]) -> list[Any]:
        return [{"prompt_token_ids": self.policy.prepare(toy_prompt(0), SPEC).ids.tolist()}]

    def send(self, name: str, token: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        row = {token: SimpleNamespace(logprob=-1.0)}
        self.queues[name].put_nowait(SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token], logprobs=[row])]))

    async def generate(self, prompt: Any, parameters: Any, name: str) -> AsyncIterator[Any]:
        await self.admits.wait()
        self.submitted[name] = prompt, parameters
        queue = self.queues[name] = asyncio.Queue()
        self.salts.append(prompt["cache_salt"])
        for _ in range(parameters.max_tokens):
            update = await queue.get()
            if isinstance(update, Exception):
                raise update
            if update is None:
                break
            yield update
            if update.outputs[0].token_ids[-1] in parameters.stop_token_ids:
                break
        del self.queues[name]

    async def abort(self, names: list[str]) -> None:
        self.calls.append("abort")
        for name in names:
            if name in self.queues:
                self.queues[name].put_nowait(None)

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        await self._call("pause")

    async def resume_generation(self) -> None:
        await self._call("resume")

    async def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        await self._call(method)
        self.during_swap()
        await self.answering.wait()
        return [worker | {"drawn": dict(self.counts)} for worker in self.workers]

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def vllm() -> SmallVllm:
    return SmallVllm(ReadByVllmToy("0"))


@pytest.fixture
def engine(vllm: SmallVllm) -> VllmEngine:
    family = msgspec.structs.replace(FAMILY, policy=f"{__name__}:ReadByVllmToy", on_vllm=True)
    engine = VllmEngine("engine", family, path="0", dtype="float32", max_batch=8)
    engine._vllm = vllm
    engine._push_check._passed = True  # test_push_check.py has its tests
    return engine


async def begun(engine: VllmEngine, vllm: SmallVllm, number: int = 2) -> list[asyncio.Task[Any]]:
    """Begins so many answers, each with a token."""
    requests = [make_request(toy_prompt(0), SPEC, k) for k in range(number)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    while len(vllm.queues) < number:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for name in vllm.queues:
        vllm.send(name)
    return tasks


async def staged(engine: VllmEngine, version: int = 1) -> None:
    policy = ReadByVllmToy("0")
    await engine.stage(*publish(version, trained(policy, versions(policy, 1, 0.0)[0])))


async def finish(tasks: list[asyncio.Task[Any]], vllm: SmallVllm) -> list[Any]:
    while not all(task.done() for task in tasks):
        for name in vllm.queues:
            if vllm.counts.get(name, 0) < vllm.submitted[name][1].max_tokens:
                vllm.send(name)
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks)


async def resumed(vllm: SmallVllm, *before: str) -> list[str]:
    """Returns the names of all answers that vLLM has now, once there are others than before."""
    while not set(vllm.queues) - {*before}:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return list(vllm.queues)


async def test_tokens_that_arrive_after_the_swap_have_the_version_that_drew_them(engine, vllm):
    tasks = await begun(engine, vllm)
    first = next(iter(vllm.queues))
    vllm.during_swap = lambda: vllm.send(first)  # counted by the worker, and still on its way
    await staged(engine)
    await engine.swap(1)
    made = await finish(tasks, vllm)
    assert [one.versions.spans for one in made] == [((0, 2), (1, 4)), ((0, 1), (1, 5))]
    assert vllm.calls == ["pause", "swap_version", "resume"]


async def test_an_answer_that_has_not_begun_uses_no_keys_and_values_of_the_version_before(engine, vllm):
    tasks = await begun(engine, vllm, 1)
    tasks.append(asyncio.create_task(engine.generate(make_request(toy_prompt(0), SPEC, 1))))
    while len(vllm.queues) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await staged(engine)
    await engine.swap(1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert vllm.salts == ["0", "0", "1"]
    made = await finish(tasks, vllm)
    assert [one.versions.spans for one in made] == [((0, 1), (1, 5)), ((1, 6),)]
    assert not engine._running


async def test_the_first_version_is_checked_although_its_memory_is_received_into_again(engine, vllm):
    engine._push_check._passed = False
    policy = ReadByVllmToy("0")
    manifest, buckets = publish(1, trained(policy, versions(policy, 1, 0.0)[0]))
    await engine.stage(manifest, buckets)
    await engine.swap(1)
    for bucket in buckets:
        bucket[:] = 1
    kept = engine._push_check._pushed
    assert kept is not None
    verify(manifest, kept.buckets)


async def test_tokens_that_the_worker_does_not_count_end_the_engine(engine, vllm):
    tasks = await begun(engine, vllm)
    await asyncio.sleep(0.01)
    vllm.counts = dict.fromkeys(vllm.counts, 0)
    await staged(engine)
    with pytest.raises(EngineError, match=r"worker counts fewer tokens of g0\.s0\.1 than it sent"):
        await engine.swap(1)
    assert [type(one) for one in await asyncio.gather(*tasks, return_exceptions=True)] == [EngineError] * 2


async def test_a_swap_aborts_answers_where_vllm_cannot_pause(engine, vllm, caplog):
    vllm.fail = {"pause": ValueError("Invalid pause mode: keep")}
    tasks = await begun(engine, vllm)
    first = list(vllm.queues)
    for version in (1, 2, 3):
        names = list(vllm.queues)
        for name in names[: version % 2 + 1]:  # they have arrived, and nobody has read them
            vllm.send(name)
        await staged(engine, version)
        await engine.swap(version)
        await resumed(vllm, *names)
    made = await finish(tasks, vllm)
    assert [one.versions.spans for one in made] == [((0, 2), (1, 1), (2, 1), (3, 2)), ((0, 2), (2, 1), (3, 3))]
    assert all(one.media.tokens == SPEC.max_tokens == len(one.tensors["log_probs"]) for one in made)
    assert vllm.calls == ["pause", "resume", *["abort", "swap_version"] * 3]
    assert [record.getMessage() for record in caplog.records] == [
        "engine: pause: ValueError: Invalid pause mode: keep; swaps abort all answers from now on and submit them"
        " again, as kv: recompute"
    ]
    asked = {name: vllm.submitted[name] for name in vllm.submitted}
    ids = asked[first[0]][0]["prompt_token_ids"]
    rows = [
        (len(prompt["prompt_token_ids"]) - len(ids), parameters.max_tokens) for prompt, parameters in asked.values()
    ]
    assert rows == [(0, 6), (0, 6), (2, 4), (2, 4), (3, 3), (2, 4), (4, 2), (3, 3)]
    assert [prompt["cache_salt"] for prompt, _ in asked.values()] == [*"00112233"]
    assert all(prompt["prompt_token_ids"][: len(ids)] == ids for prompt, _ in asked.values())


async def test_a_continued_answer_has_random_numbers_of_another_seed(engine, vllm):
    engine._pauses = False
    tasks = await begun(engine, vllm, 1)
    for version in (1, 2):
        names = list(vllm.queues)
        await staged(engine, version)
        await engine.swap(version)
        await resumed(vllm, *names)
    await finish(tasks, vllm)
    seeds = [parameters.seed for _, parameters in vllm.submitted.values()]
    assert seeds[0] == 1000 != seeds[1] == seeds[2], "a seed for each number of tokens"


async def test_an_answer_that_has_ended_at_its_abort_is_not_submitted_again(engine, vllm):
    engine._pauses = False
    tasks = await begun(engine, vllm, 3)
    full, stopped, _ = vllm.queues
    for _ in range(SPEC.max_tokens - 1):
        vllm.send(full)
    vllm.send(stopped, vllm.policy.stop_tokens[0])
    await staged(engine)
    await engine.swap(1)
    made = await finish(tasks, vllm)
    assert len(vllm.submitted) == 4
    assert [one.versions.spans for one in made] == [((0, 6),), ((0, 2),), ((0, 1), (1, 5))]
    assert [one.media.finish for one in made] == ["length", "stop", "length"]


async def test_a_swap_waits_for_a_submission_that_vllm_does_not_know_yet(engine, vllm):
    engine._pauses = False
    vllm.admits.clear()
    task = asyncio.create_task(engine.generate(make_request(toy_prompt(0), SPEC)))
    while not engine._running:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await staged(engine)
    swap = asyncio.create_task(engine.swap(1))
    while vllm.calls.count("abort") < 3:  # noqa: ASYNC110
        await asyncio.sleep(0)
    vllm.admits.set()
    await swap
    [made] = await finish([task], vllm)
    assert made.versions.spans == ((1, 6),) and len(vllm.submitted) == 2


async def test_an_answer_that_vllm_cuts_short_is_an_error(engine, vllm):
    [task] = await begun(engine, vllm, 1)
    await vllm.abort(list(vllm.queues))
    with pytest.raises(EngineError, match=r"vLLM ended g0\.s0 after 1 of 6 tokens, without a stop token"):
        await task


@pytest.mark.parametrize("step", ["pause", "swap_version", "resume"])
async def test_a_swap_that_fails_half_way_ends_the_engine(engine, vllm, step):
    tasks = await begun(engine, vllm)
    failure = TimeoutError if step == "pause" else RuntimeError
    vllm.fail = {step: failure("Worker failed with error 'no memory'")}
    await staged(engine)
    with pytest.raises(EngineError, match="no memory"):
        await engine.swap(1)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, EngineError) and "version 1 could not be loaded" in str(one) for one in outcomes)
    with pytest.raises(EngineError, match="version 1 could not be loaded"):
        await engine.generate(make_request(toy_prompt(0), SPEC))


async def test_a_vllm_that_dies_in_a_swap_fails_it_at_once(engine, vllm, monkeypatch):
    """Its client never answers the call."""
    monkeypatch.setattr(vllm_engine, "_ALIVE_S", 0.01)

    def die() -> None:
        vllm.errored = True

    vllm.during_swap = die
    vllm.answering.clear()
    await staged(engine)
    with pytest.raises(EngineError, match=r"^engine: swap_version: vLLM died before it answered$"):
        await engine.swap(1)


async def test_a_vllm_that_dies_in_a_pause_is_not_resumed(engine, vllm):
    vllm.fail, vllm.errored = {"pause": RuntimeError("no core")}, True
    await staged(engine)
    with pytest.raises(EngineError, match=r"^engine: pause: RuntimeError: no core$"):
        await engine.swap(1)
    assert vllm.calls == ["pause"]


async def test_a_vllm_that_hangs_fails_a_swap_within_the_time_out(engine, vllm):
    engine._rpc_timeout_s = 0.05
    vllm.answering.clear()
    await staged(engine)
    said = r"^engine: swap_version: vLLM did not answer within weights\.timeout_s = 0\.05$"
    with pytest.raises(EngineError, match=said):
        await engine.swap(1)


async def test_workers_that_do_not_load_the_same_end_the_engine(engine, vllm):
    vllm.workers = [{"refused": None}, {"refused": "a shape"}]
    await staged(engine)
    with pytest.raises(EngineError, match=r"engine: swap_version: vLLM's workers disagree: .*a shape"):
        await engine.swap(1)
    with pytest.raises(EngineError, match="version 1 could not be loaded"):
        await engine.generate(make_request(toy_prompt(0), SPEC))


async def test_several_devices_have_workers_of_the_same_machine(engine, monkeypatch):
    """By default vLLM would let Ray start them, where its placement group has room."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    given = {}

    def arguments(**named: Any) -> None:
        given.update(named)
        raise ValueError("no heads to split")

    monkeypatch.setattr("vllm.AsyncEngineArgs", arguments)
    for devices, backend in ((1, None), (2, "mp")):
        given.clear()
        engine._devices = devices
        with pytest.raises(EngineError, match=r"vLLM refuses to start, see rollout\.engine_args: no heads to split"):
            await engine.start()
        assert (given["tensor_parallel_size"], given.get("distributed_executor_backend")) == (devices, backend)


async def test_a_dead_vllm_fails_its_answers(engine, vllm):
    tasks = await begun(engine, vllm)
    for queue in vllm.queues.values():
        queue.put_nowait(RuntimeError("EngineCore died"))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, EngineError) and "EngineCore died" in str(one) for one in outcomes)


async def test_close_fails_all_answers(engine, vllm):
    tasks = await begun(engine, vllm)
    await engine.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(one) for one in outcomes] == ["engine was closed"] * 2 and vllm.calls == ["shutdown"]
    with pytest.raises(EngineError, match="engine is not running"):
        await engine.generate(make_request(toy_prompt(0), SPEC))
    assert not engine._running


async def test_prompts_that_vllm_reads_otherwise_are_an_error(engine):
    with pytest.raises(EngineError, match="expected equal processors"):
        await engine.generate(make_request(toy_prompt(1), SPEC))


async def test_truncated_distributions_are_refused(engine):
    class Truncated(ToySampling, frozen=True, kw_only=True):
        top_p: float = 1.0
        top_k: int = 0

    for spec in (Truncated(max_tokens=3, top_p=0.9), Truncated(max_tokens=3, top_k=5)):
        with pytest.raises(ValueError, match="top_p and top_k draw from another distribution than the trainer's"):
            await engine.generate(make_request(toy_prompt(0), spec))


def test_experts_reach_vllm_under_the_checkpoint_s_names(tmp_path):
    """vLLM refuses them on a CPU, so this is the worker's half alone."""
    policy = Qwen3OmniPolicy(str(build(tmp_path / "tiny")))
    weights = trained(policy, policy.load_components(torch.float32))
    worker = TokenWorkerExtension()
    worker.base_weights = _Checkpoint(tmp_path / "tiny", policy.components, policy.frozen, torch.float32)
    worker.fused, worker.changed = qwen3_omni.FAMILY.fused, set()
    assert weights.keys() != worker.base_weights.keys(), "experts are fused"
    found = dict(worker._weights_of(Staged(*publish(1, weights), staged_s=0.0))[0])
    assert found.keys() == worker.base_weights.keys()
    assert all(torch.equal(weight, worker.base_weights[name]) for name, weight in found.items())

    experts = next(name for name in weights if name.endswith("gate_up_proj"))
    for wrong in (weights[experts][:-1], weights[experts][:, :-2]):
        with pytest.raises(ValueError, match="weights of version 2 do not fit the model"):
            worker._weights_of(Staged(*publish(2, weights | {experts: wrong.contiguous()}), staged_s=0.0))


def test_adapters_read_the_checkpoint_of_their_modules_alone(monkeypatch):
    """Modules that the version before had changed are read again, too."""
    worker, reads = TokenWorkerExtension(), list[str]()
    checkpoint = Path(__file__).parents[2] / "recipes/quickstart/read_digits/checkpoint"
    worker.base_weights = _Checkpoint(checkpoint, ("thinker",), ("thinker.visual",), torch.float32)
    worker.fused, worker.changed = (), set()
    shapes, read = worker.base_weights.shapes(), _Checkpoint.__getitem__

    def counting(self: _Checkpoint, name: str) -> torch.Tensor:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(_Checkpoint, "__getitem__", counting)

    def swapped(version: int, *modules: str) -> set[str]:
        """Returns the modules whose weights were read, each once, for adapters of these modules."""
        reads.clear()
        pieces = {}
        for module in modules:
            rows, columns = shapes[f"{module}.weight"]
            pieces |= {
                f"{module}.lora_A.weight": torch.ones(1, columns),
                f"{module}.lora_B.weight": torch.ones(rows, 1),
            }
        published = publish(version, pieces, lora={"rank": 1, "alpha": 1.0})
        weights, _ = worker._weights_of(Staged(*published, staged_s=0.0))
        assert not reads, "before anything is written"
        changed = dict(weights)
        assert sorted(reads) == sorted(changed) and len(set(reads)) == len(reads)
        base = {name: read(worker.base_weights, name) for name in changed}
        adapted = {f"{module}.weight" for module in modules}
        assert {name for name, weight in changed.items() if not torch.equal(weight, base[name])} == adapted
        return {name.rsplit(".", 2)[0] for name in reads}

    layers = [f"thinker.model.layers.{number}" for number in range(2)]
    attention, mlp = f"{layers[0]}.self_attn", f"{layers[1]}.mlp"
    assert swapped(1, f"{attention}.q_proj", f"{attention}.o_proj") == {attention}
    assert swapped(2, f"{attention}.q_proj") == {attention}
    assert swapped(3, f"{mlp}.up_proj") == {attention, mlp}
    assert swapped(4, f"{mlp}.up_proj") == {mlp}
    full = {name: read(worker.base_weights, name) for name in shapes}
    worker._weights_of(Staged(*publish(5, full), staged_s=0.0))
    swapped(6, f"{mlp}.up_proj")
    assert len(reads) == len(shapes)

"""Implements the production engine of policies that draw tokens: plain vLLM, in child processes.

vLLM owns the batches. Answers arrive token by token. A swap pauses vLLM between two tokens, loads the version and
resumes; no answer is lost. Keys and values of the tokens before a swap are kept or computed again.

Where vLLM cannot pause, a swap aborts all answers. Each is then submitted again: its prompt and its tokens so far are
the new prompt, and the rest of its tokens remain to be drawn. Tokens that vLLM sampled and had not yet sent are drawn
again, whatever they were, so their loss does not change the distribution of answers.

Versions arrive in this process by the run's transport, while vLLM draws. vLLM's own weight transfer would pause it for
the whole transfer, and it compares no digests.

vLLM reports no versions. After the pause the worker counts the tokens of every answer, and the engine waits until it
has received as many: these have the old version, and all later ones the new version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Hashable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import is_cancelled
from omni_async.config.redact import one_line
from omni_async.plugins.families import PipelineFamily
from omni_async.rollout.answers import check_log_probs, prepared_bytes, trajectory
from omni_async.rollout.base import EngineError, StagedVersion, Trajectory
from omni_async.rollout.payloads import Staged, in_shared_memory, mapped, take_in
from omni_async.rollout.push_check import PushCheck
from omni_async.rollout.recent import Recent
from omni_async.rollout.stepping import prompt_key
from omni_async.rollout.vllm_answer import Answer, check_drawable
from omni_async.rollout.vllm_start import set_environment, start_vllm
from omni_async.tokens.policy import Prepared, ReadByVllm, load_token_policy
from omni_async.types import SampleRequest, WeightManifest, WeightReport

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOOK_S = 0.001  # between two looks at the answers that a swap waits for
_ALIVE_S = 1.0  # between two looks whether vLLM is alive


class _Ready(NamedTuple):
    """A prompt, and vLLM's form of it."""

    prompt: Prepared
    rendered: Mapping[str, Any]


class VllmEngine:
    """A `RolloutEngine` on vLLM's `AsyncLLM`, for families with `on_vllm`.

    `dtype` is the weight dtype by name; the engine may take `start_timeout_s` to start. vLLM splits every layer over
    `devices` workers. `kv`: the treatment of keys and values at a swap, as `weights.kv`. `compiled` and `engine_args`
    are the keys of `rollout`. At most `conditioning_bytes` of prepared prompts are cached, in host memory."""

    def __init__(
        self,
        name: str,
        family: PipelineFamily,
        *,
        path: str,
        dtype: str,
        max_batch: int,
        devices: int = 1,
        kv: Literal["keep", "recompute"] = "keep",
        start_timeout_s: float = 600.0,
        rpc_timeout_s: float = 600.0,
        conditioning_bytes: int = 512 * 2**20,
        compiled: Literal["auto", "on", "off"] = "auto",
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._family = family
        self._policy = policy = cast(ReadByVllm, load_token_policy(family, path))
        self._path = path
        self._dtype = dtype
        self._max_batch = max_batch
        self._devices = devices
        self._recompute = kv == "recompute"
        self._start_timeout_s = start_timeout_s
        self._rpc_timeout_s = rpc_timeout_s
        self._compiled = compiled
        self._engine_args = dict(engine_args or {})
        self._vllm: Any = None
        self._ended: EngineError | None = None
        self._version = 0
        self._serial = 0
        self._agreed = False  # whether vLLM has read a prompt as the trainer does
        self._pauses = True  # whether vLLM can pause between two tokens, as far as known
        self._staged: StagedVersion[Staged] = StagedVersion(name)
        self._push_check = PushCheck(name, policy, dtype)
        self._prompts: Recent[Hashable, _Ready] = Recent(
            conditioning_bytes,
            lambda ready: 2 * prepared_bytes(ready.prompt),  # vLLM's form has the same tensors once more
        )
        self._running: dict[str, Answer] = {}
        self._slots = asyncio.Semaphore(max_batch)
        self._preparing, self._swapping = asyncio.Lock(), asyncio.Lock()
        self._resumed = asyncio.Event()
        self._resumed.set()

    # ---- start and end -----------------------------------------------------------------------------------------------

    async def start(self) -> WeightReport:
        """Start vLLM: tens of seconds, most of it imports, without blocking the event loop."""
        set_environment(self._start_timeout_s)
        family = self._family
        limits = {"image": family.prompt_images, "audio": family.prompt_audio, "video": family.prompt_video}
        given = {"model": self._path, "dtype": self._dtype, "max_num_seqs": self._max_batch}
        given |= {"tensor_parallel_size": self._devices, "limit_mm_per_prompt": limits}
        try:
            self._vllm = await in_daemon_thread(self._start, given | self._engine_args)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = f"vLLM refuses to start, see rollout.engine_args: {one_line(str(error), 500)}"
            raise EngineError(f"{self.name}: {reason}") from error
        published = list(self._policy.components), list(self._policy.frozen), self._family.fused
        await self._call("begin_versions", self._path, *published)
        return WeightReport(engine=self.name, version=0, digest="")

    def _start(self, arguments: Mapping[str, Any]) -> Any:
        vllm = start_vllm(self._compiled, arguments)
        if self._ended is not None:  # while it started
            vllm.shutdown()
        return vllm

    async def close(self) -> None:
        self._end(EngineError(f"{self.name} was closed"))
        vllm, self._vllm = self._vllm, None
        if vllm is not None:
            await in_daemon_thread(vllm.shutdown)

    def _end(self, error: EngineError) -> None:
        """Fail all answers in flight, and all later ones."""
        self._ended = self._ended or error
        self._resumed.set()
        for answer in self._running.values():
            if answer.task is not None:
                answer.task.cancel()

    def _require_open(self) -> Any:
        if self._vllm is None:
            raise EngineError(f"{self.name} is not running")
        if self._ended is not None:
            raise EngineError(str(self._ended))
        return self._vllm

    async def _within(self, doing: str, call: Coroutine[Any, Any, T]) -> T:
        """Await a call of vLLM. Any failure becomes an EngineError.

        vLLM leaves a call unanswered if its core dies meanwhile."""
        calling = asyncio.ensure_future(call)
        try:
            async with asyncio.timeout(self._rpc_timeout_s) as deadline:
                while not (await asyncio.wait([calling], timeout=_ALIVE_S))[0]:
                    if self._require_open().errored:
                        raise EngineError(f"{self.name}: {doing}: vLLM died before it answered")
            return calling.result()
        except EngineError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(str(error), 500)}"
            if deadline.expired():
                reason = f"vLLM did not answer within weights.timeout_s = {self._rpc_timeout_s:g}"
            raise EngineError(f"{self.name}: {doing}: {reason}") from error
        finally:
            calling.cancel()

    async def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return the workers' answer to a call."""
        vllm = self._require_open()
        answers: list[dict[str, Any]] = await self._within(method, vllm.collective_rpc(method, args=arguments))
        if any(answer != answers[0] for answer in answers):
            raise EngineError(f"{self.name}: {method}: vLLM's workers disagree: {one_line(str(answers), 500)}")
        return answers[0]

    # ---- answers -----------------------------------------------------------------------------------------------------

    async def generate(self, request: SampleRequest) -> Trajectory:
        check_drawable(request)
        self._require_open()
        ready, new = await self._prepared(request)

        async def check() -> None:
            await self._push_check.once(lambda limit: self._greedy(request, ready, limit), ready.prompt, self._end)

        await check()
        answer = await self._drawn(request, ready)
        if answer.versions[-1] > 0:  # the first push came while it was drawn
            await check()
        drawn = answer.tokens, answer.log_probs, answer.versions
        return trajectory(self._policy, request, ready.prompt, *drawn, encoded=int(new))

    async def _prepared(self, request: SampleRequest) -> tuple[_Ready, bool]:
        """Return the request's prompt, and whether it was prepared for this request."""
        from vllm.exceptions import VLLMClientError
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        key = *prompt_key(request.prompt), request.spec
        async with self._preparing:  # the samples of a group arrive together
            if (known := self._prompts.get(key)) is not None:
                return known, False
            vllm = self._require_open()
            prompt = await in_daemon_thread(self._policy.prepare, request.prompt, request.spec)
            self._require_context(len(prompt.ids), request.spec.most_tokens or 0)
            given = await in_daemon_thread(self._policy.vllm_prompt, request.prompt, request.spec)
            parsed = parse_model_prompt(vllm.model_config, given)
            try:
                [rendered] = await self._within("prompt", vllm.renderer.render_cmpl_async([parsed]))
            except EngineError as error:
                if isinstance(
                    error.__cause__, ValueError | VLLMClientError
                ):  # another engine would refuse the prompt, too
                    raise ValueError(str(error)) from error
                raise
            if list(rendered["prompt_token_ids"]) != prompt.ids.tolist():
                # Where no prompt has agreed before, the processors differ, and no engine can draw.
                kind = ValueError if self._agreed else EngineError
                raise kind(
                    f"{self.name}: vLLM reads the prompt of {request.sample_id} as {len(rendered['prompt_token_ids'])}"
                    f" tokens, and the trainer reads {len(prompt.ids)} other ones; expected equal processors"
                )
            self._agreed = True
            ready = _Ready(prompt, rendered)
            self._prompts.put(key, ready)
            return ready, True

    def _require_context(self, num_tokens: int, most_tokens: int) -> None:
        context = self._require_open().model_config.max_model_len
        if num_tokens + most_tokens > context:
            raise ValueError(
                f"the prompt has {num_tokens} tokens and its answer up to {most_tokens}, and vLLM's context has"
                f" {context}; shorten the prompt, lower rollout.sampling.max_tokens, or raise"
                " rollout.engine_args.max_model_len"
            )

    async def _greedy(self, request: SampleRequest, ready: _Ready, limit: int) -> Answer:
        """Return an answer of the most probable tokens, within one version."""
        most = min(limit, request.spec.most_tokens)
        # The slot first: a swap must not wait for the answers before this one.
        async with self._slots, self._swapping:
            return await self._in_slot(Answer(request, ready.rendered, self._policy.stop_tokens, most, 0.0))

    async def _drawn(self, request: SampleRequest, ready: _Ready) -> Answer:
        spec, seed = request.spec, request.seed % 2**63
        answer = Answer(request, ready.rendered, self._policy.stop_tokens, spec.most_tokens, spec.temperature, seed)
        async with self._slots:
            return await self._in_slot(answer)

    async def _in_slot(self, answer: Answer) -> Answer:
        """Submit the answer to vLLM, and again after every swap that aborts it, until it is whole."""
        sample = answer.request.sample_id
        while not answer.is_whole:
            await self._resumed.wait()
            self._require_open()
            self._serial += 1
            name = f"{sample}.{self._serial}"
            self._running[name], answer.aborted = answer, False
            answer.task = asyncio.create_task(self._receive(name, answer))
            try:
                await answer.task
            except asyncio.CancelledError:
                if is_cancelled() or (self._ended is None and not answer.aborted):
                    raise
                if self._ended is not None:
                    raise EngineError(str(self._ended)) from None
            finally:
                del self._running[name]
            answer.drawn_by(self._version)
            if not (answer.is_whole or answer.aborted):
                ended = f"vLLM ended {sample} after {len(answer.tokens)} of {answer.most} tokens, without a stop token"
                raise EngineError(f"{self.name}: {ended}")
        return answer

    async def _receive(self, name: str, answer: Answer) -> None:
        """Append the tokens of an answer as they arrive."""
        from vllm.exceptions import VLLMClientError

        prompt, parameters = answer.rest(self._version)
        try:
            async with aclosing(self._require_open().generate(prompt, parameters, name)) as updates:
                async for update in updates:
                    [output] = update.outputs
                    rows = zip(output.token_ids, output.logprobs or (), strict=True)
                    found = [row[token].logprob for token, row in rows]
                    check_log_probs(self.name, answer.request, found, len(answer.tokens), self._version)
                    answer.tokens += output.token_ids
                    answer.log_probs += found
        except VLLMClientError as error:
            raise ValueError(f"request {answer.request.sample_id}: {one_line(str(error), 500)}") from error
        except EngineError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(str(error), 500)}"
            raise EngineError(f"{self.name}: sample {answer.request.sample_id}: {reason}") from error

    # ---- versions ----------------------------------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        return await take_in(self.name, self._staged, manifest, buckets)

    async def swap(self, version: int) -> WeightReport:
        self._require_open()
        staged = self._staged.take(version)
        async with self._swapping:
            try:
                refused, swap_s = await self._swap_in(staged)
            except BaseException as error:
                # vLLM may have paused, or hold a part of the weights.
                self._end(EngineError(f"{self.name}: version {version} could not be loaded: {error}"))
                raise
            self._resumed.set()
        if refused is not None:
            raise EngineError(f"{self.name}: version {version} could not be loaded: {refused}")
        return WeightReport(self.name, version, staged.manifest.digest, staged.staged_s, swap_s)

    async def _swap_in(self, staged: Staged) -> tuple[str | None, float]:
        """Load a version between two tokens. Return why it does not fit, or None, and the seconds of the pause."""
        vllm, manifest = self._require_open(), staged.manifest
        files = await in_daemon_thread(in_shared_memory, staged.buckets)
        try:
            started = time.perf_counter()
            self._resumed.clear()
            if not (paused := await self._paused()):
                await self._within("abort", self._abort())
            # The worker opens the memory by these names; it is freed when nobody has it open, however we end.
            paths = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
            answer = await self._call("swap_version", msgspec.msgpack.encode(manifest), paths)
            if answer["refused"] is None:
                if paused:
                    await self._within("tokens before the swap", self._until_received(answer["drawn"]))
                for name, running in self._running.items():
                    running.drawn_by(self._version)
                    if running.task is not None and not running.tokens and name not in answer["drawn"]:
                        # It waits in vLLM, and would use keys and values of this version.
                        running.aborted = running.task.cancel()
                self._version = manifest.version
                # The transport may receive its next version into the memory of this one.
                self._push_check.pushed(replace(staged, buckets=mapped(paths)))
            if paused:
                await self._within("resume", vllm.resume_generation())
            return answer["refused"], time.perf_counter() - started
        finally:
            for file in files:
                os.close(file)

    async def _paused(self) -> bool:
        """Pause vLLM between two tokens. Return False if it cannot; it is not asked again."""
        vllm = self._require_open()

        async def pause() -> None:  # another vLLM may lack the function or its arguments
            await vllm.pause_generation(mode="keep", clear_cache=self._recompute)

        if self._pauses:
            try:
                await self._within("pause", pause())
            except EngineError as error:
                if vllm.errored or isinstance(error.__cause__, TimeoutError):  # it died, or may pause later
                    raise
                if hasattr(vllm, "resume_generation"):  # the failed pause may have stopped it
                    await self._within("resume", vllm.resume_generation())
                self._pauses = False
                logger.warning("%s; swaps abort all answers from now on and submit them again, as kv: recompute", error)
        return self._pauses

    async def _abort(self) -> None:
        """Abort all answers, and wait until vLLM has ended them. They keep the tokens that have arrived."""
        vllm = self._require_open()
        while self._running:
            # More than once: vLLM does not know an answer yet whose submission has just begun.
            for answer in self._running.values():
                answer.aborted = True
            await vllm.abort(list(self._running))
            await asyncio.wait([one.task for one in self._running.values() if one.task], timeout=_LOOK_S)

    async def _until_received(self, drawn: Mapping[str, int]) -> None:
        """Wait until every answer has as many tokens as the worker drew for it before the pause.

        The worker knows neither answers that have not begun, nor those that ended before its last tokens. All tokens
        of the latter arrive before these."""
        while True:
            counts = {name: len(answer.tokens) for name, answer in self._running.items()}
            if all(count == drawn.get(name, count) for name, count in counts.items()):
                return
            if ahead := [name for name, count in counts.items() if count > drawn.get(name, count)]:
                raise EngineError(f"{self.name}: vLLM's worker counts fewer tokens of {ahead[0]} than it sent")
            await asyncio.sleep(_LOOK_S)

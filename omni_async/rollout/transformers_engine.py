"""Implements the engine of policies that draw tokens, on their contract alone.

Requests of one spec whose prompts have equal lengths share a batch. Its answers grow by a token at a time, and leave it
when they end. A swap between two tokens either keeps the keys and values of the weights before, or computes them again.

Each token of an answer is drawn with one uniform random number. These depend on the answer's seed alone, so an answer
depends neither on its neighbours nor on the device, unless these change the rounding of its logits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from omni_async.aio.threads import in_daemon_thread
from omni_async.rollout.answers import check_log_probs, check_request, prepared_bytes, trajectory
from omni_async.rollout.base import Trajectory
from omni_async.rollout.in_process import InProcessEngine, Waiting, settle
from omni_async.rollout.recent import Recent
from omni_async.rollout.stepping import prompt_key
from omni_async.tokens.policy import Cache, Prepared, TokenPolicy, is_frozen
from omni_async.types import SampleRequest
from omni_async.weights.buckets import digest_tensors


class _Ready(NamedTuple):
    """A request's prompt, and whether it was prepared for this request."""

    prompt: Prepared
    new: bool


@dataclass(eq=False)
class _Answer:
    """An answer so far. `uniform` (most_tokens,) float64 in [0, 1): a random number for each token."""

    request: SampleRequest
    prompt: Prepared
    uniform: Tensor
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)  # of float32
    versions: list[int] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """Return the rotary position of the last token."""
        return self.prompt.next_position + len(self.tokens) - 1


class TransformersEngine(InProcessEngine):
    """A `RolloutEngine` on the contract `omni_async.tokens.policy.TokenPolicy`.

    `kv`: the treatment of keys and values at a swap, as `weights.kv`. At most `conditioning_bytes` of prepared prompts
    are cached, in host memory."""

    def __init__(
        self,
        name: str,
        policy: TokenPolicy,
        *,
        dtype: torch.dtype,
        max_batch: int,
        batching: Literal["step", "request"] = "step",
        kv: Literal["keep", "recompute"] = "keep",
        device: torch.device | str | None = None,
        conditioning_bytes: int = 512 * 2**20,
    ) -> None:
        super().__init__(name, max_batch=max_batch, batching=batching, device=device)
        self._policy = policy
        self._dtype = dtype
        self._recompute = kv == "recompute"
        self._prompts: Recent[Hashable, Prepared] = Recent(conditioning_bytes, prepared_bytes)

    def _load(self) -> None:
        loaded = self._policy.load_components(self._dtype)
        self._components = {name: module.to(self._device).requires_grad_(False) for name, module in loaded.items()}
        self._digest = digest_tensors(self._published().items())

    def _published(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in super()._published().items() if not is_frozen(self._policy, name)}

    def _check(self, request: SampleRequest) -> None:
        check_request(request)

    def _batch_key(self, waiting: Waiting) -> Hashable:
        return waiting.request.spec, len(waiting.prepared.prompt.ids)

    # ---- prompts -----------------------------------------------------------------------------------------------------

    async def _prepare(self, queued: Sequence[Waiting]) -> None:
        new = [w for w in queued if w.prepared is None and not w.result.done()]
        if new:
            ready = await in_daemon_thread(self._prepare_all, [w.request for w in new])
            for waiting, outcome in zip(new, ready, strict=True):
                if isinstance(outcome, Exception):
                    settle(waiting.result, outcome)
                else:
                    waiting.prepared = outcome

    def _prepare_all(self, requests: Sequence[SampleRequest]) -> list[_Ready | Exception]:
        """Prepare the requests' prompts, in the worker thread. A prompt that cannot be prepared fails alone."""
        outcomes: list[_Ready | Exception] = []
        for request in requests:
            self._swap_pending()
            try:
                outcomes.append(self._prepared(request))
            except ValueError as error:
                outcomes.append(error)
            except Exception as error:  # noqa: BLE001 - it goes to the caller
                outcomes.append(self._as_engine_error(error))
        return outcomes

    def _prepared(self, request: SampleRequest) -> _Ready:
        key = *prompt_key(request.prompt), request.spec
        if (known := self._prompts.get(key)) is not None:
            return _Ready(known, new=False)
        made = self._policy.prepare(request.prompt, request.spec)
        self._prompts.put(key, made)
        return _Ready(made, new=True)

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _generate(self, batch: Sequence[Waiting]) -> Iterator[tuple[int, Trajectory | ValueError]]:
        answers = [_Answer(one.request, one.prepared.prompt, _uniform(one.request)) for one in batch]
        self._draw_all(answers)
        for row, (waiting, answer) in enumerate(zip(batch, answers, strict=True)):
            yield row, self._trajectory(answer, waiting.prepared.new)

    @torch.no_grad()
    def _draw_all(self, running: list[_Answer]) -> None:
        """Draw tokens until every answer has ended."""
        spec = running[0].request.spec
        cache: Cache | None = None
        while running:
            swapped = self._stepwise and self._swap_pending()
            self._require_unclosed()
            if cache is None or (swapped and self._recompute):
                so_far = self._integers([answer.tokens for answer in running])
                logits, cache = self._policy.prefill(self._components, [answer.prompt for answer in running], so_far)
            else:
                tokens = self._integers([answer.tokens[-1] for answer in running])
                positions = self._integers([answer.last_position for answer in running])
                logits = self._policy.decode(self._components, cache, tokens, positions)
            step = len(running[0].tokens)
            uniform = torch.stack([answer.uniform[step] for answer in running]).to(self._device)
            drawn, log_probs = draw(logits / spec.temperature, uniform)
            for answer, token, log_prob in zip(running, drawn.tolist(), log_probs.tolist(), strict=True):
                self._append(answer, token, log_prob)
            going = [
                row
                for row, answer in enumerate(running)
                if answer.tokens[-1] not in self._policy.stop_tokens and step + 1 < spec.most_tokens
            ]
            if 0 < len(going) < len(running):
                cache.keep(going)
            running = [running[row] for row in going]

    def _append(self, answer: _Answer, token: int, log_prob: float) -> None:
        check_log_probs(self.name, answer.request, [log_prob], len(answer.tokens), self._version)
        answer.tokens.append(token)
        answer.log_probs.append(log_prob)
        answer.versions.append(self._version)

    def _trajectory(self, answer: _Answer, new: bool) -> Trajectory:
        drawn = answer.tokens, answer.log_probs, answer.versions
        return trajectory(self._policy, answer.request, answer.prompt, *drawn, encoded=int(new))

    def _integers(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _uniform(request: SampleRequest) -> Tensor:
    """Return the random numbers of a request's tokens, made on the CPU, so that every device has the same."""
    generator = torch.Generator().manual_seed(request.seed)
    return torch.rand(request.spec.most_tokens, dtype=torch.float64, generator=generator)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token from every row's softmax, by inverting its cumulative sum in float64.

    Args:
        logits: (B, V) float32, divided by the temperature.
        uniform: (B,) float64 in [0, 1).

    Returns:
        The tokens (B,) int64, and their log-probs (B,) float32 in nats; NaN if a row's logits have one."""
    log_probs = logits.log_softmax(-1)
    summed = log_probs.double().exp().cumsum(-1)
    # Below the last sum even for the largest float64 below 1. NaN is in no place, hence the bound.
    at = uniform[:, None] * summed[:, -1:]
    tokens = torch.searchsorted(summed, at, right=True).clamp_(max=logits.shape[1] - 1)
    return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]

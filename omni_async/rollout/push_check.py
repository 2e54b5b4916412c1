"""Checks once that an engine computes with the weights that were pushed.

An engine may keep packed or fused copies of weights that a load does not reach. Its samples would then belong to
another policy, and nothing else would show it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from omni_async.aio.threads import in_daemon_thread
from omni_async.diffusion.components import named_parameters
from omni_async.rollout.base import EngineError
from omni_async.rollout.payloads import Staged
from omni_async.rollout.upload import Upload
from omni_async.tokens.packing import Answered, pack
from omni_async.tokens.policy import Prepared, TokenPolicy, is_frozen

_TOKENS = 8
# Bounds of the median difference of log-probs. Kernels in bfloat16 differ by some hundredths, a stale head by one; in a
# mixture of experts, another choice of experts moves single tokens further.
_FLOAT32_NATS, _NATS = 1e-3, 0.05


@contextmanager
def _turn() -> Iterator[None]:
    path = f"{tempfile.gettempdir()}/omni-async-push-check-{os.getuid()}"
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


class Drawn(Protocol):
    """The greedy answer: tokens and their log-probs at temperature 1."""

    tokens: list[int]
    log_probs: list[float]


class PushCheck:
    """Compares a greedy answer under the first pushed version with a forward pass in this process, on the CPU.

    That pass loads the whole model once more, in `dtype`, for as long as it takes."""

    def __init__(self, engine: str, policy: TokenPolicy, dtype: str) -> None:
        self._engine = engine
        self._policy = policy
        self._dtype = dtype
        self._passed = False
        self._pushed: Staged | None = None
        self._lock = asyncio.Lock()

    def pushed(self, staged: Staged) -> None:
        """Remember the version that the engine holds from now on, until a check has passed."""
        if not self._passed:
            self._pushed = staged

    async def once(
        self,
        draw: Callable[[int], Awaitable[Drawn]],
        prompt: Prepared,
        on_failure: Callable[[EngineError], None],
    ) -> None:
        """Check before the first answer after the first push; all answers wait for it.

        Args:
            draw: draws a greedy answer of at most so many tokens within one version.
            prompt: of the answer.
            on_failure: is called with the error before it is raised.

        Raises:
            EngineError: the engine computes with other weights."""
        if self._pushed is None:
            return
        async with self._lock:
            if self._passed:
                return
            while True:
                staged = self._pushed
                drawn = await draw(_TOKENS)
                if staged is self._pushed:  # otherwise a swap came before the answer
                    break
            nats = await in_daemon_thread(self._difference, staged, prompt, drawn)
            bound = _FLOAT32_NATS if self._dtype == "float32" else _NATS
            if not nats <= bound:
                error = EngineError(
                    f"{self._engine}: after the push of version {staged.manifest.version} its log-probs differ from"
                    f" those of the pushed weights by {nats:.2g} nats; expected at most {bound:g}; use"
                    " rollout.engine: transformers"
                )
                on_failure(error)
                raise error
            self._passed, self._pushed = True, None

    @torch.no_grad()
    def _difference(self, staged: Staged, prompt: Prepared, drawn: Drawn) -> float:
        """Return the median difference of the answer's log-probs, in nats.

        Engines of one machine take turns: each needs the memory of a whole model."""
        with _turn():
            return self._compare(staged, prompt, drawn)

    def _compare(self, staged: Staged, prompt: Prepared, drawn: Drawn) -> float:
        components = self._policy.load_components(getattr(torch, self._dtype))
        live = {name: weight.data for name, weight in named_parameters(components) if not is_frozen(self._policy, name)}
        for name, weight in staged.weights(live, live, Upload("cpu")):
            live[name].copy_(weight)
        packed = pack([Answered(prompt, torch.tensor(drawn.tokens))])
        expected = self._policy.log_probs(components, packed, 1.0)
        return (expected - torch.tensor(drawn.log_probs)).abs().median().item()

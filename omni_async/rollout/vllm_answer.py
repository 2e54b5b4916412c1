"""Holds an answer of the vLLM engine so far, and turns what remains of it into a request to vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_async.control.seeds import derive
from omni_async.rollout.answers import check_request
from omni_async.types import SampleRequest

_COLDEST = 0.01  # vLLM raises lower temperatures to this one


@dataclass(eq=False)
class Answer:
    """An answer so far.

    request: the sample's. rendered: vLLM's form of the prompt. stop_tokens: each ends the answer. most: its most
    tokens. temperature, seed: of the draws; no seed at temperature 0. versions: of its tokens up to the last swap.
    aborted: whether a swap ended its last submission to vLLM. task: receives the tokens of that submission."""

    request: SampleRequest
    rendered: Mapping[str, Any]
    stop_tokens: Sequence[int]
    most: int
    temperature: float
    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False
    task: asyncio.Task[None] | None = None

    def drawn_by(self, version: int) -> None:
        """Assign the version to all tokens that have none."""
        self.versions += [version] * (len(self.tokens) - len(self.versions))

    @property
    def is_whole(self) -> bool:
        """Whether no token may follow."""
        return len(self.tokens) >= self.most or (bool(self.tokens) and self.tokens[-1] in self.stop_tokens)

    def rest(self, version: int) -> tuple[dict[str, Any], Any]:
        """Return the prompt, followed by the tokens so far, and the parameters with which vLLM draws the other tokens.

        Keys and values are shared within `version` alone. Images and audio keep their places, before the tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        seed = self.seed
        if seed is not None and self.tokens:
            # The same seed would repeat the random numbers of the first tokens.
            seed = derive("rest", seed, len(self.tokens))
        parameters = SamplingParams(
            temperature=self.temperature,
            seed=seed,
            max_tokens=self.most - len(self.tokens),
            logprobs=0,  # of the drawn token alone
            # Nothing ends an answer but the policy's stop tokens.
            ignore_eos=True,
            stop_token_ids=list(self.stop_tokens),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        ids = [*self.rendered["prompt_token_ids"], *self.tokens]
        return {**self.rendered, "prompt_token_ids": ids, "cache_salt": str(version)}, parameters


def check_drawable(request: SampleRequest) -> None:
    """Raise ValueError for a request that is not for an answer, or whose distribution vLLM would change."""
    check_request(request)
    spec = request.spec
    if getattr(spec, "top_p", 1.0) < 1.0 or getattr(spec, "top_k", 0) > 0:
        raise ValueError(
            "rollout.sampling: top_p and top_k draw from another distribution than the trainer's; expected"
            " top_p = 1 and top_k = 0"
        )
    if spec.temperature < _COLDEST:
        raise ValueError(f"rollout.sampling.temperature: vLLM draws at {_COLDEST} at least, got {spec.temperature:g}")

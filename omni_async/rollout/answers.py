"""Checks requests for answers, and turns drawn tokens into trajectories, for every engine that draws tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from omni_async.algorithms.registry import TOKENS
from omni_async.media import Media
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.tokens.policy import Prepared, TokenPolicy
from omni_async.types import SampleRequest, VersionSpans


def check_request(request: SampleRequest) -> None:
    """Raise ValueError for fields that answers do not have, and for answers without tokens."""
    where = f"request {request.sample_id}"
    if unknown := sorted(set(request.fields) - set(TOKENS)):
        raise ValueError(f"{where}: answers have no {unknown}, but {list(TOKENS)}")
    if not request.spec.most_tokens:
        raise ValueError(f"{where}: most_tokens must be >= 1, got {request.spec.most_tokens}")


def check_log_probs(engine: str, request: SampleRequest, log_probs: Sequence[float], first: int, version: int) -> None:
    """Raise EngineError for a log-prob that is not finite.

    Args:
        engine: the engine's name, for the error.
        request: of the answer.
        log_probs: of consecutive tokens.
        first: the place of the first of them in the answer.
        version: the version that drew them."""
    for number, log_prob in enumerate(log_probs, first):
        if not math.isfinite(log_prob):
            raise EngineError(
                f"{engine}: token {number} of {request.sample_id} has the log-prob {log_prob} under version {version}"
            )


def trajectory(
    policy: TokenPolicy,
    request: SampleRequest,
    prompt: Prepared,
    tokens: Sequence[int],
    log_probs: Sequence[float],
    versions: Sequence[int],
    encoded: int,
) -> Trajectory:
    """Return an answer of T tokens with the requested fields.

    Args:
        policy: of the model, which decodes the answer.
        request: of the answer.
        prompt: as the model read it.
        tokens: T of them.
        log_probs: of each token, of float32.
        versions: that drew each token.
        encoded: how many prompts were prepared for it."""
    found = {
        "prompt": prompt.ids.int(),
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "log_probs": torch.tensor(log_probs, dtype=torch.float32),
    }
    ended = tokens[-1] in policy.stop_tokens
    media = Media(text=policy.text(tokens), finish="stop" if ended else "length", tokens=len(tokens))
    chosen = {name: found[name] for name in request.fields}
    return Trajectory(TensorDict(chosen, batch_size=[]), media, VersionSpans.of(versions), encoded=encoded)


def prepared_bytes(prepared: Prepared) -> int:
    """Return the bytes of a prepared prompt's tensors."""
    return sum(tensor.nbytes for tensor in (prepared.ids, prepared.positions, *prepared.media.values()))

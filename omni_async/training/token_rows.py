"""Checks the answers of prompt groups, and puts a rank's answers into packed rows that all ranks can run together.

A row of a micro-batch holds whole answers, each behind its prompt. The trainer prepares prompts itself. An answer is
refused if its engine read other tokens as the prompt: its log-probs would be those of another context.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.plugins.families import SamplingSpec
from omni_async.tokens.packing import Answered, cut, pack
from omni_async.tokens.policy import Packed, Prepared, TokenPolicy
from omni_async.training.device import largest_over_ranks, send
from omni_async.training.groups import GroupBatch

_DTYPES = {"prompt": torch.int32, "tokens": torch.int32, "log_probs": torch.float32}


@dataclass(frozen=True)
class TokenRows:
    """N answers of T tokens in all, on the trainer's device.

    packed: the answers behind their prompts, in this order. samples: the number of each answer in its group.
    lengths (N,) int64 and advantage (N,) float32 are of answers. behaviour_log_prob (T,) float64 and staleness (T,)
    int64 are of tokens, as is weight (T,) float64, computed over the whole update; None: not computed. overlong (N,)
    bool: the answer ends at the largest number of tokens. fresh (N,) bool: the trainer's version drew all its tokens.
    """

    packed: Packed
    samples: Sequence[int]
    lengths: Tensor
    advantage: Tensor
    behaviour_log_prob: Tensor
    staleness: Tensor
    weight: Tensor | None
    overlong: Tensor
    fresh: Tensor


class Prompts:
    """Prepared prompts of the groups of an update. A group's answers share one."""

    def __init__(self, policy: TokenPolicy) -> None:
        self._policy = policy
        self._prepared: dict[int, Prepared] = {}

    def of(self, group: GroupBatch) -> list[Prepared]:
        """Return the prompt of each of a rank's answers. Raises ValueError without prompts, and like `prepare`."""
        if group.prompts is None:
            raise ValueError(f"group {group.group} came without its prompt, which answers are trained with")
        found = []
        for (number, _), prompt in zip(group.sample_ids, group.prompts, strict=True):
            if number not in self._prepared:
                self._prepared[number] = self._policy.prepare(prompt, group.spec)
            found.append(self._prepared[number])
        return found

    def clear(self) -> None:
        self._prepared.clear()


def check_answers(
    group: GroupBatch, prompts: Sequence[Prepared], fields: Collection[str], stop_tokens: Collection[int]
) -> None:
    """Refuse a group with an unusable answer.

    Args:
        group: this rank's answers, as they arrived.
        prompts: of each answer, prepared by the trainer.
        fields: the tensors that training reads of every answer (`trajectory_fields`).
        stop_tokens: the policy's.

    Raises:
        ValueError: names the first unusable answer, and the reason."""
    answers = zip(group.trajectories, group.advantages, group.staleness, prompts, strict=True)
    for i, (trajectory, advantage, staleness, prompt) in enumerate(answers):
        try:
            _check_fields(trajectory, fields)
            _check_tokens(trajectory["tokens"].tolist(), group.spec, stop_tokens)
            if len(staleness) != len(trajectory["tokens"]):
                raise ValueError(f"{len(trajectory['tokens'])} tokens have versions of {len(staleness)}")
            if min(staleness) < 0:
                raise ValueError(f"a token has the staleness {min(staleness)}: a later version drew it")
            if not math.isfinite(advantage):
                raise ValueError(f"the advantage is {advantage}")
            _check_prompt(trajectory["prompt"].tolist(), prompt.ids.tolist())
        except ValueError as error:
            raise ValueError(f"answer {i} of {len(group.trajectories)}: {error}") from error
    if group.weights is not None:
        for row, trajectory in zip(group.weights, group.trajectories, strict=True):
            if len(row) != len(trajectory["tokens"]):
                raise ValueError(f"an answer of {len(trajectory['tokens'])} tokens has {len(row)} weights")


def _check_fields(trajectory: TensorDict, fields: Collection[str]) -> None:
    if missing := sorted({*fields, *_DTYPES} - set(trajectory.keys())):
        raise ValueError(f"the fields {missing} are missing; got {sorted(trajectory.keys())}")
    length = trajectory["tokens"].shape[:1]
    for name, dtype in _DTYPES.items():
        tensor = trajectory[name]
        shape = tensor.shape[:1] if name == "prompt" else length
        if tensor.dtype != dtype or tensor.shape != shape or tensor.ndim != 1:
            wanted = "(P,)" if name == "prompt" else tuple(length) or "(T,)"
            raise ValueError(
                f"{name} must be {dtype} of shape {wanted}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if not trajectory["log_probs"].isfinite().all():
        raise ValueError("log_probs has values that are not finite")


def _check_tokens(tokens: Sequence[int], spec: SamplingSpec, stop_tokens: Collection[int]) -> None:
    most = _most_tokens(spec)
    if not 1 <= len(tokens) <= most:
        raise ValueError(f"it has {len(tokens)} tokens, expected 1 to {most} (rollout.sampling)")
    if (lowest := min(tokens)) < 0:
        raise ValueError(f"{lowest} is no token")
    stop = next((place for place, token in enumerate(tokens) if token in stop_tokens), None)
    if stop is None and len(tokens) < most:
        raise ValueError(f"it ends after {len(tokens)} of {most} tokens without a stop token {[*stop_tokens]}")
    if stop is not None and stop < len(tokens) - 1:
        raise ValueError(f"token {stop} is the stop token {tokens[stop]}, and {len(tokens) - 1 - stop} follow")


def _check_prompt(engine: Sequence[int], own: Sequence[int]) -> None:
    if engine == own:
        return
    at = next((i for i, (a, b) in enumerate(zip(engine, own, strict=False)) if a != b), min(len(engine), len(own)))
    theirs, ours = (f"{one[at]}" if at < len(one) else "nothing" for one in (engine, own))
    raise ValueError(
        f"the engine's prompt differs from the trainer's at token {at}: {theirs} of {len(engine)} tokens, expected"
        f" {ours} of {len(own)}; both must prepare prompts alike"
    )


def _most_tokens(spec: SamplingSpec) -> int:
    if spec.most_tokens is None:
        raise ValueError(f"{type(spec).__name__} has no largest number of tokens: its family draws latents")
    return spec.most_tokens


def token_batches(
    group: GroupBatch, prompts: Sequence[Prepared], most: int, stop_tokens: Collection[int], device: torch.device
) -> Iterator[tuple[TokenRows, bool]]:
    """Yield this rank's packed rows and whether they count, then padding, so that every rank has equally many.

    Padding is the shortest answer, computed again.

    Args:
        group: this rank's answers, checked.
        prompts: of each answer.
        most: the largest number of tokens of a row.
        stop_tokens: the policy's.
        device: the rows'."""
    answered = [
        Answered(prompt, trajectory["tokens"].long())
        for prompt, trajectory in zip(prompts, group.trajectories, strict=True)
    ]
    lengths = [one.length for one in answered]
    rows = cut(lengths, most)
    (number,) = largest_over_ranks([len(rows)])
    padding = [lengths.index(min(lengths))]
    for place in range(number):
        row, own = (rows[place], group.counts) if place < len(rows) else (padding, False)
        yield _built(group, answered, row, stop_tokens, device), own


def _built(
    group: GroupBatch,
    answered: Sequence[Answered],
    samples: Sequence[int],
    stop_tokens: Collection[int],
    device: torch.device,
) -> TokenRows:
    trajectories = [group.trajectories[sample] for sample in samples]
    tokens = [answered[sample].tokens for sample in samples]
    staleness = [group.staleness[sample] for sample in samples]

    def numbers(values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return send(torch.tensor(values, dtype=dtype), device)

    weight = None
    if group.weights is not None:
        weight = numbers([value for sample in samples for value in group.weights[sample]], torch.float64)
    return TokenRows(
        packed=_sent(pack([answered[sample] for sample in samples]), device),
        samples=samples,
        lengths=numbers([len(one) for one in tokens], torch.int64),
        advantage=numbers([group.advantages[sample] for sample in samples], torch.float32),
        behaviour_log_prob=send(torch.cat([one["log_probs"].double() for one in trajectories]), device),
        staleness=numbers([age for ages in staleness for age in ages], torch.int64),
        weight=weight,
        overlong=numbers([int(one[-1]) not in stop_tokens for one in tokens], torch.bool),
        fresh=numbers([max(ages) == 0 for ages in staleness], torch.bool),
    )


def _sent(packed: Packed, device: torch.device) -> Packed:
    tensors = {name: send(value, device) for name, value in vars(packed).items() if name != "media"}
    return Packed(**tensors, media={name: send(value, device) for name, value in packed.media.items()})

"""Compares a policy that draws tokens, and a rollout engine, with transformers' own forward pass of each answer.

The reference is transformers' model and processor of the checkpoint, one sequence at a time. Everything is in float32
on the CPU, unless the row notes otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from omni_async.algorithms.registry import TOKENS
from omni_async.commands.parity.case import Case
from omni_async.commands.parity.engine import publish
from omni_async.commands.parity.model import ROUNDING, difference
from omni_async.commands.parity.table import Found, Row, failed, measure
from omni_async.data.audio_files import read_prompt_audio
from omni_async.data.image_files import read_prompt_image
from omni_async.data.video_files import read_prompt_videos
from omni_async.diffusion.components import named_parameters
from omni_async.plugins.families import PipelineFamily
from omni_async.rollout.base import EngineError, RolloutEngine, Trajectory
from omni_async.tokens.packing import Answered, pack
from omni_async.tokens.policy import TokenPolicy, is_frozen
from omni_async.types import Prompt, SampleRequest

_ANSWERS = 2  # of each prompt


class Reference:
    """Transformers' model and processor of a checkpoint."""

    def __init__(self, path: str, cls: str) -> None:
        model = getattr(transformers, cls).from_pretrained(path, dtype=torch.float32, local_files_only=True)
        self.model: nn.Module = model.eval()
        self._processor: Any = transformers.AutoProcessor.from_pretrained(path, local_files_only=True)

    def inputs(self, prompt: Prompt, spec: Any) -> dict[str, Tensor]:
        """Return the model's arguments for a prompt, from the checkpoint's chat template.

        For a prompt with videos, the spec has `video_step`, `video_frames` and `video_pixels`."""
        from PIL import Image

        files: list[dict[str, Any]] = [
            {"type": "image", "image": Image.fromarray(read_prompt_image(one).pixels)} for one in prompt.images
        ]
        more: dict[str, Any] = {}
        if prompt.video:
            videos = read_prompt_videos(prompt.video, spec.video_step, spec.video_frames, spec.video_pixels)
            files += [{"type": "video", "video": frames.pixels} for frames in videos]
            more = {"processor_kwargs": {"fps": 1 / videos[0].step, "do_sample_frames": False}}
        for one in prompt.audio:
            rate = self._processor.feature_extractor.sampling_rate
            files.append({"type": "audio", "audio": read_prompt_audio(one, rate)})
        chat = [{"role": "user", "content": [*files, {"type": "text", "text": prompt.text}]}]
        if (system := getattr(spec, "system", None)) is not None:
            chat.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        how = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return dict(self._processor.apply_chat_template(chat, **how, **more))

    @torch.no_grad()
    def log_probs(self, prompt: Prompt, spec: Any, answer: Tensor) -> Tensor:
        """Return the log-probs (T,) of an answer's tokens (T,) int64.

        The answer follows the prompt's keys and values, because it may contain the token that represents an image."""
        inputs = self.inputs(prompt, spec)
        first = self.model(**inputs, use_cache=True)
        logits = [first.logits[0, -1:]]
        if len(answer) > 1:
            seen = torch.ones(1, inputs["input_ids"].shape[1] + len(answer) - 1, dtype=torch.int64)
            how = {"attention_mask": seen, "past_key_values": first.past_key_values}
            logits.append(self.model(input_ids=answer[None, :-1], **how).logits[0])
        found = (torch.cat(logits).float() / spec.temperature).log_softmax(-1)
        return found.gather(1, answer[:, None])[:, 0]


class TokenSubject:
    """A checkpoint as the trainer loads it, and its reference. Each part is loaded at its first use."""

    def __init__(self, case: Case, path: str, policy: TokenPolicy, family: PipelineFamily) -> None:
        self.case, self.path, self.policy, self.family = case, path, policy, family

    @cached_property
    def model(self) -> dict[str, nn.Module]:
        return self.policy.load_components(torch.float32)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.path, self.family.component_class or self.family.model_index_class)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that versions consist of, by their names on the wire."""
        named = named_parameters(self.model)
        return {name: weight.detach() for name, weight in named if not is_frozen(self.policy, name)}


# ---- the policy ------------------------------------------------------------------------------------------------------


def check_token_policy(subject: TokenSubject) -> Iterator[Row]:
    """Yield a row for every check of the policy, as it completes."""
    checks = {
        "tokens of prompts": _prompts,
        "log-probs of a row": _row,
        "gradient": _gradient,
        "log-prob in bfloat16, nats": _bfloat16,
    }
    for name, check in checks.items():
        yield measure("model", name, partial(check, subject))


def _prompts(subject: TokenSubject) -> Found:
    spec, wrong = subject.case.specs[0], []
    for prompt in subject.case.prompts:
        ids = subject.reference.inputs(prompt, spec)["input_ids"][0]
        if not torch.equal(subject.policy.prepare(prompt, spec).ids, ids):
            wrong.append(str(prompt.index))
    return Found(len(wrong), 0, f"prompts {', '.join(wrong)} differ" if wrong else "")


def _answers(subject: TokenSubject) -> list[Tensor]:
    """Return an answer to each prompt: the tokens of the prompt. Answers have different lengths."""
    prepared = [subject.policy.prepare(prompt, subject.case.specs[0]) for prompt in subject.case.prompts]
    return [one.ids[-4 - number :] for number, one in enumerate(prepared)]


def _log_probs(subject: TokenSubject, components: Mapping[str, nn.Module]) -> Tensor:
    spec: Any = subject.case.specs[0]
    pairs = zip(subject.case.prompts, _answers(subject), strict=True)
    row = pack([Answered(subject.policy.prepare(prompt, spec), answer) for prompt, answer in pairs])
    return subject.policy.log_probs(components, row, spec.temperature)


def _row(subject: TokenSubject) -> Found:
    pairs = zip(subject.case.prompts, _answers(subject), strict=True)
    expected = [subject.reference.log_probs(prompt, subject.case.specs[0], answer) for prompt, answer in pairs]
    with torch.no_grad():
        found = _log_probs(subject, subject.model)
    return Found(difference(found, torch.cat(expected)), ROUNDING, f"{len(found)} tokens of {len(expected)} answers")


def _gradient(subject: TokenSubject) -> Found:
    _log_probs(subject, subject.model).sum().backward()
    named = dict(named_parameters(subject.model))
    missed = [name for name in subject.weights if (slope := named[name].grad) is None or not slope.any()]
    frozen = [name for name in named if is_frozen(subject.policy, name) and named[name].grad is not None]
    for parameter in named.values():
        parameter.grad = None
    note = f"{len(subject.weights) - len(missed)} of {len(subject.weights)} parameters, {len(named)} with towers"
    if wrong := missed + frozen:
        note = f"no gradient reaches {missed[:3]}" if missed else f"frozen, but with a gradient: {frozen[:3]}"
    return Found(len(wrong), 0, note)


def _bfloat16(subject: TokenSubject) -> Found:
    with torch.no_grad():
        half, single = (
            _log_probs(subject, components)
            for components in (subject.policy.load_components(torch.bfloat16), subject.model)
        )
    return Found(difference(half, single), None, "a token, against float32")


# ---- an engine -------------------------------------------------------------------------------------------------------


async def check_token_engine(subject: TokenSubject, engine: RolloutEngine) -> AsyncIterator[Row]:
    """Yield a row for every check of a started engine in float32, as it completes."""
    checks: dict[str, Callable[[TokenSubject, RolloutEngine], Coroutine[Any, Any, Found]]] = {
        "log-probs of a batch": _recorded,
        "same seed, same bits": _seeds,
        "log-probs after a push": _pushed,
        "wrong weights are refused": _refused,
    }
    for name, check in checks.items():
        try:
            found = await check(subject, engine)
        except Exception as error:  # noqa: BLE001 (foreign code; the next checks may find more)
            yield failed(engine.name, name, error)
        else:
            yield Row(engine.name, name, float(found.value), found.bound, found.note)


def _requests(subject: TokenSubject) -> list[SampleRequest]:
    case = subject.case
    how: dict[str, Any] = {"window": None, "noise_level": 0.0, "fields": TOKENS}
    number = _ANSWERS * len(case.prompts)
    return [case.request(case.specs[n % len(case.specs)], n, **how) for n in range(number)]


async def _draw(subject: TokenSubject, engine: RolloutEngine) -> list[Trajectory]:
    return list(await asyncio.gather(*map(engine.generate, _requests(subject))))


async def _recorded(subject: TokenSubject, engine: RolloutEngine) -> Found:
    made = await _draw(subject, engine)
    off, tokens = [], 0
    for request, one in zip(_requests(subject), made, strict=True):
        expected = subject.reference.log_probs(request.prompt, request.spec, one.tensors["tokens"].long())
        off.append(difference(one.tensors["log_probs"], expected))
        tokens += len(expected)
    return Found(_largest(off), ROUNDING, f"nats; {tokens} tokens of {len(made)} answers")


async def _seeds(subject: TokenSubject, engine: RolloutEngine) -> Found:
    made = [await _draw(subject, engine) for _ in range(2)]
    if any(not torch.equal(one.tensors["tokens"], again.tensors["tokens"]) for one, again in zip(*made, strict=True)):
        return Found(float("inf"), 0, "other tokens")
    pairs = zip(*made, strict=True)
    return Found(_largest(difference(*(one.tensors["log_probs"] for one in pair)) for pair in pairs), 0)


def _largest(differences: Iterable[float]) -> float:
    """Return the largest, or NaN if any is NaN, unlike `max`."""
    return float(torch.tensor([*differences], dtype=torch.float64).max())


async def _pushed(subject: TokenSubject, engine: RolloutEngine) -> Found:
    """Compare answers under other weights with the reference under the same weights."""
    held, changed = subject.weights, _changed(subject)
    for version, weights in ((1, changed), (0, held)):
        await engine.stage(*publish(version, weights))
        await engine.swap(version)
        _load(subject.reference, weights)
        if version:
            found = await _recorded(subject, engine)
    return found


async def _refused(subject: TokenSubject, engine: RolloutEngine) -> Found:
    """Count the wrong versions that are accepted; answers must not change."""
    weights = _changed(subject)
    first, *others = weights
    wrong = {
        "a weight that the model lacks": weights | {f"{first}.nowhere": weights[first]},
        "a version without one weight": {name: weights[name] for name in others},
    }
    taken = []
    for what, tensors in wrong.items():
        try:
            await engine.stage(*publish(2, tensors))
            await engine.swap(2)
            taken.append(what)
        except EngineError:
            pass
    off = (await _recorded(subject, engine)).value
    if not taken and not off <= ROUNDING:  # NaN too
        taken.append(f"a refused version changed log-probs by {off:.1e}")
    return Found(len(taken), 0, "; ".join(taken) or f"{len(wrong)} kinds")


def _changed(subject: TokenSubject) -> dict[str, Tensor]:
    """Return the checkpoint's weights with noise on every one."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight + 0.02 * torch.randn(weight.shape, generator=generator) for name, weight in subject.weights.items()
    }


def _load(reference: Reference, weights: Mapping[str, Tensor]) -> None:
    """Load weights into the reference, which is the first component."""
    state = {name.partition(".")[2]: weight for name, weight in weights.items()}
    if unknown := reference.model.load_state_dict(state, strict=False).unexpected_keys:
        raise ValueError(f"transformers' model has no {unknown[0]}")

"""Finds prompts that a model refuses, or reads only the beginning of. Imports no torch.

A family refuses prompts with too many tokens, or cuts them. Tokens are counted by the checkpoint's own tokenizers, in a
child process and at most once for a text. A text of so few bytes that it cannot exceed its limit is not counted. Of a
model that draws tokens, the text and the answer are counted, but not the chat's template, images and audio.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from omni_async.config import ConfigError
from omni_async.config.load import read_model_json
from omni_async.data.image_files import image_size
from omni_async.plugins.families import EncodedText, SamplingSpec
from omni_async.types import Prompt

_COUNTER = Path(__file__).with_name("count_tokens.py")
# Total size of the texts that a tokenizer counts, at about 1 MB/s on one core; the largest come first.
_MOST_BYTES = 2**25
_TIMEOUT_S = 600.0
_USUAL = (1024, 1024)  # pixels of the image that a negative prompt is tried with


class PromptLimits:
    """Compares a run's prompts with the model's limits.

    notes: warnings about texts that are cut, or that were not counted."""

    def __init__(self, checkpoint: Path, specs: Mapping[str, SamplingSpec], most_tokens: object = None) -> None:
        """Store the checkpoint and the specs.

        Args:
            checkpoint: its folder, checked.
            specs: of the samples, by the recipe's key.
            most_tokens: of a prompt and its answer, if the engine takes fewer than the model; other values are
                ignored."""
        self._checkpoint = checkpoint
        self._specs = specs
        self._most_tokens = most_tokens if isinstance(most_tokens, int) else None
        self._limits: dict[str, float] = {}
        self._contexts: dict[SamplingSpec, int | None] = {}
        self.notes: list[str] = []

    def check_negative(self) -> None:
        """Refuse negative prompts that are too long; ConfigError names the key. A cut one is added to `notes`."""
        for key, spec in self._specs.items():
            text = getattr(spec, "negative_prompt", None)
            if spec.guided and isinstance(text, str):
                problems = self._problems(f"{key}.negative_prompt", [(text, 0), (text, 1)], {key: spec})
                refused = spec.refused(text, (_USUAL,))
                for problem in (*problems.values(), *([refused] if refused else ())):
                    raise ConfigError(f"{key}.negative_prompt: {problem}")

    def problems(self, key: str, prompts: Sequence[Prompt]) -> dict[int, str]:
        """Return why the model can generate nothing from some of the prompts, by their position.

        Args:
            key: of the recipe, for notes on cut prompts.
            prompts: with their images found.

        Raises:
            ConfigError: a tokenizer cannot be loaded."""
        found = self._problems(key, [(prompt.text, len(prompt.images)) for prompt in prompts], self._specs)
        own = [i for i, prompt in enumerate(prompts) if prompt.negative_prompt is not None]
        texts = [(prompts[i].negative_prompt or "", len(prompts[i].images)) for i in own]
        for position, problem in self._problems(f"{key}, negative prompts", texts, self._specs).items():
            found.setdefault(own[position], f"negative_{problem.removeprefix('the ')}")
        for position, prompt in enumerate(prompts):
            sizes = tuple(image_size(image) for image in prompt.images)
            for spec in self._specs.values():
                if (refused := spec.refused(prompt.text, sizes)) is not None:
                    found.setdefault(position, refused)
        return found

    def lengths(self, key: str, prompts: Sequence[Prompt]) -> dict[str, tuple[float, list[int]]]:
        """Return the most tokens and the tokens of the prompts, longest first, by the folder of each tokenizer.

        `key`: the name of the prompts in a note on texts that were not counted. Raises ConfigError as `problems`."""
        texts = {
            one: None
            for prompt in prompts
            for spec in self._specs.values()
            for one in self._texts(spec, prompt.text, len(prompt.images))
            if (self._checkpoint / one.tokenizer).is_dir()
        }
        found: dict[str, tuple[float, list[int]]] = {}
        for one, count in self._counted(key, texts).items():
            found.setdefault(one.tokenizer, (self._limit(one), []))[1].append(count)
        return {tokenizer: (most, sorted(counts, reverse=True)) for tokenizer, (most, counts) in found.items()}

    def _problems(
        self, key: str, texts: Sequence[tuple[str, int]], specs: Mapping[str, SamplingSpec]
    ) -> dict[int, str]:
        asked: dict[EncodedText, list[int]] = {}
        for position, (text, images) in enumerate(texts):
            for spec in specs.values():
                for one in self._texts(spec, text, images):
                    if one.tokens_at_most() > self._limit(one):
                        places = asked.setdefault(one, [])
                        if not places or places[-1] != position:
                            places.append(position)
        counted = self._counted(key, asked)
        problems: dict[int, str] = {}
        cut: dict[tuple[str, float], dict[int, int]] = {}
        for one, count in counted.items():
            limit = self._limit(one)
            if count <= limit:
                continue
            if one.cut:
                cut.setdefault((one.tokenizer, limit), {}).update(dict.fromkeys(asked[one], count))
            elif one.answer:
                problem = (
                    f"the prompt has {count} tokens and its answer up to {one.answer}, and the context has {one.most};"
                    " shorten it, or lower rollout.sampling.max_tokens"
                )
                problems |= dict.fromkeys(asked[one], problem)
            else:
                problem = f"the prompt has {count} tokens, and the text encoder takes {limit:g} at most; shorten it"
                problems |= dict.fromkeys(asked[one], problem)
        self._note_cut(key, len(texts), cut)
        return problems

    def _texts(self, spec: SamplingSpec, text: str, images: int) -> tuple[EncodedText, ...]:
        found, answer = spec.encoded_texts(text, images), spec.most_tokens
        if answer is None or not self._checkpoint.is_dir():
            return found
        if spec not in self._contexts:
            try:
                context = spec.context(self._checkpoint)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            self._contexts[spec] = min((most for most in (context, self._most_tokens) if most), default=None)
        return tuple(replace(one, most=self._contexts[spec], answer=answer) for one in found)

    def _limit(self, one: EncodedText) -> float:
        """Return the maximum number of tokens: the family's, or the tokenizer's own; inf if neither is known."""
        folder = self._checkpoint / one.tokenizer
        if one.tokenizer not in self._limits:
            own = float("inf")
            if (settings := folder / "tokenizer_config.json").is_file():
                found = read_model_json(settings).get("model_max_length")
                own = float(found) if isinstance(found, int | float) else own
            # A checkpoint without the part cannot count; `model_files` refuses it if the part is needed.
            self._limits[one.tokenizer] = own if folder.is_dir() else float("inf")
        if one.most is None or not folder.is_dir():
            return self._limits[one.tokenizer]
        return one.most - one.answer

    def _counted(self, key: str, asked: Iterable[EncodedText]) -> dict[EncodedText, int]:
        """Count the tokens of texts, without the tokens of their templates, the largest text first."""
        by_tokenizer: dict[tuple[str, str], list[EncodedText]] = {}
        left, held = 0, dict[str, int]()
        for one in sorted(asked, key=EncodedText.tokens_at_most, reverse=True):
            held[one.tokenizer] = held.get(one.tokenizer, 0) + one.tokens_at_most()
            if held[one.tokenizer] > _MOST_BYTES:
                left += 1
            else:
                by_tokenizer.setdefault((one.tokenizer, one.cls), []).append(one)
        if left:
            self.notes.append(f"warning: {key}: the tokens of {left} more texts were not counted, which are shorter")
        if not by_tokenizer:
            return {}
        questions: list[dict[str, object]] = [
            {"folder": str(self._checkpoint / folder), "cls": cls, "texts": [one.chat or one.text for one in ones]}
            for (folder, cls), ones in by_tokenizer.items()
        ]
        found: dict[EncodedText, int] = {}
        for ones, counts in zip(by_tokenizer.values(), _count(questions), strict=True):
            found |= {one: count - one.dropped for one, count in zip(ones, counts, strict=True)}
        return found

    def _note_cut(self, key: str, number: int, cut: dict[tuple[str, float], dict[int, int]]) -> None:
        same: dict[tuple[float, int, int], list[str]] = {}
        for (tokenizer, limit), counts in cut.items():
            same.setdefault((limit, len(counts), max(counts.values())), []).append(tokenizer)
        for (limit, lines, longest), tokenizers in same.items():
            whose = " and ".join(sorted(tokenizers))
            what = f"{lines} of {number} prompts are" if key[-16:] != ".negative_prompt" else "it is"
            self.notes.append(
                f"warning: {key}: {what} cut at the {limit:g} tokens that the encoder of {whose} takes (the longest has"
                f" {longest})"
            )


def _count(questions: list[dict[str, object]]) -> list[list[int]]:
    """Count tokens in a child process. ConfigError, one line, if a tokenizer cannot be loaded."""
    command = [sys.executable, "-P", str(_COUNTER)]
    try:
        child = subprocess.run(
            command, input=json.dumps(questions), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        answer = json.loads(child.stdout)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"model.path: the prompts' tokens were not counted within {_TIMEOUT_S:g} s") from None
    except ValueError:
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"model.path: the prompts' tokens cannot be counted: {last}") from None
    if "error" in answer:
        raise ConfigError(f"model.path: {answer['folder']}: the tokenizer cannot be loaded: {answer['error']}")
    counts: list[list[int]] = answer["counts"]
    return counts

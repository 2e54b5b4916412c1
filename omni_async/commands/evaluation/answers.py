"""Writes the answers of several models to the same prompts as one text, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from omni_async.commands.evaluation.gallery import Gallery
from omni_async.commands.evaluation.models import Model
from omni_async.types import Prompt, SampleRequest

FILE = "answers.txt"
_INDENT = "    "


def answers_page(gallery: Gallery, models: Sequence[Model], requests: Sequence[SampleRequest]) -> str:
    """Return every prompt, the paths of its images, its target, and the answers with their rewards."""
    return "\n".join(_lines(gallery, models, requests)) + "\n"


def _lines(gallery: Gallery, models: Sequence[Model], requests: Sequence[SampleRequest]) -> Iterator[str]:
    scores = gallery.scores
    width = max(len(model.label) for model in models)
    before: int | None = None
    for request in requests:
        prompt = request.prompt
        if prompt.index != before:
            yield from _heading(prompt, first=before is None)
            before = prompt.index
        for model in models:
            sample = gallery.sample(model.label, request)
            if sample is None or sample.text is None:
                continue
            score = scores[model.label].get((prompt.index, request.sample))
            reward = "" if score is None else f" reward {score.value:.2f}"
            cut = " (cut)" if sample.text.finish == "length" else ""
            yield f"{model.label:<{width}} {request.sample}{reward}{cut}: {_indented(sample.text.text)}"


def _heading(prompt: Prompt, first: bool) -> Iterator[str]:
    if not first:
        yield ""
    yield f"prompt {prompt.index}: {_indented(prompt.text)}"
    yield from (f"{file.part}: {file.path}" for file in prompt.files)
    if prompt.target is not None:
        yield f"target: {_indented(prompt.target)}"


def _indented(text: str | None) -> str:
    return f"\n{_INDENT}".join((text or "").splitlines())

"""A model family that draws tokens, as another package registers it, and a checkpoint of it; without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_async.plugins import families
from omni_async.plugins.families import MediaShape, PipelineFamily, SamplingSpec
from tests.runtime.runtime_world import write_package


class AnswerSampling(SamplingSpec, frozen=True, kw_only=True):
    max_tokens: int = 8
    temperature: float = 1.0

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("text", ()),)


FAMILY = PipelineFamily(
    name="answers",
    policy="nowhere:Policy",
    model_index_class="AnswersForConditionalGeneration",
    sampling=AnswerSampling,
    components=("thinker",),
    draws="tokens",
    layout="transformers",
)


@contextmanager
def token_family(folder: Path) -> Iterator[PipelineFamily]:
    """Installs the family `answers` while the context lasts. `folder`: an empty one for the package."""
    write_package(folder, "answers", families.GROUP, answers=f"{__name__}:FAMILY")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])
        for found in (families.family_names, families.find_family):
            found.cache_clear()
        yield FAMILY
    for found in (families.family_names, families.find_family):
        found.cache_clear()


def write_answers(folder: Path) -> Path:
    """Writes a checkpoint of the family, with one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [FAMILY.model_index_class]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(one_tensor())
    return folder


def one_tensor(name: str = "thinker.w", length: int = 4) -> bytes:
    """Returns a safetensors file with a tensor of so many bytes."""
    header = json.dumps({name: {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(length)

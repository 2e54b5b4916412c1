"""Finds out whether ranks can share the tokens of a recipe's samples (`trainer.sequence_parallel`), from a checkpoint's
configuration files. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from omni_async.config import ConfigError
from omni_async.families import PipelineFamily, SamplingSpec

_KEY = "trainer.sequence_parallel"


def check_sequence(degree: int, folder: Path, family: PipelineFamily, specs: Mapping[str, SamplingSpec]) -> None:
    """Checks that `degree` ranks can share the attention heads of the checkpoint in `folder`, which was checked to be
    whole, and the tokens of the specs, each under the key that it stands at. Raises ConfigError, one line."""
    if degree == 1:
        return
    if family.attention_heads is None:
        raise ConfigError(f"{_KEY}: ranks cannot share the tokens of a {family.name!r} sample, got {degree}; use 1")
    for component in family.components:
        if not (file := folder / component / "config.json").is_file():
            continue  # a checkpoint may go without, as Wan2.2 TI2V does without a second expert
        heads = json.loads(file.read_bytes()).get(family.attention_heads)
        if not isinstance(heads, int) or heads < 1:
            raise ConfigError(f"model.path: {file} does not say its {family.attention_heads}, got {heads!r}")
        if heads % degree:
            raise ConfigError(
                f"{_KEY}: {degree} ranks share a sequence, and do not divide the {heads} attention heads of"
                f" {folder / component}; use a divisor"
            )
    for key, spec in specs.items():
        tokens = spec.shared_tokens(folder)
        if tokens is not None and tokens % degree:
            raise ConfigError(
                f"{key}: a sample has {tokens} tokens, which {_KEY} = {degree} does not divide; use another size or"
                " another degree"
            )

"""Lists the prompts of the quickstart task: a digit in a few words, with the digit itself as the target the OCR reward
expects."""

from __future__ import annotations

import json
from pathlib import Path

from omni_async.config.writing import write_atomic
from recipes.quickstart.glyphs import DIGITS

# The base model is pretrained on both sets, or it could not follow a validation prompt at all. Only the first is
# trained on by RL, so that validation shows whether what was learnt carries over to other words.
TRAIN_TEMPLATES = (
    "the digit {}",
    "a sign showing {}",
    "a bright {}",
    "draw the {}",
    "a photo of {}",
    "please write {}",
)
VALIDATION_TEMPLATES = (
    "the number {}",
    "a picture of {}",
    "now show {}",
)


def all_prompts() -> list[str]:
    """Returns every prompt of both sets."""
    return [template.format(digit) for template in (*TRAIN_TEMPLATES, *VALIDATION_TEMPLATES) for digit in DIGITS]


def write_jsonl(path: Path, templates: tuple[str, ...]) -> None:
    """Writes one line ``{"prompt": "the digit 7", "target": "7"}`` for each template and digit."""
    rows = ({"prompt": template.format(digit), "target": digit} for template in templates for digit in DIGITS)
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows).encode())

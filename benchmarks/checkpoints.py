"""Builds random checkpoints of the families' architectures, without the libraries' output."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def tiny_checkpoint(family: str, folder: Path, **shape: Any) -> str:
    """Build the family's tiny checkpoint, of this shape, and return its path."""
    tiny = import_module(
        f"omni_async_pipelines.{family}.tiny"
    )  # imports what follows in an order that a mixed torch needs
    import diffusers.utils.logging
    import transformers.utils.logging

    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    return str(tiny.build(folder, **shape))

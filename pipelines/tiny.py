"""Holds what the families' builders of tiny checkpoints have in common: writing one, and the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging


def fill_zeros(model: Any) -> None:
    """Draw the parameters that begin at zero, with which a model would ignore its input. From torch's generator."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)


def write(pipeline: Any, path: str | Path, dtype: torch.dtype) -> Path:
    """Write a pipeline in diffusers' layout to `path`, weights in `dtype`, and return the path."""
    if dtype != torch.float32:
        pipeline.to(dtype)
    pipeline.save_pretrained(path)
    return Path(path)


def main(build: Callable[..., Path], model: str, **flags: str) -> None:
    """Run the command line of a builder.

    Args:
        build: builds the checkpoint, of a folder, a seed and the flags.
        model: its name in the help.
        flags: further switches, each with its help."""
    parser = argparse.ArgumentParser(description=f"Write a tiny random {model} checkpoint (diffusers layout).")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: 0)")
    for flag, what in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=what)
    options = vars(parser.parse_args())
    diffusers_logging.set_verbosity_error()  # warns of casts that change nothing
    transformers_logging.disable_progress_bar()
    out = build(options.pop("out"), **options)
    num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    sys.stdout.write(f"{out}: {num_bytes / 1e6:.1f} MB\n")

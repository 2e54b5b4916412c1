"""Implements `omni-async export`: its arguments, its help, its progress and its last lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.commands.command_line import add_command, require_outside, run_folder
from omni_async.compat import is_mixed
from omni_async.config import ConfigError

if TYPE_CHECKING:
    from omni_async.commands.export.folder import Progress
    from omni_async.records.read.chosen import Chosen

_EXPORT = """\
Convert a checkpoint into files that diffusers loads, or transformers if the model draws tokens: a whole model, or the
adapters of a run with model.lora. The folder has a model card (README.md) with the recipe, the curves and samples of
the run:

  omni-async export runs/quickstart-20260101-120000 --out trained
  omni-async export runs/quickstart-20260101-120000 --which best --out trained
  omni-async export runs/lora-20260101-120000/checkpoints/update-000060 --merged --out trained

A run with model.lora gives its adapters (pytorch_lora_weights.safetensors, for load_lora_weights, and comfyui/ for
ComfyUI; for transformers PEFT's adapter_model.safetensors), or with --merged a whole model. Files that training left
alone are copied from the base model, or with --link hard-linked to it. The folder must not exist. It appears whole or
not at all, however the command ends.

Exit codes: 0 done, 2 there is nothing to export, the base model is missing, or --out cannot be written.
"""
_DTYPES = ("float32", "bfloat16", "float16")


def add_export(commands: Any) -> None:
    parser = add_command(
        commands,
        "export",
        "make a folder or adapters that diffusers or transformers loads",
        _EXPORT,
        f"{__name__}:export",
        "get something out",
    )
    given = "a run folder, or a checkpoint folder in it"
    parser.add_argument("run", type=run_folder, metavar="RUN|CHECKPOINT", help=given)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--which", metavar="best|last|N", help="of a run: by validation, or of update N (default: last)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--lora", action="store_true", help="the adapters alone (the default if the run trained any)")
    kind.add_argument("--merged", action="store_true", help="a whole model, the adapters merged into its weights")
    parser.add_argument(
        "--policy",
        choices=("drawing", "trained", "old", "ema"),
        default="drawing",
        help="the policy that generated the samples and was validated (default); the one in training; DiffusionNFT's"
        " old policy; the moving average of trainer.ema",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of trained weights (default: that of the base's; of adapters: float32, as they were trained)",
    )
    parser.add_argument("--base", type=Path, metavar="DIR", help="the base model, if it is not at model.path any more")
    parser.add_argument("--link", action="store_true", help="hard-link files that training left alone")


def export(options: argparse.Namespace) -> int:
    """Export, and print how to load the export. Raises ConfigError, one line."""
    from omni_async.commands.export.folder import leftovers, require_nothing_at
    from omni_async.records.read.chosen import choose

    require_nothing_at(options.out)
    for path in leftovers(options.out.absolute()):
        sys.stderr.write(f"omni-async: {path} was left by an export that was killed; remove it\n")

    chosen = choose(options.run, options.which, options.base)
    if options.lora and chosen.config.model.lora is None:
        raise ConfigError(f"--lora: {chosen.run.path} trained all weights and has no adapters; leave it out")
    if options.merged and chosen.config.model.lora is None:
        raise ConfigError(f"--merged: {chosen.run.path} trained all weights, so there are no adapters; leave it out")
    require_outside("--out", options.out, (chosen.folder, chosen.base, *chosen.run.parts))
    for note in chosen.notes:
        sys.stderr.write(f"omni-async: {note}\n")
    return _write(chosen, options)


def _write(chosen: Chosen, options: argparse.Namespace) -> int:
    import torch

    from omni_async.commands.export.adapter import Adapter
    from omni_async.commands.export.base import BaseModel
    from omni_async.commands.export.card import write_card
    from omni_async.commands.export.folder import whole_folder
    from omni_async.commands.export.full import FullModel
    from omni_async.commands.export.how_to_load import adapter_loading, base_name, full_loading
    from omni_async.commands.export.peft_adapter import PeftAdapter
    from omni_async.training import TrainingError
    from omni_async.training.trained import TrainedWeights

    lora = chosen.config.model.lora
    scale = 1.0 if lora is None else lora.alpha / lora.rank
    dtype = getattr(torch, options.dtype) if options.dtype else None
    content: Adapter | PeftAdapter | FullModel
    try:
        trained = TrainedWeights(chosen.folder, options.policy, chosen.family.fused)
        if not trained.drew:
            chosen = replace(chosen, round=None)  # it belongs to another policy
        # A checkpoint from elsewhere may name any component, and the names become file names of an adapter.
        if foreign := next((one for one in trained.components if one not in chosen.components), None):
            raise ConfigError(f"{chosen.folder}: it has tensors of {foreign[:80]!r}, which {chosen.base} has not")
        if lora is None or options.merged:
            base = BaseModel(chosen.base, chosen.components, chosen.family.layout)
            content, loading = FullModel(base, trained, scale, dtype, options.link), full_loading(chosen, options.out)
        else:
            if chosen.family.layout == "transformers":
                content = PeftAdapter(trained, lora.rank, scale, base_name(chosen.base), dtype)
            else:
                content = Adapter(trained, scale, chosen.family.comfyui_layers, dtype)
            loading = adapter_loading(chosen, trained.components, options.out)
        with _bar(content.nbytes) as progress, whole_folder(options.out, content.room) as folder:
            content.write(folder, progress)
            write_card(folder, chosen, trained.policy, loading)
    except TrainingError as error:
        raise ConfigError(str(error)) from None
    if bad := trained.not_finite:
        sys.stderr.write(f"omni-async: {len(bad)} trained tensors hold NaN or infinity, {bad[0]} first\n")
    reward = f", validation reward {chosen.shown_reward}" if chosen.shown_reward else ""
    sys.stdout.write(f"{options.out}: {loading.what} of update {chosen.version} of {chosen.run.run_id}{reward}\n")
    if is_mixed():
        library = chosen.family.layout
        sys.stdout.write(f"in this environment, import omni_async before {library} (docs/export.md says why)\n")
    sys.stdout.write(f"load it: {'; '.join(loading.lines)}\n")
    return 0


@contextmanager
def _bar(nbytes: int) -> Iterator[Progress]:
    """Show the written part on a terminal."""
    if not sys.stderr.isatty():
        yield lambda written: None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=nbytes)
        yield lambda written: bar.update(task, advance=written)

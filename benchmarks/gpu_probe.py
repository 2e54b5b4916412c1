"""Measures the project's own code on one accelerator, at Qwen-Image's published size: `python -m benchmarks.gpu_probe`.

Random weights of the real architecture: no checkpoint, no network, no Ray, no vLLM. A reading is printed and written
to the JSON file as soon as it is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import asked, command_parser
from benchmarks.gpu_probe_run import TABLE, Results, Section, Settings, run, to_markdown

_HELP = """\
Measure on one accelerator what the project's code costs, at Qwen-Image's published size and with random weights.

  python -m benchmarks.gpu_probe --out probe.json                      # at most 10 minutes
  python -m benchmarks.gpu_probe --only steps,mismatch --layers 30     # some sections, half the layers
  python -m benchmarks.gpu_probe --device cpu --small                  # the same code at test size

OUT gets JSON after every reading, and at the end a Markdown table of the same name. Exit codes: 0 every section ended
(memory that does not suffice is a reading), 1 a section failed or was stopped, 2 wrong usage.
"""
# Together less than 10 minutes, plus some 10 s a section to start. The most important readings come first.
SECTIONS = {
    "machine": Section("benchmarks.gpu_probe_machine:machine", 20.0, "card, driver, versions, memory, a collective"),
    "attention": Section("benchmarks.gpu_probe_machine:attention", 20.0, "attention kernels in bfloat16 and float32"),
    "steps": Section("benchmarks.gpu_probe_model:steps", 140.0, "a guided denoising step, eager and compiled"),
    "mismatch": Section("benchmarks.gpu_probe_mismatch:mismatch", 100.0, "log-ratio between kernels, in nats"),
    "trainer": Section("benchmarks.gpu_probe_trainer:trainer", 105.0, "TrainEngine with LoRA: micro-batches, export"),
    "optimizer": Section("benchmarks.gpu_probe_trainer:optimizer", 25.0, "an AdamW step, foreach and fused"),
    "swap": Section("benchmarks.gpu_probe_swap:swap", 60.0, "new weights onto the device, in several ways"),
    "vae": Section("benchmarks.gpu_probe_model:vae", 30.0, "decoding images"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.list:
        for name, section in SECTIONS.items():
            sys.stdout.write(f"{name:10} at most {section.limit_s:4.0f} s  {section.about}\n")
        return 0
    settings = Settings(options.layers, options.small, options.device)
    results = run({name: SECTIONS[name] for name in options.only}, settings, Results(asked(options)), options.out)
    if options.out is not None:
        table = options.out.with_suffix(".md")
        table.write_text(to_markdown(results), encoding="utf-8")
        sys.stdout.write(f"written: {options.out}, {table}\n")
    return 0 if all(outcome.status in ("done", "out of memory") for outcome in results.sections.values()) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("gpu_probe", _HELP)
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="JSON file for the readings (default: they are printed only)")
    add("--only", default=",".join(SECTIONS), metavar="A,B", help="sections to measure (default: all)")
    add("--list", action="store_true", help="list the sections and exit")
    add("--layers", type=int, metavar="N", help="transformer layers (default: 60, and 1 with --small)")
    add("--device", metavar="NAME", help="torch's name: cuda, npu, cpu (default: the accelerator, else the CPU)")
    add("--small", action="store_true", help="a tiny model: shows that the code runs, its numbers mean nothing")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    if unknown := [name for name in options.only if name not in SECTIONS]:
        parser.error(f"--only: no section is called {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if options.layers is None:
        options.layers = 1 if options.small else 60
    if options.layers < 1:
        parser.error(f"--layers: expected at least 1, got {options.layers}")
    if options.out is not None:
        _require_out(parser, options.out)
    if options.device is None and not (options.list or options.small):
        import torch

        if not torch.accelerator.is_available():
            parser.error(
                f"torch {torch.__version__} sees no accelerator here; --small --device cpu runs the code at test size"
            )
    return options


def _require_out(parser: argparse.ArgumentParser, out: Path) -> None:
    """Refuse an output path in a missing folder, or whose table would replace another file."""
    if not out.parent.is_dir():
        parser.error(f"--out: there is no folder {out.parent}")
    if out.suffix != ".json":
        parser.error(f"--out: expected a name that ends in .json, got {out.name}")
    table = out.with_suffix(".md")
    if table.exists() and not (table.is_file() and table.read_bytes().startswith(TABLE.encode())):
        parser.error(
            f"--out: {table} would be replaced by the table of readings, and is no such table; use another name"
        )


if __name__ == "__main__":
    sys.exit(main())

"""Implements `omni-async sample` and `omni-async eval`: arguments, help, progress, and printed output."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.commands.command_line import (
    PathsAndOverrides,
    add_command,
    live_bar,
    positive,
    print_error,
    require_outside,
)
from omni_async.config import ConfigError
from omni_async.config.reading import is_within, real_path

if TYPE_CHECKING:
    from omni_async.commands.evaluation.gallery import Gallery
    from omni_async.commands.evaluation.models import Model
    from omni_async.commands.evaluation.results import Failed
    from omni_async.commands.evaluation.settings import Settings

_SAMPLE = """\
Generate samples with a model: a folder of diffusers or transformers (a base model or an export), a run or a checkpoint.

  omni-async sample recipes/quickstart/checkpoint --prompt "the digit 7" height=64 width=64
  omni-async sample runs/quickstart-20260101-120000
  omni-async sample runs/quickstart-20260101-120000 --which best --against base --limit 8 --out before_after
  omni-async sample my_export --against runs/quickstart-20260101-120000 --prompts prompts.txt --seeds 4 --out drawn

The samples are generated in this process, without noise between steps, as validation does. A run brings its own
sampling settings, validation steps, prompts and noise. A prompt of its validation gets the same noise as in the run, so
the sample is the run's own. A plain folder uses the defaults of its family. key=value changes a key of
rollout.sampling, such as `height=64`, or any key of a recipe by its whole name, such as `model.dtype=bfloat16`.

DIR gets grid.png, and for every model a folder with its files and samples.jsonl, a table that `omni-async score` reads.
With --against every model gets the same prompts and the same noise, and the grid shows the models side by side. For
models that answer in text, DIR has answers.txt instead of grid.png.

The same command resumes an interrupted one.

Exit codes: 0 done, 1 drawing failed or a file could not be written, 2 wrong arguments, 130 Ctrl-C (samples are kept).
"""

_EVAL = """\
Compare models on the same prompts with the same noise, by the reward that the run was trained on or another's:

  omni-async eval runs/quickstart-20260101-120000
  omni-async eval runs/quickstart-20260101-120000 --which base,best --seeds 8 --out compared
  omni-async eval runs/a-20260101-120000 runs/b-20260101-130000 --which last --prompts prompts.jsonl --out compared
  omni-async eval recipes/quickstart/checkpoint my_export --recipe recipes/quickstart/quickstart.yaml --out compared

A run contributes its base and all its checkpoints, or the ones named by --which. Settings, prompts and the reward
come from the first run, or from --recipe. Every other model is compared with the first.

DIR gets filmstrip.png (a row per prompt, a column per model; for texts answers.txt), results.json and results.csv (of
the reward and all its parts: mean, 95 % interval, difference from the first model with its interval and p), scores.csv
(a row per sample), and the files of `omni-async sample`. Intervals and tests count prompts and not samples, because
samples of one prompt are alike. Holm's procedure corrects p values for the number of models. A sample without a score
is left out, and listed with the reason.

The same command resumes an interrupted one: no sample is generated or scored twice. Models can be added to DIR; other
settings are refused.

Exit codes: 0 done, 1 nothing could be scored, drawing failed or a file could not be written, 2 wrong arguments, 130
Ctrl-C (samples and scores are kept).
"""
_DRAWN, _COMPARED = Path("drawn"), Path("compared")
_QUIET_S = 60.0
_WHICH = re.compile(r"base|best|last|\d{1,18}")


def add_sample(commands: Any) -> None:
    """Add `omni-async sample` to the command line's subparsers. Imports nothing heavy."""
    parser = add_command(
        commands,
        "sample",
        "draw samples with a model, a run or a checkpoint",
        _SAMPLE,
        f"{__name__}:sample",
        "get something out",
    )
    add = parser.add_argument
    add("what", metavar="WHAT", help="a model's folder, an export, a run, or a checkpoint")
    _add_overrides(parser)
    add("--which", metavar="W", help="of a run: best (by validation), last, or a number of updates (default: last)")
    more = "also generate with this model: `base` (the base of WHAT), or anything that WHAT can be"
    add("--against", metavar="WHAT2", help=more)
    _add_drawing(parser, "1", _DRAWN)


def add_eval(commands: Any) -> None:
    """Add `omni-async eval` to the command line's subparsers. Imports nothing heavy."""
    parser = add_command(
        commands,
        "eval",
        "compare models on the same prompts and noise, with statistics",
        _EVAL,
        f"{__name__}:evaluate",
        "get something out",
    )
    add = parser.add_argument
    more = "models, runs or checkpoints; and values to override, as in `omni-async sample`"
    add("paths", nargs="+", action=PathsAndOverrides, metavar="WHAT", help=more)
    parser.set_defaults(overrides=[])
    more = "of runs: base, best, last and numbers of updates, with commas (default: base and all)"
    add("--which", type=_several, default=[], metavar="W,...", help=more)
    add("--rows", type=positive, default=8, metavar="N", help="prompts in the filmstrip (default: 8)")
    _add_drawing(parser, "the recipe's validation.samples_per_prompt", _COMPARED)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    more = "change a key of rollout.sampling, or by its whole name any of a recipe (YAML)"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=more)


def _add_drawing(parser: argparse.ArgumentParser, seeds: str, folder: Path) -> None:
    add = parser.add_argument
    more = (
        "of checkpoints, as in `omni-async export`: the policy that generated the run's samples (default), the policy"
    )
    more += " in training, DiffusionNFT's old policy, or the moving average of trainer.ema"
    add("--policy", choices=("drawing", "trained", "old", "ema"), default="drawing", help=more)
    add("--recipe", type=Path, metavar="FILE", help="a recipe for settings, prompts and reward in place of the run's")
    prompts = parser.add_mutually_exclusive_group()
    more = "a prompt; may be repeated (default: the recipe's validation.prompts)"
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help=more)
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="a table of prompts, as data.prompts")
    add("--limit", type=positive, metavar="N", help="the first N prompts alone")
    add("--seeds", type=positive, metavar="N", help=f"samples per prompt (default: {seeds})")
    add("--seed", type=int, metavar="N", help="seed of their noise (default: the recipe's run.seed)")
    add("--steps", type=positive, metavar="N", help="denoising steps (default: those of validation)")
    add("--guidance", type=float, metavar="G", help="guidance scale, under any family's name for it")
    add("--device", metavar="NAME", help="a torch device (default: the accelerator, else the CPU)")
    add("--out", type=Path, metavar="DIR", help=f"a folder for everything (default: {folder}/NAME, NAME being WHAT's)")


def _several(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not _WHICH.fullmatch(word)]:
        raise argparse.ArgumentTypeError(f"expected base, best, last or a number of updates, got {wrong[0]!r}")
    return words


# ---- sample ----------------------------------------------------------------------------------------------------------


def sample(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for wrong arguments."""
    from omni_async.commands.evaluation.models import BASE, base_of, find_model, named_apart, with_policy
    from omni_async.commands.evaluation.settings import settings_of

    models = [find_model(options.what, options.which)]
    if options.against is not None:
        other = base_of(models[0]) if options.against == BASE else find_model(options.against)
        models = named_apart([other, *models])
    models = with_policy(models, options.policy)
    _notes(models)
    settings = settings_of(options, models)
    for note in settings.notes:
        print_error(note)
    with _gallery(options, options.out or _DRAWN / _name_of(options.what), settings, models, {}) as gallery:
        code = _drawn(settings, models, gallery)
        return code or _saved(gallery, _shown(settings, models, gallery), [])


def _notes(models: Sequence[Model]) -> None:
    for note in dict.fromkeys(note for model in models for note in model.notes):
        print_error(note)


def _name_of(given: str | Path) -> str:
    return real_path(given).name or "model"


def _gallery(
    options: argparse.Namespace, out: Path, settings: Settings, models: list[Model], more: dict[str, Any]
) -> Gallery:
    from omni_async.commands.evaluation.gallery import Gallery

    for option in ("prompts", "recipe"):
        if (file := getattr(options, option)) is not None and is_within(file, out):
            raise ConfigError(f"--{option}: {file} is in {out}, which this command writes; name another --out")

    read = {folder for model in models for folder in (model.base, model.weights)}
    require_outside("--out", out, [*read, *(model.run / "checkpoints" for model in models if model.run is not None)])
    return Gallery(out, {**settings.record(), **more}, models)


def _drawn(settings: Settings, models: Sequence[Model], gallery: Gallery) -> int:
    """Draw the samples that the gallery lacks, with a bar. Returns 0, or the exit code of an early end."""
    from omni_async.commands.evaluation.drawing import draw_all

    total = len(models) * len(settings.requests())
    with live_bar("draws", "bar", "done", "{task.description}", "left", total=total) as bar:
        return _interruptible(draw_all(settings, models, gallery, bar or _now_and_then(total)))


def _now_and_then(total: int) -> Callable[[str, int], None]:
    """Return a progress callback that prints at most one line a minute, for use without a bar."""
    last_report = time.monotonic()

    def report(label: str, done: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _QUIET_S:
            last_report = time.monotonic()
            print_error(f"{label}: {done} of {total} drawn")

    return report


def _interruptible(work: Coroutine[Any, Any, Any]) -> int:
    """Run to the end. Returns 0, or the exit code of an early end; everything written before is kept."""
    from omni_async.rewards.calls import ScorerHangs
    from omni_async.rollout.base import EngineError

    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        print_error("interrupted; finished samples are kept, and the same command resumes")
        return 130
    except OSError as error:
        print_error(f"a file could not be written: {error}; finished samples are kept, and the same command resumes")
        return 1
    except (EngineError, ScorerHangs) as error:
        print_error(f"stopped: {error}")
        return 1
    return 0


def _shown(settings: Settings, models: list[Model], gallery: Gallery, rows: int | None = None) -> dict[str, Any]:
    """Return the files that show the samples, by name: a picture, or a page of texts.

    `rows`: the number of prompts in the picture of `eval`."""
    from omni_async.commands.evaluation.answers import FILE, answers_page
    from omni_async.commands.evaluation.pictures import filmstrip, grid

    requests = settings.requests()
    if settings.family.draws == "tokens":
        return {FILE: answers_page(gallery, models, requests)}
    if rows is None:
        return {"grid.png": grid(gallery, models, requests)}
    return {"filmstrip.png": filmstrip(gallery, models, requests, rows)}


def _saved(gallery: Gallery, shown: dict[str, Any], more: list[str]) -> int:
    """Save the pictures and texts that exist, and print the contents of the folder. Returns the exit code."""
    from omni_async.config.writing import replacing, write_atomic

    for name, content in shown.items():
        try:
            if isinstance(content, str):
                write_atomic(gallery.folder / name, content.encode("utf-8", "backslashreplace"))
            elif content is not None:
                with replacing(gallery.folder / name) as unfinished:
                    content.save(unfinished)
        except OSError as error:
            print_error(f"{gallery.folder / name} could not be written: {error.strerror or error}")
            return 1
    sys.stdout.write(f"{gallery.folder}: {', '.join([*shown, *more, *gallery.labels])}\n")
    return 0


# ---- eval ------------------------------------------------------------------------------------------------------------


def evaluate(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for wrong arguments."""
    from omni_async.commands.evaluation import scores
    from omni_async.commands.evaluation.models import find_models, with_policy
    from omni_async.commands.evaluation.settings import settings_of

    models = with_policy(find_models([str(path) for path in options.paths], options.which), options.policy)
    _notes(models)
    settings = settings_of(options, models)
    for note in settings.notes:
        print_error(note)
    requests = settings.requests()
    checks = scores.checks_of(settings.config, requests)
    out = options.out or _COMPARED / _name_of(options.paths[0])
    with _gallery(options, out, settings, models, {"reward": scores.record(settings.config)}) as gallery:
        if code := _drawn(settings, models, gallery):
            return code
        failed: list[Failed] = []

        async def scored(progress: Callable[[int], None]) -> None:
            failed.extend(await scores.score_all(settings.config, models, requests, checks, gallery, progress))

        with live_bar("scores", "bar", "done", "elapsed", "left", total=len(models) * len(requests)) as bar:
            if code := _interruptible(scored((lambda done: None) if bar is None else lambda done: bar("", done))):
                return code
        return _conclude(options, settings, models, gallery, failed)


def _conclude(
    options: argparse.Namespace, settings: Settings, models: list[Model], gallery: Gallery, failed: list[Failed]
) -> int:
    """Print and write the comparison. Returns the exit code."""
    from rich.console import Console

    from omni_async.commands.evaluation.results import compare, show, write

    requests, scores = settings.requests(), gallery.scores
    results = compare([model.label for model in models], scores, failed, len(requests))
    show(Console(width=max(120, Console().width), highlight=False), results)
    try:
        write(gallery.folder, results, models, requests, scores)
    except OSError as error:
        print_error(f"results could not be written: {error.strerror or error}")
        return 1
    pages = _shown(settings, models, gallery, options.rows)
    code = _saved(gallery, pages, ["results.json", "results.csv", "scores.csv"])
    return code or int(not results.rows)

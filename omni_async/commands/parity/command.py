"""Implements `omni-async parity`: its arguments, help, printed output and files."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from omni_async.commands.command_line import add_command, require_writable, write_json
from omni_async.config import ConfigError, load
from omni_async.config.load import inputs_of
from omni_async.plugins.entry_points import load_named
from omni_async.plugins.families import PipelineFamily, find_family

if TYPE_CHECKING:
    from omni_async.commands.parity.case import Case
    from omni_async.commands.parity.model import Subject
    from omni_async.commands.parity.table import Row
    from omni_async.commands.parity.tokens import TokenSubject
    from omni_async.rollout.base import RolloutEngine

ENGINES = {"latents": ("diffusers", "vllm_omni"), "tokens": ("transformers", "vllm")}  # the first runs in this process

_PARITY = """\
Show that a model family computes the right numbers: the policy equals diffusers' pipeline, or transformers' model, of
the same checkpoint, and a rollout engine equals the trainer.

  omni-async parity qwen_image
  omni-async parity stable_diffusion_3 --engine vllm_omni
  omni-async parity qwen_omni --engine vllm
  omni-async parity recipes/quickstart/quickstart.yaml --engine all
  omni-async parity my_family --engine none --json parity.json

A family's name selects the tiny checkpoints that the family builds; a recipe selects its own checkpoint and sampling
settings. Memory then holds the denoisers of both the pipeline and the trainer, in float32 on the CPU. The output has
every measured value next to its bound. If samples differ from the pipeline's, it names the first argument or layer that
differs.

Exit codes: 0 all is within bounds, 1 something is not, 2 wrong usage.
"""


def add_parity(commands: Any) -> None:
    """Add the command to the command line's subparsers. Imports nothing heavy."""
    parity = add_command(
        commands,
        "parity",
        "compare a model family with its upstream pipeline, and engines with the trainer",
        _PARITY,
        f"{__name__}:parity",
        "extend",
    )
    add = parity.add_argument
    add("target", metavar="FAMILY|RECIPE", help="the name of a family (`omni-async list`), or a YAML file")
    add("overrides", nargs="*", default=[], metavar="key.path=value", help="override a value of the recipe")
    chosen = "the engine to compare in addition to the policy (default: diffusers; of tokens: transformers)"
    engines = [name for names in ENGINES.values() for name in names]
    add("--engine", choices=(*engines, "all", "none"), help=chosen)
    add("--json", type=Path, metavar="FILE", help="also write the table as JSON")


def parity(options: argparse.Namespace) -> int:
    """Return the exit code. Raises ConfigError, one line, for wrong arguments."""
    if options.json is not None:
        require_writable("--json", options.json, _inputs(options.target, options.overrides))
    family, cases = _cases(options.target, options.overrides)
    from omni_async.commands.parity.table import HEADER, cells, line, rule

    engines = _engines(family, options.engine)
    rows: dict[str, list[Row]] = {}
    for case in cases:
        label = f"{family.name} {case.label}".rstrip()
        rows[label] = []
        with tempfile.TemporaryDirectory() as folder, _diverted(Path(folder) / "log.txt") as out:
            out.write(f"## {label}\n\n{line(HEADER)}\n{rule()}\n")
            path, case = str(case.build(Path(folder) / "checkpoint")), case.with_media(Path(folder))
            for row in _compared(family, case, path, engines):
                rows[label].append(row)
                out.write(f"{line(cells(row))}\n")
            out.write("\n")
    code = write_json(options.json, msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
    wrong = [row for found in rows.values() for row in found if not row.passed]
    if wrong:
        sys.stdout.write(f"{len(wrong)} of {sum(map(len, rows.values()))} checks failed\n")
    return 1 if wrong else code


def _engines(family: PipelineFamily, asked: str | None) -> tuple[str, ...]:
    """Return the engines to compare. Raises ConfigError for an engine that draws something else."""
    fitting = ENGINES[family.draws]
    if asked in (*fitting, "all", "none", None):
        return {"all": fitting, "none": (), None: fitting[:1]}.get(asked, (str(asked),))
    raise ConfigError(f"--engine: {family.name!r} draws {family.draws}, and {asked!r} does not; use {fitting[0]!r}")


def _inputs(target: str, overrides: list[str]) -> list[Path]:
    """Return the files that a recipe names; nothing for a family."""
    return inputs_of(Path(target), load(target, overrides)) if _is_recipe(Path(target)) else []


def _is_recipe(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") or path.is_file()


def _cases(target: str, overrides: list[str]) -> tuple[PipelineFamily, tuple[Case, ...]]:
    path = Path(target)
    if _is_recipe(path):
        return _of_recipe(path, overrides)
    if overrides:
        raise ConfigError(f"{overrides[0]}: only a recipe has values to override, {target!r} is the name of a family")
    try:
        family = find_family(target)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if family.parity is None:
        raise ConfigError(
            f"family {target!r} names no cases to compare (`parity` of its PipelineFamily); give a recipe"
        )
    return family, load_named(family.parity)


def _of_recipe(path: Path, overrides: list[str]) -> tuple[PipelineFamily, tuple[Case, ...]]:
    """Return the case of a recipe's checkpoint, with its adapters' targets and up to two of its specs."""
    from omni_async.config.load import family_of
    from omni_async.runtime.preflight.model_files import check_checkpoint

    config = load(path, overrides)
    checkpoint = Path(config.model.path)
    try:
        family = find_family(config.model.pipeline or family_of(checkpoint))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_checkpoint(checkpoint, family, {"rollout.sampling": config.rollout.sampling})

    from omni_async.commands.parity.case import Case

    own: tuple[Case, ...] = load_named(family.parity) if family.parity else ()
    specs = config.rollout.specs[:2]
    case = Case(specs=specs, build=lambda folder: checkpoint, label=str(path))
    if own:
        case = dataclasses.replace(own[0], specs=specs, build=case.build, label=case.label)
    if config.model.lora is not None:
        case = dataclasses.replace(case, targets=config.model.lora.target_modules)
    return family, (case,)


def _compared(family: PipelineFamily, case: Case, path: str, engines: Sequence[str]) -> Iterator[Row]:
    from omni_async.commands.parity.model import Subject, check_model
    from omni_async.commands.parity.tokens import TokenSubject, check_token_policy
    from omni_async.diffusion.policy import load_policy
    from omni_async.tokens.policy import load_token_policy

    subject: Subject | TokenSubject
    if family.draws == "tokens":
        subject = TokenSubject(case, path, load_token_policy(family, path), family)
        yield from check_token_policy(subject)
    else:
        subject = Subject(case, path, load_policy(family, path))
        yield from check_model(subject)
    with asyncio.Runner() as runner:
        for name in engines:
            rows = _of_engine(subject, family, name)
            while (row := runner.run(anext(rows, None))) is not None:
                yield row


async def _of_engine(subject: Subject | TokenSubject, family: PipelineFamily, name: str) -> AsyncIterator[Row]:
    from omni_async.commands.parity.engine import check_engine
    from omni_async.commands.parity.table import Row, failed
    from omni_async.commands.parity.tokens import TokenSubject, check_token_engine

    if (reason := _impossible(family, name)) is not None:
        yield Row(name, "start", None, None, reason, impossible=True)
        return
    try:
        engine = _engine(subject, family, name)
        await engine.start()
    except Exception as error:  # noqa: BLE001 (a family is foreign code)
        yield failed(name, "start", error)
        return
    found = check_token_engine(subject, engine) if isinstance(subject, TokenSubject) else check_engine(subject, engine)
    async for row in found:
        yield row
    await engine.close()


@contextmanager
def _diverted(log: Path) -> Iterator[TextIO]:
    """Redirect standard output and error to a file; yield a stream to the original standard output.

    Engines print much, prefix the output of others, and log the errors that are provoked here."""
    kept = [os.dup(number) for number in (1, 2)]
    sys.stdout.flush()
    with log.open("wb") as file, os.fdopen(os.dup(1), "w", buffering=1) as out:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield out
        finally:
            for number, to in zip((1, 2), kept, strict=True):
                os.dup2(to, number)
                os.close(to)


def _impossible(family: PipelineFamily, name: str) -> str | None:
    """Return why this machine cannot run an engine of the family; None if it may."""
    if name != "vllm":
        return None
    import torch

    from omni_async.rollout.vllm_start import refuse_experts

    try:
        refuse_experts(bool(family.fused), not torch.accelerator.is_available())
    except ValueError as error:
        return str(error)
    return None


def _engine(subject: Subject | TokenSubject, family: PipelineFamily, name: str) -> RolloutEngine:
    child_processes: dict[str, Any] = {"path": subject.path, "dtype": "float32", "max_batch": 8}
    if name == "vllm":
        if not family.on_vllm:
            raise ValueError(f"vLLM has no model of family {family.name!r}")
        from omni_async.rollout.vllm_engine import VllmEngine

        return VllmEngine(name, family, **child_processes)
    if name == "vllm_omni":
        if family.vllm_pipeline is None:
            raise ValueError(f"family {family.name!r} has no vLLM-Omni pipeline")
        from omni_async.rollout.vllm_omni_engine import VllmOmniEngine

        return VllmOmniEngine(name, family, **child_processes)
    import torch

    from omni_async.rollout.diffusers_engine import DiffusersEngine
    from omni_async.rollout.transformers_engine import TransformersEngine

    cls: Any = DiffusersEngine if name == "diffusers" else TransformersEngine
    engine: RolloutEngine = cls(name, subject.policy, dtype=torch.float32, max_batch=8, device="cpu")
    return engine

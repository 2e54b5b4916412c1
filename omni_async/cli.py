"""Implements `omni-async`, the command line.

Parsing, validation and messages only; everything heavy is imported once a command needs it.

Exit codes: 0 done, 1 the run failed or could not write a result, 2 wrong configuration or usage (one message, no
traceback), 130 interrupted. A reader of the output that leaves (`| head`) changes neither the code nor what is done.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_async import __version__
from omni_async.aio.threads import busy
from omni_async.commands.bench.command import add_bench
from omni_async.commands.command_line import add_command, require_writable
from omni_async.commands.evaluation.command import add_eval, add_sample
from omni_async.commands.export.command import add_export
from omni_async.commands.operate import add_operations, operate
from omni_async.commands.parity.command import add_parity
from omni_async.commands.report.command import add_report
from omni_async.commands.scaffold.command import INIT, add_init
from omni_async.commands.scoring.command import add_score
from omni_async.commands.serve_reward import add_serve_reward
from omni_async.commands.simulate import add_simulate
from omni_async.commands.tune import add_tune
from omni_async.commands.watch.command import add_watch
from omni_async.config import Config, ConfigError, load, resolved_yaml
from omni_async.config.redact import one_line, redact_text
from omni_async.config.writing import write_atomic
from omni_async.plugins.entry_points import not_one_of

_TRAIN = """\
Train from a recipe. Every value of the YAML file can be overridden on the command line:

  omni-async train recipes/quickstart/quickstart.yaml
  omni-async train recipes/quickstart/quickstart.yaml staleness.max_updates=0 run.name=sync
  omni-async train recipes/quickstart/quickstart.yaml rollout.workers=2 trainer.workers=2

A run leaves a folder in run.dir (default: runs/) with its configuration, ledger, metrics, samples, checkpoints,
timeline and summary.
"""

_CHECK = """\
Validate a recipe without starting anything: its values, its checkpoint folder, every line of its prompt files, its
scorers' parameters and what they need of each prompt. Scorers are loaded and score a synthetic sample (not with
--no-probe). Then print the recipe with every default filled in. What is printed is a recipe itself (credentials are
masked):

  omni-async check recipes/quickstart/quickstart.yaml
  omni-async check recipes/quickstart/quickstart.yaml trainer.updates=5 > short.yaml

With --device, estimate the memory of every role on such an accelerator instead, and refuse what does not fit. This
needs no accelerator, no prompts and no weights: where model.path has no checkpoint, the configuration of the published
model of that name is taken:

  omni-async check recipes/qwen_image_ocr/flow_grpo_lora.yaml --device h100-80g
  omni-async check recipes/qwen_image_ocr/flow_grpo_full.yaml --device h200 trainer.workers=4
  omni-async check recipes/wan22_dance/dance_grpo.yaml --device 48
"""

_LIST = """\
List what a recipe may name: model families (what media they make, which of their components are trained, on which
engines they run and how these batch), engines, trainer backends, transitions, scorers, roles and algorithms, those of
installed packages included; or one of these alone, or the recipes of the repository (which an installed package lacks):

  omni-async list
  omni-async list scorers
  omni-async list recipes
"""

_LISTED = ("families", "engines", "backends", "transitions", "scorers", "roles", "programs", "algorithms", "recipes")

_DOCS = """\
Write the configuration reference, a table of every key with its bounds, default and meaning, from the schema:

  omni-async docs
  omni-async docs --out reference.md
"""


class _Parser(argparse.ArgumentParser):
    """A parser that says of a wrong command what a recipe is told of a wrong name."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, not_one_of(value, [*action.choices]))


_ABOUT = """\
Fully asynchronous RL post-training of diffusion and flow-matching generators. From a clone to a page about a run, on
two CPU cores:

  omni-async train recipes/quickstart/quickstart.yaml
  omni-async report runs/quickstart-20260101-120000

With a model, prompts and a reward of yours: `omni-async init`. `omni-async COMMAND --help` has examples of each.
"""

_GROUPS = {
    "start": ("init", "list", "check", "train"),
    "look at a run, and steer it": ("status", "watch", "report", "scale", "stop"),
    "get something out": ("sample", "eval", "export", "score"),
    "measure and predict": ("simulate", "tune", "bench"),
    "extend": ("parity", "serve-reward", "docs"),
}


class _Program(_Parser):
    """The parser of the program itself, whose help has the commands in groups; argparse knows one list."""

    commands: Any  # what argparse's `add_subparsers` returned

    def format_help(self) -> str:
        purposes = {action.dest: action.help for action in self.commands._choices_actions}
        known = {name for names in _GROUPS.values() for name in names}
        groups = {**_GROUPS, "more": tuple(name for name in purposes if name not in known)}
        width = max(map(len, purposes)) + 2
        lines = [self.format_usage(), _ABOUT]
        for title, names in groups.items():
            there = [f"  {name:<{width}}{purposes[name]}" for name in names if name in purposes]
            lines += [f"{title}:", *there, ""] if there else []
        return "\n".join([*lines, "-h, --help shows this, --version the version.", ""])


def _parser() -> argparse.ArgumentParser:
    parser = _Program(prog="omni-async")
    parser.add_argument("--version", action="version", version=f"omni-async {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    parser.commands = commands
    train = add_command(commands, "train", "train from a recipe", _TRAIN)
    check = add_command(commands, "check", "validate a recipe and print it with every default filled in", _CHECK)
    for command in (train, check):
        command.add_argument("recipe", type=Path, help="a YAML file; docs/configuration.md lists every key")
        more = "override a value of the recipe (values are YAML)"
        command.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=more)
    check.add_argument(
        "--no-probe", action="store_true", help="do not load the scorers and let them score a synthetic sample"
    )
    devices = "h100-80g, h200, h800, ascend-64g or a number of GiB"
    check.add_argument("--device", help=f"estimate the memory on such an accelerator alone: {devices}")
    add_init(add_command(commands, "init", "write a recipe for your model, prompts and reward", INIT))
    listed = add_command(commands, "list", "list model families, engines, algorithms, scorers, recipes and more", _LIST)
    listed.add_argument("what", nargs="?", choices=_LISTED, metavar="WHAT", help=f"one of {', '.join(_LISTED)}")
    docs = add_command(commands, "docs", "write the configuration reference from the schema", _DOCS)
    page = Path("docs/configuration.md")
    docs.add_argument("--out", type=Path, default=page, help=f"file to write (default: {page})")
    add_operations(commands)
    add_report(commands)
    add_watch(commands)
    add_score(commands)
    add_sample(commands)
    add_eval(commands)
    add_export(commands)
    add_bench(commands)
    add_simulate(commands)
    add_tune(commands)
    add_parity(commands)
    add_serve_reward(commands)
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; `key.path=value` may come after options, too, which argparse alone does not take."""
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        parser.exit(2)
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Without `arguments` it is this process's own, and all that is left for the process to do then is to end."""
    if arguments is None:
        sys.stdout, sys.stderr = _outliving_its_reader(sys.stdout), _outliving_its_reader(sys.stderr)
    code = _run(_parse(arguments))
    if arguments is None:
        # Python waits for threads first, that of a model which is still loading say. Nobody can catch a
        # KeyboardInterrupt by then, and it would be shown as a mistake of Python's; everything is written, so Ctrl-C
        # just ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if busy():
            _leave_now(code)
    return code


def _leave_now(code: int) -> None:
    """End the process with a call under way in a daemon thread: a scorer that hangs, or a batch that is given up.

    Python would stop such a thread inside C++ code, which aborts the process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _run(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))  # so that a scorer of your own, `my_module:MyScorer`, is found where you work
    try:
        match options.command:
            case "train":
                return _train(load(options.recipe, options.overrides))
            case "check":
                config = load(options.recipe, options.overrides)
                if options.device is None:
                    return _check(config, not options.no_probe)
                from omni_async.commands.memory.command import memory

                return memory(config, options.device)
            case "init":
                from omni_async.commands.scaffold.init import init

                return init(options)
            case "list":
                return _list(options.what)
            case "status" | "scale" | "stop":
                return operate(options)
            case "report":
                from omni_async.commands.report.command import report

                return report(options)
            case "watch":
                from omni_async.commands.watch.command import watch

                return watch(options)
            case "score":
                from omni_async.commands.scoring.command import score

                return score(options)
            case "sample":
                from omni_async.commands.evaluation.command import sample

                return sample(options)
            case "eval":
                from omni_async.commands.evaluation.command import evaluate

                return evaluate(options)
            case "export":
                from omni_async.commands.export.command import export

                return export(options)
            case "bench":
                from omni_async.commands.bench.command import bench

                return bench(options)
            case "simulate":
                from omni_async.commands.simulate import simulate_recipe

                return simulate_recipe(options)
            case "parity":
                from omni_async.commands.parity.command import parity

                return parity(options)
            case "serve-reward":
                from omni_async.commands.serve_reward import serve_reward

                return serve_reward(options)
            case "tune":
                from omni_async.commands.tune import tune_recipe

                return tune_recipe(options)
            case _:
                return _docs(options.out)
    except ConfigError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        _tell("left on Ctrl-C; nothing more is written")
        return 130


class _Output(io.FileIO):
    """A file descriptor for output that is discarded once its reader has left or its terminal is closed.

    An error would reach whatever happens to write: rich would end the process, and with it what is still to be done."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # A closed terminal's error is EIO, which is a failing disk's as well.
        self._gone = (errno.EPIPE, errno.EIO) if self.isatty() else (errno.EPIPE,)

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._gone:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def _outliving_its_reader(stream: Any) -> Any:
    """Return a stream to where `stream`, standard output or error, writes. None stays None."""
    if stream is None:
        return stream
    output = io.BufferedWriter(_Output(stream.fileno()))
    return io.TextIOWrapper(output, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)


def _train(config: Config) -> int:
    from omni_async.runtime.preflight.check import preflight
    from omni_async.runtime.preflight.resume import nothing_to_do

    if (done := nothing_to_do(config)) is not None:
        return _say(done)
    inputs = preflight(config)

    from omni_async.records.write.rundir import RunDirectoryError
    from omni_async.records.write.sinks.base import SinkUnusableError
    from omni_async.runtime.driver.train import EXIT_CODES, train

    try:
        summary = train(inputs)
    except (RunDirectoryError, SinkUnusableError) as error:
        return _refuse(str(error))
    if summary.status == "failed":
        _tell(f"the run failed: {summary.reason}")
    if summary.unwritten:
        lost = ", ".join(f"{name} ({why})" for name, why in summary.unwritten.items())
        _tell(f"not everything could be written: {lost}")
        return 1
    return EXIT_CODES[summary.status]


def _check(config: Config, probe: bool) -> int:
    from omni_async.runtime.preflight.check import preflight

    with contextlib.redirect_stdout(sys.stderr):  # what a scorer's module prints is no part of the recipe
        inputs = preflight(config)
    for note in inputs.notes:
        if note.startswith("warning: "):
            _tell(note)
    said: list[str] = []
    if probe:
        from omni_async.runtime.preflight.scorers import try_scorers

        tried = try_scorers(inputs)
        for note in tried.notes:
            _tell(note)
        said = [f"# {line}" for line in tried.answers]
    return _say("\n".join([resolved_yaml(config).rstrip(), *said]))


def _docs(out: Path) -> int:
    from omni_async.config.reference import reference

    require_writable("--out", out)
    try:
        write_atomic(out, reference().encode(), streams=True)
    except OSError as error:
        return _refuse(f"--out: cannot write {out}: {error.strerror or error}")
    return _say(f"wrote {out}")


def _list(what: str | None) -> int:
    if what == "recipes":
        from omni_async.commands.scaffold.recipe_list import recipe_lines

        return _say("\n".join(recipe_lines()))
    from omni_async.runtime.preflight.listing import listing

    return _say("\n".join(listing(what)))


def _say(text: str) -> int:
    sys.stdout.write(text + "\n")
    return 0


def _refuse(message: str) -> int:
    _tell(message)
    return 2


def _tell(message: str) -> None:
    """Write one line to stderr, whatever a prompt file or a scorer put into the message."""
    sys.stderr.write(f"omni-async: {one_line(redact_text(message))}\n")


if __name__ == "__main__":
    sys.exit(main())

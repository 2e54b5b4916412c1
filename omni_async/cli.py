"""Implements `omni-async`, the command line.

Contains only parsing, validation and messages; a command imports heavy modules when it needs them.

Exit codes: 0 done, 1 the run failed or could not write a result, 2 wrong configuration or usage (one message, no
traceback), 130 interrupted. A reader that closes the output early (`| head`) changes neither the exit code nor the
work.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omni_async import __version__
from omni_async.aio.threads import busy
from omni_async.commands.bench.command import add_bench
from omni_async.commands.check import add_check
from omni_async.commands.command_line import GROUPS, print_error
from omni_async.commands.data.command import add_data
from omni_async.commands.evaluation.command import add_eval, add_sample
from omni_async.commands.export.command import add_export
from omni_async.commands.list_names import add_list
from omni_async.commands.logs import add_logs
from omni_async.commands.operate import add_operations
from omni_async.commands.parity.command import add_parity
from omni_async.commands.reference import add_docs
from omni_async.commands.report.command import add_report
from omni_async.commands.runs import add_runs
from omni_async.commands.scaffold.command import add_init
from omni_async.commands.scoring.command import add_score
from omni_async.commands.serve_reward import add_serve_reward
from omni_async.commands.simulate import add_simulate
from omni_async.commands.train import add_train
from omni_async.commands.tune import add_tune
from omni_async.commands.watch.command import add_watch
from omni_async.config import ConfigError
from omni_async.plugins.entry_points import load_named, not_one_of
from omni_async.plugins.extras import missing_extra


class _Parser(argparse.ArgumentParser):
    """A parser that reports an unknown choice with the message for an unknown name in a recipe."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, not_one_of(value, [*action.choices]))


_ABOUT = """\
Fully asynchronous RL post-training of diffusion, flow-matching and omni models. From a clone to a page about a run, on
two CPU cores:

  omni-async train recipes/quickstart/quickstart.yaml
  omni-async report runs/quickstart-20260101-120000

With a model, prompts and a reward of yours: `omni-async init`. `omni-async COMMAND --help` has examples of each.
"""


class _Program(_Parser):
    """The program's top-level parser. Its help lists the commands in groups, which argparse does not support."""

    commands: Any  # what argparse's `add_subparsers` returned

    def format_help(self) -> str:
        shown = self.commands._choices_actions
        width = max(len(action.dest) for action in shown) + 2
        lines = [self.format_usage(), _ABOUT]
        for group in GROUPS:
            names = [action for action in shown if self.commands.choices[action.dest].get_default("group") == group]
            lines += [f"{group}:", *(f"  {action.dest:<{width}}{action.help}" for action in names), ""]
        return "\n".join([*lines, "-h, --help shows this, --version the version.", ""])


# `--trainer.updates=3`, as many programs spell it.
_OVERRIDE = re.compile(r"--[A-Za-z_][\w.]*=.*", re.DOTALL)
_TAKE_RECIPE = ("train", "check", "score", "simulate", "tune", "bench")

# In the order of the program's help.
_COMMANDS: tuple[Callable[[Any], None], ...] = (
    *(add_init, add_list, add_data, add_check, add_train),
    *(add_runs, add_operations, add_logs, add_watch, add_report),
    *(add_sample, add_eval, add_export, add_score),
    *(add_simulate, add_tune, add_bench),
    *(add_parity, add_serve_reward, add_docs),
)


def _parser() -> argparse.ArgumentParser:
    parser = _Program(prog="omni-async")
    parser.add_argument("--version", action="version", version=f"omni-async {__version__}")
    parser.commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for add in _COMMANDS:
        add(parser.commands)
    return parser


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; accept `key.path=value` after options too, which argparse alone does not.

    Accepts the spellings `--key.path=value` and, for RECIPE, `--config RECIPE`."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for the completions of a line
        import argcomplete

        argcomplete.autocomplete(parser)
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        parser.exit(2)
    if "" in (sys.argv[1:] if arguments is None else arguments):
        parser.error("an argument is empty; if it is a variable of the shell, set it")
    options, rest = parser.parse_known_args(_with_recipe(sys.argv[1:] if arguments is None else arguments))
    if hasattr(options, "overrides"):
        rest = [word.lstrip("-") if _OVERRIDE.fullmatch(word) else word for word in rest]
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        spelt = "; a value of the recipe is key.path=value" if hasattr(options, "overrides") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{spelt}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _with_recipe(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with `--config RECIPE` of commands that take a RECIPE as the positional one."""
    words = [*arguments]
    if not words or words[0] not in _TAKE_RECIPE:
        return words
    first = 2 if words[:2] == ["bench", "overlap"] else 1
    for at, word in enumerate(words):
        if word == "--config" and at + 1 < len(words):
            return [*words[:first], words[at + 1], *words[first:at], *words[at + 2 :]]
        if word.startswith("--config="):
            return [*words[:first], word.partition("=")[2], *words[first:at], *words[at + 1 :]]
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Without `arguments` it uses the arguments of this process, which must end right after this returns."""
    if arguments is None:
        sys.stdout, sys.stderr = _outliving_its_reader(sys.stdout), _outliving_its_reader(sys.stderr)
    code = _run(_parse(arguments))
    if arguments is None:
        # Python first waits for threads, such as a model that is still loading. A KeyboardInterrupt can no longer be
        # caught by then, and would look like a bug in Python. Everything is written, so Ctrl-C just ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if busy():
            _leave_now(code)
    return code


def _leave_now(code: int) -> None:
    """End the process while a daemon thread is in a call: a scorer that hangs, or an abandoned batch.

    Python would stop such a thread inside C++ code, which aborts the process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _run(options: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))  # finds a scorer in the working directory, `my_module:MyScorer`
    try:
        run: Callable[[argparse.Namespace], int] = load_named(options.handler)
        return run(options)
    except ConfigError as error:
        print_error(str(error))
        return 2
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error.name)) is None:
            raise
        print_error(missing)
        return 2
    except KeyboardInterrupt:
        print_error("left on Ctrl-C; nothing more is written")
        return 130


class _Output(io.FileIO):
    """A file descriptor that discards output once its reader has left or its terminal is closed.

    Otherwise an error would reach whichever code writes next: rich would end the process before its work is done."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # A closed terminal raises EIO, and so does a failing disk.
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
    """Return a stream that writes to the target of `stream`, standard output or error. None stays None."""
    if stream is None:
        return stream
    output = io.BufferedWriter(_Output(stream.fileno()))
    return io.TextIOWrapper(output, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)


if __name__ == "__main__":
    sys.exit(main())

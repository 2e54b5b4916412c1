"""Prompts on a terminal for values missing on the command line; without a terminal, uses the defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.prompt import Prompt

from omni_async.config import ConfigError

T = TypeVar("T")


class Questions:
    """The questions of `init`: each prompts again after a refused answer, and Enter takes its default."""

    def __init__(self, ask: bool) -> None:
        self._console = Console() if ask and sys.stdin.isatty() and sys.stdout.isatty() else None

    def answer(
        self, flag: str, given: str | None, question: str, default: str | None, read: Callable[[str], T], hint: str = ""
    ) -> T:
        """Return the answer, parsed by `read`.

        Args:
            flag: the option for this value.
            given: the option's value, if present; then no question is shown.
            question: the text of the question.
            default: the answer for just pressing Enter; None: no default.
            read: parses an answer; raises ConfigError, one line, to refuse it.
            hint: the text of the error if there is no user to answer.

        Raises ConfigError, one line."""
        if given is not None:
            return read(given)
        if self._console is None:
            if default is None:
                raise ConfigError(f"{flag}: required without a terminal: {hint or question}")
            return read(default)
        while True:
            try:
                answer = Prompt.ask(escape(question), console=self._console, default=default)
            except EOFError:
                raise ConfigError(f"{flag}: the input ended before an answer: {question}") from None
            try:
                if answer:
                    return read(answer.strip())
            except ConfigError as error:
                self._print(str(error).removeprefix(f"{flag}: "), "red")

    def say(self, text: str) -> None:
        """Show a finding as context for the next questions."""
        self._print(text, "dim")

    def _print(self, text: str, style: str) -> None:
        if self._console is not None:
            self._console.print(f"  {escape(text)}", style=style, highlight=False)

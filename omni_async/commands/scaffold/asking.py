"""Prompts on a terminal for values missing on the command line; without a terminal, uses the defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.prompt import Prompt

from omni_async.config import ConfigError

T = TypeVar("T")


class Asking(Protocol):
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

    def say(self, text: str) -> None:
        """Show a finding as context for the next questions."""


class Defaults:
    """Takes every default."""

    def answer(
        self, flag: str, given: str | None, question: str, default: str | None, read: Callable[[str], T], hint: str = ""
    ) -> T:
        value = default if given is None else given
        if value is None:
            raise ConfigError(f"{flag}: required without a terminal: {hint or question}")
        return read(value)

    def say(self, text: str) -> None:
        """Show nothing: there is no reader."""


class TerminalPrompts:
    """Prompts on a terminal, and again after a refused answer."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def answer(
        self, flag: str, given: str | None, question: str, default: str | None, read: Callable[[str], T], hint: str = ""
    ) -> T:
        if given is not None:
            return read(given)
        while True:
            try:
                said = Prompt.ask(escape(question), console=self._console, default=default)
            except EOFError:
                raise ConfigError(f"{flag}: the input ended before an answer: {question}") from None
            if not said:
                continue
            try:
                return read(said.strip())
            except ConfigError as error:
                self._console.print(f"  {escape(str(error).removeprefix(f'{flag}: '))}", style="red", highlight=False)

    def say(self, text: str) -> None:
        self._console.print(f"  {escape(text)}", style="dim", highlight=False)


def build_asking(ask: bool) -> Asking:
    """Return a terminal prompter if there is a terminal and `ask` allows it; otherwise the defaults."""
    if ask and sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalPrompts(Console())
    return Defaults()

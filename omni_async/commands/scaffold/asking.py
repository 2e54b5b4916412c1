"""Asks for what the command line left open on a terminal; elsewhere the defaults answer."""

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
        """Return what `read` makes of the answer.

        Args:
            flag: the option that would have said it.
            given: what it said, if it was there; then nothing is asked.
            question: what is asked.
            default: the answer of who just presses Enter; None: there is none.
            read: raises ConfigError, one line, for an answer that it refuses.
            hint: what to say where nobody answers.

        Raises ConfigError, one line."""

    def say(self, text: str) -> None:
        """Show what was found out, for the questions that follow."""


class Defaults:
    """Takes every default."""

    def answer(
        self, flag: str, given: str | None, question: str, default: str | None, read: Callable[[str], T], hint: str = ""
    ) -> T:
        value = default if given is None else given
        if value is None:
            raise ConfigError(f"{flag}: required where nobody is asked: {hint or question}")
        return read(value)

    def say(self, text: str) -> None:
        """Show nothing: nobody reads it."""


class TerminalPrompts:
    """Asks on a terminal, and again after an answer that is refused."""

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
    """Return what asks at the terminal if there is one and `ask` allows it, else what takes the defaults."""
    if ask and sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalPrompts(Console())
    return Defaults()

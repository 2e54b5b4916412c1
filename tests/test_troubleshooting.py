"""Tests that the messages in docs/troubleshooting.md are messages of the code."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support.places import ROOT

_PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
_SYMPTOMS = [line.split("|")[1] for line in _PAGE.splitlines() if line.startswith("| ") and "symptom" not in line]
_FOREIGN = {"Gloo connectFullMesh failed"}
_MESSAGES = {
    message for cell in _SYMPTOMS for message in re.findall(r"`([^`]* [^`]*)`", cell) if message not in _FOREIGN
}


def texts() -> str:
    """Return all string literals of the package, a line each; what f-strings fill in is left out."""
    found = []
    for path in sorted((ROOT / "omni_async").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.JoinedStr(values=parts):
                    found.append(
                        "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
                    )
                case ast.Constant(value=str(text)):
                    found.append(text)
    return "\n".join(found)


@pytest.fixture(scope="module")
def literals() -> str:
    return texts()


@pytest.mark.parametrize("message", sorted(_MESSAGES))
def test_messages_are_of_the_code(message: str, literals: str) -> None:
    """Checks each piece between `...`, which stands for what a message fills in."""
    pieces = [piece.strip(" ()") for piece in message.split("...")]
    missing = [piece for piece in pieces if re.search(r"\w", piece) and piece not in literals]
    assert not missing


def test_the_page_has_messages() -> None:
    assert len(_MESSAGES) > 25

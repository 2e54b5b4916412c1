"""Counts patterns of stilted English: `python -m tests.support.prose [--worst N] [--strings] [PATH ...]`.

Counts docstrings and comments of Python files and the text of Markdown files; with `--strings` also the messages of
Python files: of log calls, raised exceptions, `help=` and capital constants (a command's help). Prints hits per 10,000
words for each pattern, and the N worst sentences with their places.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.places import ROOT

PATTERNS = {
    "one/those/that ... that": r"\b(?:ones?|those|that|all|nothing|what) (?:that|which|who)\b",
    "opens with What/That/Who/Of": r"(?:^|[.;:] )(?:What|That|Who|Whoever|Those|Whose|Of) (?!are you)[a-z]+",
    "say": r"\b(?:say|says|said)\b",
    "tell": r"\b(?:tell|tells|told)\b",
    "go on": r"\b(?:goes|go|went|going) on\b",
    "beside": r"\bbeside\b",
    "by itself, of its own": r"\b(?:by (?:itself|themselves)|of (?:its|their|one's|his) own|is none|are none)\b",
    "stand and lie": r"\b(?:stands?|lies?) (?:in|at|beside|before|behind|for|where)\b",
    "where there": r"\bwhere (?:there|it|they|that|nobody|none)\b",
    "of which": r"\b(?:of|by|to|in|from) (?:which|whom)\b",
    "dangling clause": r", (?:and is|and are|and has|if only|which is none|perhaps)\b",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
_WORD = re.compile(r"[A-Za-z']+")
_LOGS = {"debug", "info", "warning", "error", "exception", "critical", "note", "phase", "print_error", "print_line"}
DEFAULT = ("omni_async", "pipelines", "docs", "README.md", "CONTRIBUTING.md")

Text = tuple[Path, int, str]


def python_texts(path: Path) -> Iterator[Text]:
    """Yield the docstrings and comments of a Python file, each with its line."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            if isinstance(item, ast.Expr) and isinstance(text := getattr(item.value, "value", None), str):
                yield path, item.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# noqa", "# type")):
            yield path, token.start[0], token.string.lstrip("# ")


def messages(path: Path) -> Iterator[Text]:
    """Yield the messages of a Python file: of log calls, raised exceptions, `help=` and capital string constants."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from _strings(path, node.exc)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _LOGS:
                yield from _strings(path, node)
            for keyword in node.keywords:
                if keyword.arg in ("help", "description"):
                    yield from _strings(path, keyword.value)
        elif isinstance(node, ast.Assign) and re.fullmatch(r"_?[A-Z_]+", getattr(node.targets[0], "id", "")):
            yield from _strings(path, node.value) if isinstance(node.value, ast.Constant) else ()


def _strings(path: Path, node: ast.AST) -> Iterator[Text]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
            yield path, part.lineno, part.value


def markdown_texts(path: Path) -> Iterator[Text]:
    """Yield the lines of a Markdown file outside code blocks, with code spans left out."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield path, number, re.sub(r"`[^`]*`", "X", line)


def texts(paths: Iterable[Path], strings: bool = False) -> list[Text]:
    """Return the texts of files and folders; `strings`: only the messages of Python files."""
    found: list[Text] = []
    for top in paths:
        for path in [top] if top.is_file() else sorted([*top.rglob("*.py"), *top.rglob("*.md")]):
            if "vendor" in path.parts or path.name == "configuration.md":  # the latter is made of docstrings
                continue
            if strings:
                found += messages(path) if path.suffix == ".py" else ()
            else:
                found += (python_texts if path.suffix == ".py" else markdown_texts)(path)
    return found


def rates(found: Iterable[Text]) -> dict[str, float]:
    """Return the hits of each pattern per 10,000 words, and of `all`."""
    found = list(found)
    words = sum(len(_WORD.findall(text)) for *_, text in found) or 1
    hits = {name: sum(len(one.findall(text)) for *_, text in found) for name, one in _COMPILED.items()}
    hits["all"] = sum(hits.values())
    return {name: count * 10_000 / words for name, count in hits.items()}


def worst(found: Iterable[Text], number: int) -> list[str]:
    """Return the `number` sentences with most hits, worst first, each with its place."""
    rated = []
    for path, line, text in found:
        for sentence in re.split(r"(?<=[.;]) +|\n", text):
            hits = sum(len(one.findall(sentence)) for one in _COMPILED.values())
            rated += [(-hits, len(sentence), f"{path}:{line}: {sentence.strip()[:200]}")] if hits else []
    return [shown for *_, shown in sorted(rated)[:number]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / name for name in DEFAULT])
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    parser.add_argument("--strings", action="store_true", help="count messages instead of docstrings and comments")
    options = parser.parse_args()
    found = texts(options.paths, options.strings)
    sys.stdout.writelines(f"{rate:6.1f}  {name}\n" for name, rate in rates(found).items())
    sys.stdout.writelines(f"{line}\n" for line in worst(found, options.worst))


if __name__ == "__main__":
    main()

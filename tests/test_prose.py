"""Tests that the project's English stays plain: patterns of stilted sentences have a budget that only falls."""

from __future__ import annotations

import re

import pytest

from omni_async.records.write.catalogue import markdown
from omni_async.records.write.metrics import METRICS
from tests.support.places import ROOT
from tests.support.prose import DEFAULT, rates, texts, worst

# Hits per 10,000 words. Lower a budget when the text has become better; never raise one.
_TEXT_BUDGET, _MESSAGE_BUDGET = 10, 10
_LONGEST_SENTENCE = 35  # words, of 90 % of the sentences in documents
_WIDEST = 100  # columns
_MOST_WORDS = 45_000  # written by hand, code included
_GENERATED = {"configuration.md", "measured.md"}


@pytest.mark.thorough
def test_docstrings_comments_and_documents_are_plain() -> None:
    found = texts(ROOT / name for name in DEFAULT)
    assert rates(found)["all"] <= _TEXT_BUDGET, "\n".join(worst(found, 20))


def test_messages_and_help_are_plain() -> None:
    found = texts([ROOT / "omni_async", ROOT / "pipelines"], strings=True)
    assert rates(found)["all"] <= _MESSAGE_BUDGET, "\n".join(worst(found, 20))


def _documents() -> dict[str, str]:
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    text = {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages if page.name not in _GENERATED
    }
    return {name: re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE) for name, page in text.items()}


def test_sentences_of_documents_are_short() -> None:
    lengths = []
    for page in _documents().values():
        prose = "\n".join(line for line in page.splitlines() if not line.lstrip().startswith(("|", "#")))
        sentences = re.split(r"(?<=[.!?:;])\s+|\n\n+|\n\s*[-*] |\n\d+\. ", prose)
        lengths += [len(sentence.split()) for sentence in sentences if sentence.strip()]
    lengths.sort()
    assert lengths[int(0.9 * len(lengths))] <= _LONGEST_SENTENCE


def test_a_reader_has_few_words_to_read() -> None:
    folders = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("README.md")]
    pages = [page for page in (*folders, *ROOT.glob("*.md")) if page.name not in {*_GENERATED, "CHANGELOG.md"}]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    lists = sum(len(markdown(source).split()) for source in {metric.source for metric in METRICS})
    assert words - lists <= _MOST_WORDS


def test_documents_are_wrapped() -> None:
    long = [
        f"{name}: {line[:80]}"
        for name, page in _documents().items()
        for line in page.splitlines()
        if len(line) > _WIDEST and not line.lstrip().startswith(("|", "#", "![", "<")) and " " in line[:_WIDEST].strip()
    ]
    assert not long, "\n".join(long)

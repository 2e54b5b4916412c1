"""Prepares the pages for mkdocs, which are written to be read in the repository.

A link that leads out of docs/ leads to a page of the site, under repository/, with that file: Markdown as a page,
anything else as a listing. Lists that follow a paragraph without an empty line are separated, as GitHub does.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_ADDED = "repository"
_LINK = re.compile(r"(\]\()([^)#\s]+)([^)\s]*\))")
_PICTURES = {".png", ".svg", ".jpg"}
_LANGUAGES = {".yaml": "yaml", ".py": "python", ".toml": "toml", ".sh": "bash"}
_LONGEST = 200_000  # characters of a listing


def on_files(files: Files, config: Any) -> Files:
    """Add what the pages link to, and what that links to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        if not page.endswith(".md"):
            continue
        for target in _targets(page, (ROOT / page).read_text(encoding="utf-8")):
            if target in seen:
                continue
            seen.add(target)
            if not target.startswith("docs/"):
                files.append(_file(target, config))
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with links to pages of the site."""
    here = _repository_path(page.file.src_uri)
    if not here.endswith(".md"):
        return markdown

    def rewritten(link: re.Match[str]) -> str:
        target = _resolved(here, link[2])
        if target is None:
            return link[0]
        return link[1] + posixpath.relpath(_site_path(target), posixpath.dirname(page.file.src_uri) or ".") + link[3]

    text = "\n".join(_separated(_LINK.sub(rewritten, markdown).split("\n")))
    if page.is_homepage:  # whose lists are shown as cards; there is nothing beside them to navigate
        page.meta["hide"] = ["navigation", "toc"]
        text = f'<div class="home" markdown="1">\n\n{text}\n\n</div>'
    return text


def _targets(page: str, text: str) -> Iterator[str]:
    yield from filter(None, (_resolved(page, link[2]) for link in _LINK.finditer(text)))


def _resolved(page: str, target: str) -> str | None:
    """Return the path in the repository that a page links to; None if there is nothing, or it is elsewhere."""
    if ":" in target or target.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _site_path(target: str) -> str:
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    shown = (ROOT / target).suffix in {".md", *_PICTURES}
    return f"{_ADDED}/{target}" if shown else f"{_ADDED}/{target}.md"


def _repository_path(src_uri: str) -> str:
    """Return the inverse of `_site_path`: of a listing, what it lists."""
    if not src_uri.startswith(f"{_ADDED}/"):
        return f"docs/{src_uri}"
    path = src_uri.removeprefix(f"{_ADDED}/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def _file(target: str, config: Any) -> File:
    path, uri = ROOT / target, _site_path(target)
    if path.suffix in {".md", *_PICTURES}:
        return File.generated(config, uri, abs_src_path=str(path))
    if path.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir() if not entry.name.startswith("__"))
        listed, language = "\n".join(names), "text"
    else:
        listed, language = path.read_text(encoding="utf-8")[:_LONGEST], _LANGUAGES.get(path.suffix, "text")
    return File.generated(config, uri, content=f"# {target}\n\n````{language}\n{listed.rstrip()}\n````\n")


def _separated(lines: list[str]) -> Iterator[str]:
    """Yield the lines, with an empty one where a list follows a paragraph."""
    fenced, before = False, ""
    for line in lines:
        item = re.match(r"(- |\d+\. )", line)
        if item and not fenced and before.strip() and not re.match(r"(\s|- |\d+\. )", before):
            yield ""
        if line.lstrip().startswith("```"):
            fenced = not fenced
        yield line
        before = line

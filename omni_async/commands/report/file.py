"""Builds a page as one file that contains all scripts, styles, numbers and media, and may load nothing else."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import msgspec

PAGE = Path(__file__).with_name("page")
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w./-]+)">')
_SCRIPT = re.compile(r'<script src="([\w./-]+)"></script>')
# Enforced by the browser: the page loads nothing.
_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def one_file(page: dict[str, Any]) -> str:
    """Return the HTML of a page's data (`omni_async.commands.report.data.page_of`)."""
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    text = _STYLE.sub(lambda found: f"<style>\n{_source(found[1])}</style>", text)
    text = _SCRIPT.sub(lambda found: f"<script>\n{_source(found[1])}</script>", text)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    boot = (
        f'<script type="application/json" id="data">{json_in_html(page)}</script>\n'
        '<script>omniAsync.page.render(JSON.parse(document.getElementById("data").textContent))</script>'
    )
    places = {"policy": policy, "loading": "Loading the page ...", "boot": boot, "verdict": _verdict(page)}
    for place, content in places.items():
        text = text.replace(f"<!-- {place} -->", content)
    return text.replace("<title>omni-async</title>", f"<title>{html.escape(page['title'])} · omni-async</title>")


def _verdict(page: dict[str, Any]) -> str:
    """Return the first section's title and texts, for readers without JavaScript."""
    found = []
    for first in page["sections"][:1]:
        texts = [block["text"] for block in first["blocks"] if block["kind"] == "text"]
        found += [f"<h1>{html.escape(first['title'])}</h1>", *(f"<div>{html.escape(text)}</div>" for text in texts)]
    return "".join(found)


def as_json(data: Any) -> bytes:
    """Return a page's data as JSON."""
    try:
        return msgspec.json.encode(data)
    except UnicodeEncodeError:  # a folder name that is not UTF-8
        return json.dumps(msgspec.to_builtins(data)).encode()


def json_in_html(data: Any) -> str:
    """Return JSON that is safe inside a script element: no prompt can end or open an element."""
    text = as_json(data).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _source(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")

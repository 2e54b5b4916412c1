"""Tests that packages which read foreign folders open their files with `omni_async/config/reading.py` alone.

Anything else waits for a pipe, reads a device without end, or follows a link out of the folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.places import ROOT

_ROOT = ROOT / "omni_async"
_PACKAGES = (
    *(f"commands/{name}" for name in ("report", "watch", "export", "scoring", "evaluation")),
    *("records/read", "checkpoint"),
)
_METHODS = {"read_text", "read_bytes", "open"}
_FUNCTIONS = {
    *("open", "io.open", "os.open", "np.load", "np.fromfile", "np.memmap", "np.loadtxt", "Image.open", "av.open"),
    *("json.load", "yaml.load", "yaml.safe_load", "load_file", "safe_open", "torch.load", "pq.read_table"),
    *("pq.ParquetFile", "soundfile.read", "shutil.copy", "shutil.copy2", "shutil.copyfile", "web.FileResponse"),
}
# Calls that may stay, by file and text, and why.
_ALLOWED = {
    ("commands/watch/app.py", "path.read_bytes"): "a file of this package",
    ("checkpoint/folders.py", "os.open(path, os.O_RDONLY)"): "flushes what a writer just wrote",
    ("checkpoint/trajectories.py", "safe_open(path, 'np')"): "the manifest was compared: a plain file",
    ("checkpoint/trajectories.py", "load_file(path)"): "the manifest was compared: a plain file",
    ("commands/evaluation/drawing.py", "load_file(file)"): "of a folder that the user names",
}


def unbounded(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every use of a function that opens a path by other means."""
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute | ast.Name) or not _opens(node, call := called.get(id(node))):
            continue
        shown = ast.unparse(node if call is None else call)
        if "PAGE" not in shown:  # files of omni_async itself
            yield node.lineno, shown


def _opens(node: ast.Attribute | ast.Name, call: ast.Call | None) -> bool:
    name = ast.unparse(node)
    if name not in _FUNCTIONS and (isinstance(node, ast.Name) or node.attr not in _METHODS):
        return False
    if call is None:
        return isinstance(node, ast.Attribute)  # handed on, to be called in a thread
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    writes = name not in _FUNCTIONS - {"open"} and any(set(mode) & set("wxa") and len(mode) < 4 for mode in modes)
    in_memory = any(ast.unparse(one).startswith(("io.BytesIO(", "BytesIO(")) for one in call.args)
    return not writes and not in_memory


def test_foreign_files_are_opened_within_bounds() -> None:
    assert all((_ROOT / package).is_dir() for package in _PACKAGES)
    files = [file for package in _PACKAGES for file in sorted((_ROOT / package).rglob("*.py"))]
    found = {
        (str(file.relative_to(_ROOT)), shown): line
        for file in files
        for line, shown in unbounded(file.read_text(encoding="utf-8"))
    }
    wrong = [f"{file}:{line}: {shown}" for (file, shown), line in found.items() if (file, shown) not in _ALLOWED]
    way = "use read_file, open_file (within=the folder) of omni_async/config/reading.py, and decode what they return"
    assert not wrong, "\n".join([*wrong, way])
    assert not _ALLOWED.keys() - found.keys(), "these are gone, and leave the list"


def test_the_rule_itself() -> None:
    refused = ("path.read_text()", "run(path.read_bytes)", "path.open()", "open(path, 'rb')", "Image.open(path)")
    allowed = ("path.open('xb')", "Image.open(io.BytesIO(read_file(path)))", "(PAGE / name).read_text()")
    assert all([*unbounded(source)] for source in (*refused, "safe_open(path, 'np')", "shutil.copyfile(path, other)"))
    assert not any([*unbounded(source)] for source in (*allowed, "open_file(path, within=folder)"))

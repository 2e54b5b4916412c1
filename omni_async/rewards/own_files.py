"""Imports the Python files of users that define scorers, `path/file.py:name`."""

from __future__ import annotations

import sys
from importlib import util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import xxhash


class _Compiling(SourceFileLoader):
    """Compiles a file whenever it is imported.

    Python would take a compiled file for current if the text changed within a second and kept its length."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def run_file(file: str) -> ModuleType:
    """Import a file as a module, once for each content. Its folder is added to the end of the Python path."""
    path = Path(file)
    module_name = f"{path.stem}_{xxhash.xxh3_64_hexdigest(file.encode() + path.read_bytes())}"
    if (known := sys.modules.get(module_name)) is not None:
        return known
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = util.spec_from_file_location(module_name, path, loader=_Compiling(module_name, file))
    assert spec is not None and spec.loader is not None, "its name ends in .py"
    module = sys.modules[module_name] = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module

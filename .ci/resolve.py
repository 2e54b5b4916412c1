#!/usr/bin/env python3
"""Resolves every set of packages that `make install` offers, on the public Python index alone.

The sets are {cpu, cuda} x {CPython 3.11, 3.12}. pip resolves each with `--dry-run`, without the machine's pip
configuration. The Python index lacks the CPU build of torch. A stub wheel with the metadata of the installed build
stands in for it. This cannot prove that `TORCH_INDEX` serves the wheel: an install without a local copy does.

Exit code 0: every set resolves. 1: a set does not, or an interpreter is missing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12")
EXTRAS = ("cpu", "cuda")


def torch_requirement(extra: str) -> str:
    """Return the requirement of torch that the Makefile installs with an extra."""
    [requirement] = re.findall(
        rf"^TORCH_{extra} := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M
    )
    return str(requirement)


def write_stubs(folder: Path, venv: Path) -> None:
    """Write a wheel for each Python with the metadata of the torch that `venv` has, and nothing else."""
    version = torch_requirement("cpu").partition("==")[2]
    found = sorted(venv.glob(f"lib/python3.*/site-packages/torch-{version}.dist-info/METADATA"))
    if not found:
        raise SystemExit(
            f"{venv}: torch {version} is not installed there, and the stub needs its metadata; run make install"
        )
    for tag in (f"cp{python.replace('.', '')}" for python in PYTHONS):
        tags = f"{tag}-{tag}-manylinux_2_28_x86_64"
        with zipfile.ZipFile(folder / f"torch-{version}-{tags}.whl", "w") as wheel:
            wheel.write(found[0], f"torch-{version}.dist-info/METADATA")
            wheel.writestr(
                f"torch-{version}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tags}\n"
            )
            wheel.writestr(f"torch-{version}.dist-info/RECORD", "")


def interpreter(python: str) -> str:
    """Return the path of a CPython `python`: from PATH, or pyenv's."""
    candidates = [shutil.which(f"python{python}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(map(str, pyenv.glob(f"versions/{python}.*/bin/python{python}")))
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-m", "venv", "-h"], capture_output=True).returncode == 0:
            return candidate
    raise SystemExit(
        f"python{python}: not found on PATH nor by pyenv; install CPython {python} with venv to resolve its sets"
    )


def pip_environment(stubs: Path | None = None) -> dict[str, str]:
    """Return the environment without pip's settings: the machine's constraints and indexes could hide a conflict.

    A certificate or proxy that the machine needs stays."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("PIP_") or key in ("PIP_CERT", "PIP_PROXY")
    }
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(stubs or ""),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def resolves(extra: str, python: str, pip: Path, stubs: Path) -> bool:
    """Resolve one set, print a line, and pip's errors if it does not resolve."""
    began = time.monotonic()
    command = [pip, "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["-c", ROOT / "constraints.txt", torch_requirement(extra), f"{ROOT}[{extra},dev]"]
    environment = pip_environment(stubs if extra == "cpu" else None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    outcome = "resolves" if done.returncode == 0 else "DOES NOT RESOLVE"
    print(f"{extra}, Python {python}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
    if done.returncode != 0:
        print(done.stderr.strip(), file=sys.stderr, flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="environment that has torch's CPU build")
    venv = parser.parse_args().venv
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder, "stubs")
        stubs.mkdir()
        write_stubs(stubs, venv)
        outcomes = []
        for python in PYTHONS:
            own = Path(folder, python)
            subprocess.run([interpreter(python), "-m", "venv", own], check=True)
            pip = own / "bin" / "pip"
            subprocess.run([pip, "install", "--quiet", "--upgrade", "pip>=25"], check=True, env=pip_environment())
            outcomes += [resolves(extra, python, pip, stubs) for extra in EXTRAS]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Resolves every set of packages that `make install` offers, on the public Python index alone.

The sets are {cpu, cuda} x {CPython 3.11, 3.12}. pip resolves each with `--dry-run`, without the machine's pip
configuration. The Python index lacks the CPU build of torch. A stub wheel with the metadata of the installed build
stands in for it. This cannot prove that `TORCH_INDEX` serves the wheel: an install without a local copy does.

`--write` records what CUDA's wheels require in `tests/cuda_requirements.json`, which a test compares with the pins.

Exit code 0: every set resolves to pinned versions. 1: a set does not, or an interpreter is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12")
EXTRAS = ("cpu", "cuda")
# The project, and a package with another version on each interpreter.
UNPINNED = {"omni-async", "setuptools"}
WRITTEN = ROOT / "tests" / "cuda_requirements.json"

# What pip reports of a set: the metadata of each package by its name.
Packages = dict[str, dict[str, Any]]


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


def pins() -> set[str]:
    """Return the names that `constraints.txt` pins."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def resolve(extra: str, python: str, pip: Path, stubs: Path) -> Packages | None:
    """Resolve one set and print a line. Return its packages, or None with pip's errors if that fails.

    A package without a pin fails as well: another day resolves another version of it."""
    began, report = time.monotonic(), stubs / f"{extra}-{python}.json"
    command = [pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", report]
    command += ["-c", ROOT / "constraints.txt", torch_requirement(extra), f"{ROOT}[{extra},dev]"]
    environment = pip_environment(stubs if extra == "cpu" else None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found: Packages = {}
    problem = done.stderr.strip() if done.returncode else ""
    if not problem:
        installed = json.loads(report.read_text(encoding="utf-8"))["install"]
        found = {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in installed}
        loose = sorted(found.keys() - pins() - UNPINNED)
        if loose:
            problem = "constraints.txt: no pin of " + ", ".join(f"{one}=={found[one]['version']}" for one in loose)
    outcome = "DOES NOT RESOLVE" if problem else f"resolves, {len(found)} packages"
    print(f"{extra}, Python {python}: {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
    if problem:
        print(problem, file=sys.stderr, flush=True)
    return None if problem else found


def requirements(packages: Packages) -> dict[str, list[str]]:
    """Return what each package requires on Linux with one of the two interpreters, as `name` and versions."""
    parsed = {name: [Requirement(text) for text in one.get("requires_dist", ())] for name, one in packages.items()}
    extras = {name: {""} for name in packages}

    def applies(name: str, one: Requirement) -> bool:
        places = ({"python_version": python, "extra": extra} for python in PYTHONS for extra in extras[name])
        return one.marker is None or any(one.marker.evaluate(dict(place)) for place in places)

    for _ in range(3):  # an extra may ask for another package's extra
        for name, wanted in parsed.items():
            for one in wanted:
                if applies(name, one):
                    extras.setdefault(canonicalize_name(one.name), {""}).update(one.extras)
    return {
        name: sorted({f"{canonicalize_name(one.name)}{one.specifier}" for one in wanted if applies(name, one)})
        for name, wanted in parsed.items()
    }


def write_requirements(cpu: Packages, cuda: Packages) -> None:
    """Record the versions and requirements of the wheels that only CUDA's set has, torch's among them."""
    required = requirements(cuda)
    own = {name for name in cuda if name not in cpu or cuda[name]["version"] != cpu[name]["version"]}
    record = {name: {"version": cuda[name]["version"], "requires": required[name]} for name in sorted(own - UNPINNED)}
    WRITTEN.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{WRITTEN.relative_to(ROOT)}: {len(record)} packages")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="environment that has torch's CPU build")
    parser.add_argument("--write", action="store_true", help=f"write {WRITTEN.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stubs = Path(folder, "stubs")
        stubs.mkdir()
        write_stubs(stubs, arguments.venv)
        outcomes: dict[tuple[str, str], Packages | None] = {}
        for python in PYTHONS:
            own = Path(folder, python)
            subprocess.run([interpreter(python), "-m", "venv", own], check=True)
            pip = own / "bin" / "pip"
            subprocess.run([pip, "install", "--quiet", "--upgrade", "pip>=25"], check=True, env=pip_environment())
            outcomes |= {(extra, python): resolve(extra, python, pip, stubs) for extra in EXTRAS}
        cpu, cuda = (outcomes[extra, PYTHONS[0]] for extra in EXTRAS)
        if arguments.write and cpu and cuda:
            write_requirements(cpu, cuda)
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

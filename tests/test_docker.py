"""Tests what can be known of the Dockerfile without building it; `make lint` lints it."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib

from tests.support.places import ROOT

LINES = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines()
COPIED = [word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]]
ALLOWED = [
    line.removeprefix("!")
    for line in (ROOT / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    if line.startswith("!")
]


def test_copied_files_are_sent() -> None:
    assert len(COPIED) > 5
    for path in COPIED:
        assert (ROOT / path).exists(), path
        assert any(fnmatch.fnmatch(path.split("/")[0], allowed) for allowed in ALLOWED), path


def test_version_can_be_read() -> None:
    """Setuptools reads the version from a literal, in a layer that has little more than its file."""
    before = "\n".join(LINES).partition("\nRUN python3.12 -m venv")[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    package, _, name = project["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert f"{package}/__init__.py" in before
    assert re.search(rf'^{name} = "\d', (ROOT / package / "__init__.py").read_text(encoding="utf-8"), flags=re.M)


def test_same_install_as_the_makefile() -> None:
    text, makefile = "\n".join(LINES), (ROOT / "Makefile").read_text(encoding="utf-8")
    [torch] = re.findall(r"^TORCH_cuda := (\S+)$", makefile, flags=re.M)
    assert f'-c constraints.txt "{torch}" -e ".[cuda,all]"' in text
    headless = "--force-reinstall --no-deps -c constraints.txt opencv-python-headless"
    assert headless in text and headless in makefile
    assert re.search(r"^USER (?!0|root)\S+$", text, flags=re.M)
    assert 'ENTRYPOINT ["omni-async"]' in LINES


def test_base_has_torchs_cuda() -> None:
    """Containers of another CUDA start under drivers on which torch then finds no device."""
    [base] = re.findall(r"^FROM nvidia/cuda:(\S+)$", "\n".join(LINES), flags=re.M)
    cuda = json.loads((ROOT / "tests" / "cuda_requirements.json").read_text(encoding="utf-8"))
    [toolkit] = [one.partition("==")[2] for one in cuda["torch"]["requires"] if one.startswith("cuda-toolkit==")]
    assert base == f"{toolkit}-devel-ubuntu24.04"
    assert f'ENV NVIDIA_REQUIRE_CUDA="cuda>={toolkit.rpartition(".")[0]}"' in LINES, toolkit
    [packages] = [line for line in LINES if "apt-get install" in line]
    assert {"g++", "python3.12-dev"} <= {*packages.split()}

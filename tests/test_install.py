"""Tests what `make install` promises and pip does not check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.places import ROOT

# What the wheels that only CUDA's set has require: `.ci/resolve.py --write` records it.
CUDA: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "cuda_requirements.json").read_text(encoding="utf-8"))
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
# It has another version on each CPython.
UNPINNED = {"setuptools"}

_IMPORT = "import cv2; print(open('/proc/self/maps').read())"


def test_opencv_needs_no_desktop() -> None:
    """A slim Debian lacks them: the headless build has to be the last to write the files that both builds share."""
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    assert "cv2.abi3.so" in done.stdout
    assert not set(re.findall(r"lib(?:GL|xcb|glib|gthread|X11|Qt)[-.\w]*\.so[.\d]*", done.stdout))


def test_pins_satisfy_the_cuda_wheels() -> None:
    """Checks that pip can install CUDA's set with the pins."""
    assert {"torch", "vllm", "flashinfer-python", "nvidia-nccl-cu13"} <= CUDA.keys()
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    assert {name: pins.get(name) for name in CUDA} == {name: one["version"] for name, one in CUDA.items()}
    for name, one in CUDA.items():
        for wanted in map(Requirement, one["requires"]):
            pin = pins.get(canonicalize_name(wanted.name), "")
            found = wanted.name in UNPINNED or (pin and wanted.specifier.contains(pin, prereleases=True))
            assert found, f"{name} requires {wanted}, pinned {pin}"

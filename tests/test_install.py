"""Tests what `make install` promises and pip does not check."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.places import ROOT

# What the wheels that only CUDA's set has require: `.ci/resolve.py --write` records it.
CUDA: dict[str, dict[str, Any]] = json.loads((ROOT / "tests" / "cuda_requirements.json").read_text(encoding="utf-8"))
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
# It has another version on each CPython.
UNPINNED = {"setuptools"}

_IMPORT = "import cv2; print(open('/proc/self/maps').read())"


def test_opencv_needs_no_library_of_a_desktop() -> None:
    """A slim Debian lacks them: the headless build has to be the last to write the files that both builds share."""
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    assert "cv2.abi3.so" in done.stdout
    assert not set(re.findall(r"lib(?:GL|xcb|glib|gthread|X11|Qt)[-.\w]*\.so[.\d]*", done.stdout))


def conflicts(pins: dict[str, str]) -> list[str]:
    """Returns what keeps pip from installing CUDA's set with these pins."""
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    found = [
        f"{name}: recorded {one['version']}, pinned {versions.get(name)}"
        for name, one in CUDA.items()
        if versions.get(name) != one["version"]
    ]
    for name, one in CUDA.items():
        for wanted in map(Requirement, one["requires"]):
            pin = versions.get(canonicalize_name(wanted.name))
            if wanted.name not in UNPINNED and (pin is None or not wanted.specifier.contains(pin, prereleases=True)):
                found.append(f"{name} requires {wanted}, pinned {pin}")
    return found


def test_the_pins_satisfy_what_the_cuda_wheels_require() -> None:
    assert {"torch", "vllm", "flashinfer-python", "nvidia-nccl-cu13"} <= CUDA.keys()
    assert conflicts(PINS) == []


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("triton==3.9.0", "torch requires triton==3.7.1, pinned 3.9.0"),
        ("apache-tvm-ffi==0.1.15.post2", "vllm requires apache-tvm-ffi==0.1.11, pinned 0.1.15.post2"),
        ("vllm==0.31.0", "vllm: recorded 0.30.0, pinned 0.31.0"),
    ],
)
def test_a_pin_that_a_cuda_wheel_excludes_is_found(pin: str, said: str) -> None:
    assert said in conflicts({**PINS, **dict([pin.split("==")])})
    name = pin.partition("==")[0]
    assert any("pinned None" in one for one in conflicts({key: PINS[key] for key in PINS if key != name}))

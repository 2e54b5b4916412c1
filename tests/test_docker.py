"""Tests what can be known of the Dockerfile without building it; `make lint` lints it."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines()
COPIED = [word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]]
ALLOWED = [
    line.removeprefix("!")
    for line in (ROOT / "docker" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    if line.startswith("!")
]


def test_everything_that_is_copied_is_there_and_sent_to_the_builder() -> None:
    assert len(COPIED) > 5
    for path in COPIED:
        assert (ROOT / path).exists(), path
        assert any(fnmatch.fnmatch(path.split("/")[0], allowed) for allowed in ALLOWED), path


def test_the_image_installs_what_the_makefile_installs_and_the_user_is_not_root() -> None:
    text, makefile = "\n".join(LINES), (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^FROM nvidia/cuda:\d+\.\d+\.\d+-\S+$", text, flags=re.M)
    [torch] = re.findall(r"^TORCH_cuda := (\S+)$", makefile, flags=re.M)
    assert f'-c constraints.txt "{torch}" -e ".[cuda]"' in text
    headless = "--force-reinstall --no-deps -c constraints.txt opencv-python-headless"
    assert headless in text and headless in makefile
    assert re.search(r"^USER (?!0|root)\S+$", text, flags=re.M)
    assert 'ENTRYPOINT ["omni-async"]' in LINES

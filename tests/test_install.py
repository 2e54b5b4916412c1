"""Tests what `make install` promises and pip does not check."""

from __future__ import annotations

import re
import subprocess
import sys

_IMPORT = "import cv2; print(open('/proc/self/maps').read())"


def test_opencv_needs_no_library_of_a_desktop() -> None:
    """A slim Debian lacks them: the headless build has to be the last to write the files that both builds share."""
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=True)
    assert "cv2.abi3.so" in done.stdout
    assert not set(re.findall(r"lib(?:GL|xcb|glib|gthread|X11|Qt)[-.\w]*\.so[.\d]*", done.stdout))

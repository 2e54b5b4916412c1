"""Runs vLLM's OpenAI-compatible server: `python -m omni_async.roles.vllm_process ARGUMENTS OF VLLM`.

Importing omni_async prepares this process, and its child processes, for a mixed installation. The server ends when its
parent process ends in any way, at the end of the pipe that is its standard input.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

import omni_async

_SERVER = "vllm.entrypoints.openai.api_server"


def _end_with_parent() -> None:
    """Wait for the end of standard input, which the parent holds open, and end the whole process group."""
    while os.read(0, 1024):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serve until a signal, or the end of the parent."""
    if os.getpgrp() == os.getpid():  # the group only has this server's processes
        threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv[0] = f"{_SERVER} (omni_async {omni_async.__version__})"
    runpy.run_module(_SERVER, run_name="__main__")


if __name__ == "__main__":
    main()

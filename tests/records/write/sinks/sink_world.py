"""A run as trackers see it: two updates, a validation round that comes late, images, and an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.sinks.base import About, Ended

RED = (200, 0, 0)


def about(folder: Path, goes_on: bool = False, **params: Any) -> About:
    """Says what a run is whose folder is `folder`. `params`: what is not the default."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = {
        "algorithm": {"name": "flow_grpo"},
        "staleness": {"max_updates": 2},
        "model": {"path": "models/small"},
        "trainer": {"updates": 4},
        "rollout": {"engine": "diffusers"},
    }
    return About(RunDirectory(folder), sections | params, params, "qwen_image", goes_on)


LEFT_OUT = "version 1: 1 of 2 samples not scored: no face found"


def tell(sinks: Any) -> None:
    """Tells of updates 1 and 2, then of the round of version 1."""
    sinks.metrics({"reward": 0.25, "busy/trainer": 0.5, "ess/step_03": 0.9, "odd+name": 1.0}, step=1)
    sinks.metrics({"reward": 0.5, "reward/ocr_exact": 0.125, "busy/trainer": 0.75}, step=2)
    sinks.metrics({"validation/reward": 0.75, "not_scored": 1, "validation_gain": 0.5}, step=1)
    sinks.remark("not_scored", LEFT_OUT, step=1)
    sinks.image(Image.new("RGB", (40, 30), RED), "validation", step=1)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serves HTTP, and yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ENDINGS: dict[str, Ended] = {"FINISHED": "done", "KILLED": "interrupted", "FAILED": "failed"}

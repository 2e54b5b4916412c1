"""Measures the cost of a reward server: images/s of `ocr` in this process and over loopback, and the server's memory.

Both arms take turns. In this process one thread scores batch after batch, as a reward worker does. Over loopback the
server is a separate process, and threads of this process are its clients. No two images are alike, so that no answer
comes from a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil
import yaml
from PIL import Image, ImageDraw

from benchmarks.arguments import asked, benchmark_parser, write_json
from omni_async.commands.bench.result import Machine, describe_machine
from omni_async.media import Media
from omni_async.rewards.scorers.http import HttpScorer
from omni_async.rewards.scorers.ocr import OcrScorer
from omni_async.types import Prompt

_HELP = """\
Images/s of `ocr` in process and over loopback, in turn in every repeat, and a server's memory over many requests.

  python -m benchmarks.reward_server                       # some minutes
  python -m benchmarks.reward_server --repeats 9 --clients 16
  python -m benchmarks.reward_server --requests 0          # without the memory

OUT gets results.json.
"""
_SIDE = 64
_MIB = 2**20


class Arm(msgspec.Struct, frozen=True):
    """One arm of one repeat: images/s, and the milliseconds of processor time per image where it was scored.

    Other processes of the machine lengthen the seconds, but hardly the processor time."""

    images_per_s: float
    cpu_ms: float


class Results(msgspec.Struct, frozen=True):
    machine: Machine
    asked: dict[str, object]
    in_process: list[Arm]
    over_loopback: list[Arm]
    ratio: float
    requests: int
    requests_per_s: float
    rss_at_tenth: int
    rss_at_end: int


class Samples:
    """Images of digits with their prompts; the first pixels are a unique number."""

    def __init__(self) -> None:
        self._count = itertools.count()
        self._images = [_digits(str(text)) for text in range(100, 1000, 9)]

    def batch(self, size: int) -> tuple[list[Media], list[Prompt]]:
        media, prompts = [], []
        for _ in range(size):
            number = next(self._count)
            text, pixels = self._images[number % len(self._images)]
            pixels = pixels.copy()
            pixels.reshape(-1)[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
            media.append(Media(image=pixels))
            prompts.append(Prompt(number, f'the number "{text}"', text))
        return media, prompts


def _digits(text: str) -> tuple[str, np.ndarray]:
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    ImageDraw.Draw(image).text((8, 16), text, fill="black", font_size=28)
    return text, np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


@contextlib.contextmanager
def _serving(scorer: str, batch: int) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server in a separate process; yield its address and the process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scorers.yaml"
        server = {"port": 0, "requests_per_s": 1e6, "burst": 1_000_000}
        path.write_text(yaml.safe_dump({"server": server, "reward": {"batch": batch, "scorers": [{"name": scorer}]}}))
        words = [sys.executable, "-m", "omni_async.cli", "serve-reward", str(path)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().split()[-1], psutil.Process(process.pid)
            finally:
                process.terminate()


def _in_process(scorer: OcrScorer, samples: Samples, batch: int, seconds: float) -> Arm:
    """Score in one thread."""
    began, cpu, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        scorer.score(*samples.batch(batch))
        done += batch
    return Arm(done / (time.perf_counter() - began), 1e3 * (time.process_time() - cpu) / done)


async def _over_loopback(
    scorer: HttpScorer, samples: Samples, server: psutil.Process, options: argparse.Namespace, seconds: float
) -> Arm:
    """Let all clients send requests for so long, and wait for their last answers."""
    ends = time.perf_counter() + seconds

    async def client() -> int:
        done = 0
        while time.perf_counter() < ends:
            done += len(await scorer.score(*samples.batch(options.batch)))
        return done

    began, cpu = time.perf_counter(), sum(server.cpu_times()[:2])
    done = sum(await asyncio.gather(*(client() for _ in range(options.clients))))
    seconds = time.perf_counter() - began
    return Arm(done / seconds, 1e3 * (sum(server.cpu_times()[:2]) - cpu) / done)


async def _memory(requests: int, clients: int) -> tuple[float, int, int]:
    """Return requests/s, and the server's memory after a tenth and after all of the requests."""
    with _serving("jpeg_size", 16) as (url, process):
        scorer, samples, found = HttpScorer(urls=(url,), connections=clients), Samples(), []
        began = time.perf_counter()
        for part in (requests // 10, requests - requests // 10):
            left = iter(range(part))

            async def client(left: Iterator[int] = left) -> None:
                for _ in left:
                    await scorer.score(*samples.batch(1))

            await asyncio.gather(*(client() for _ in range(clients)))
            found.append(process.memory_info().rss)
        seconds = time.perf_counter() - began
        await scorer.close()
    return requests / seconds, found[0], found[1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = benchmark_parser("reward_server", _HELP)
    parser.add_argument("--batch", type=int, default=16, help="images of a request (default: 16)")
    parser.add_argument("--clients", type=int, default=64, help="that ask at once (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, help="of both arms (default: 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one arm in one repeat (default: 10)")
    parser.add_argument("--requests", type=int, default=100_000, help="of `jpeg_size` for the memory; 0: none")
    return asyncio.run(_run(parser.parse_args(arguments)))


async def _run(options: argparse.Namespace) -> int:
    own, samples = OcrScorer(), Samples()
    alone: list[Arm] = []
    served: list[Arm] = []
    with _serving("ocr", options.batch) as (url, server):
        scorer = HttpScorer(urls=(url,), connections=options.clients, timeout_s=60)
        await _over_loopback(scorer, samples, server, options, 1.0)
        _in_process(own, samples, options.batch, 1.0)
        for _ in range(options.repeats):
            alone.append(_in_process(own, samples, options.batch, options.seconds))
            served.append(await _over_loopback(scorer, samples, server, options, options.seconds))
            arms = zip(("in process", "over loopback"), (alone[-1], served[-1]), strict=True)
            told = (f"{name} {one.images_per_s:.1f} images/s, {one.cpu_ms:.2f} ms of a core each" for name, one in arms)
            sys.stdout.write("; ".join(told) + "\n")
            sys.stdout.flush()
        await scorer.close()
    ratio = statistics.median(one.images_per_s / base.images_per_s for one, base in zip(served, alone, strict=True))
    cpu = statistics.median(base.cpu_ms / one.cpu_ms for one, base in zip(served, alone, strict=True))
    sys.stdout.write(
        f"median ratio of images/s: {ratio:.3f} (target: 0.9); of images per second of a core: {cpu:.3f}\n"
    )
    per_s, tenth, end = await _memory(options.requests, options.clients) if options.requests else (0.0, 0, 0)
    if options.requests:
        sizes = f"{tenth / _MIB:.1f} MiB at a tenth, {end / _MIB:.1f} MiB at the end"
        sys.stdout.write(f"jpeg_size: {options.requests} requests, {per_s:.0f} a second; server's RSS {sizes}\n")
    results = Results(describe_machine(), asked(options), alone, served, ratio, options.requests, per_s, tenth, end)
    options.out.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"wrote {write_json(options.out / 'results.json', results)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

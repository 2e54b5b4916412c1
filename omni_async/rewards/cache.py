"""Caches the answers of deterministic scorers in memory, and optionally on disk, so that nothing is scored twice.

The key of an answer covers the scorer (parameters, version, source file), the media, and the prompt with its target,
metadata and images. Owns a bounded memory and a `ScoreFile`, and waits for the latter. A damaged entry counts as
absent.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from omni_async.config import reward as sections
from omni_async.config.decoding import decode_msgpack
from omni_async.config.redact import resolve_references
from omni_async.media import Media
from omni_async.rewards.base import ScoreError, declared, require_score
from omni_async.rewards.functions import PASSED
from omni_async.rewards.score_file import ScoreFile
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score

_FORMAT = b"1"
_SUM_BYTES = 8  # of the checksum before every entry
_MOST_VALUES = 1000  # of an entry: 256 parts with their names, and the other fields of a score
_OVERHEAD = 200  # bytes that an entry takes in memory in addition to its content
_MEDIA = Path(__file__).parents[1] / "media.py"


# ---- keys of answers -------------------------------------------------------------------------------------------------


def identity_of(config: sections.Scorer, scorer: Any) -> bytes | None:
    """Return what distinguishes a scorer's answers from another's; None if the scorer is not `deterministic`.

    It covers the class, parameters, optional `version`, version of the package, and source files."""
    if declared(scorer).deterministic is not True or config.name.startswith(PASSED):  # nothing identifies its code
        return None
    kind = type(scorer)
    params = resolve_references(config.params, f"scorer {config.name!r}")
    version = str(declared(scorer).version)
    try:
        made = msgspec.msgpack.encode(
            [f"{kind.__module__}:{kind.__qualname__}", params, version, _package_version(kind), _sources(kind)],
            order="deterministic",
        )
    except (TypeError, ValueError, OverflowError):
        return None
    return blake2b(made, digest_size=16).digest()


def _package_version(kind: type) -> str:
    try:
        return metadata.version(kind.__module__.partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return ""


def _sources(kind: type) -> list[bytes]:
    """Return the source files of the class and of its base classes; Python's built-in classes have none.

    If one of the classes belongs to this package, add all files that its scorers share: the package's version does not
    change between releases."""
    found = []
    for one in kind.__mro__:
        try:
            found.append(Path(inspect.getfile(one)).read_bytes())
        except (OSError, TypeError):
            continue
    if any(one.__module__.startswith("omni_async.") for one in kind.__mro__):
        here = Path(__file__).parent
        ours = [*here.glob("*.py"), *here.glob("scorers/*.py"), _MEDIA]
        found += [file.read_bytes() for file in sorted(ours)]
    return found


def digest_of(media: Media) -> bytes:
    """Return the digest of the media's parts: shapes, rates and every byte; of a text also its length and end."""
    found = xxhash.xxh3_128()
    for part in media.arrays:
        array = np.ascontiguousarray(getattr(media, part))
        found.update(f"{part} {array.dtype} {array.shape} {media.fps} {media.sample_rate};".encode())
        found.update(array.data)
    if media.text is not None:
        found.update(f"text {media.finish} {media.tokens};".encode() + media.text.encode("utf-8", "surrogatepass"))
    return found.digest()


def key_of(identity: bytes, digest: bytes, prompt: Prompt) -> bytes | None:
    """Return the key of a scorer's answer; None if the prompt's metadata cannot be written.

    Args:
        identity: the scorer's, see `identity_of`.
        digest: of the media, see `digest_of`.
        prompt: its position in its file does not count."""
    asked = [identity, digest, prompt.text, prompt.target, prompt.metadata, prompt.digests]
    try:
        return blake2b(_FORMAT + msgspec.msgpack.encode(asked, order="deterministic"), digest_size=16).digest()
    except (TypeError, ValueError, OverflowError):
        return None


# ---- the answers -----------------------------------------------------------------------------------------------------


Found = tuple[list[bytes | None], list[Score | None]]


class ScoreCache:
    """The cached answers of one reward worker or of `omni-async score`; thread-safe.

    `find` and `keep` run in `threads`; `get` and `put` may block. `report` gets a sentence when the file is unusable.
    `problem`: why the file is no longer used, None while it is in use."""

    def __init__(self, config: sections.ScoreCache, threads: Threads, report: Callable[[str], Awaitable[None]]) -> None:
        self._threads, self._report, self._reported = threads, report, False
        self._lock = threading.Lock()
        self._memory: OrderedDict[bytes, bytes] = OrderedDict()
        self._held, self._bound = 0, config.memory_bound
        self._file = None if config.path is None else ScoreFile(Path(config.path), config.size_bound)

    @property
    def problem(self) -> str | None:
        return None if self._file is None else self._file.problem

    async def find(self, identity: bytes | None, media: Sequence[Media], prompts: Sequence[Prompt]) -> Found:
        """Return each sample's key, None if its answer cannot be cached, and the scorer's cached answer, if any."""
        if identity is None:
            return [None] * len(media), [None] * len(media)

        def found() -> Found:
            keys = [key_of(identity, digest_of(one), prompt) for one, prompt in zip(media, prompts, strict=True)]
            known = self.get(key for key in keys if key is not None)
            return keys, [None if key is None else known.get(key) for key in keys]

        return await self._threads.run(found)

    async def keep(self, keys: Sequence[bytes | None], scores: Sequence[Score | None]) -> None:
        """Store the answers that have a key. Warn once if the cache file is unusable."""
        pairs = zip(keys, scores, strict=True)
        answers = {key: score for key, score in pairs if key is not None and score is not None}
        if not answers:
            return
        await self._threads.run(partial(self.put, answers))
        if self.problem is not None and not self._reported:
            self._reported = True
            await self._report(f"warning: reward.cache.path: {self.problem}; scores are not kept there")

    def get(self, keys: Iterable[bytes]) -> dict[bytes, Score]:
        """Return the known answers among `keys`."""
        with self._lock:
            wanted = set(keys)
            found = {key: self._memory[key] for key in wanted if key in self._memory}
            for key in found:
                self._memory.move_to_end(key)
            if self._file is not None and len(found) < len(wanted):
                read = self._file.get([*(wanted - found.keys())])
                self._remember(read)
                found |= read
            decoded = {key: _decoded(key, entry) for key, entry in found.items()}
            return {key: score for key, score in decoded.items() if score is not None}

    def put(self, answers: Mapping[bytes, Score]) -> None:
        """Store answers; discard the oldest if there is no room."""
        entries = {key: _encoded(key, score) for key, score in answers.items()}
        with self._lock:
            self._remember(entries)
            if self._file is not None and entries:
                self._file.put(entries)

    def close(self) -> None:
        self._threads.close()
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _remember(self, entries: Mapping[bytes, bytes]) -> None:
        for key, entry in entries.items():
            self._held += _OVERHEAD + len(entry)
            if (before := self._memory.pop(key, None)) is not None:
                self._held -= _OVERHEAD + len(before)
            self._memory[key] = entry
        while self._held > self._bound and self._memory:
            _, forgotten = self._memory.popitem(last=False)
            self._held -= _OVERHEAD + len(forgotten)


def _encoded(key: bytes, score: Score) -> bytes:
    content = msgspec.msgpack.encode(score)
    return _sum(key, content) + content


def _decoded(key: bytes, entry: Any) -> Score | None:
    """Return an entry's score; None if the entry is damaged, another key's, or not a valid score."""
    if not isinstance(entry, bytes) or _sum(key, entry[_SUM_BYTES:]) != entry[:_SUM_BYTES]:
        return None
    try:
        return require_score("cache", decode_msgpack(entry[_SUM_BYTES:], Score, _MOST_VALUES))
    except (msgspec.MsgspecError, ScoreError):
        return None


def _sum(key: bytes, content: bytes) -> bytes:
    return blake2b(key + content, digest_size=_SUM_BYTES).digest()

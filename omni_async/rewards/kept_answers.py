"""Reads and writes the score cache for one scorer, off the event loop.

Waits only for the cache's threads; they are unblocked by its file, see `omni_async.rewards.score_file`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from omni_async.media import Media
from omni_async.rewards.cache import ScoreCache, digest_of, key_of
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score

Keys = list[bytes | None]


class KeptAnswers:
    """The cached answers of the scorer with this `identity`.

    `cache` and `threads` are shared with other scorers. `report` gets a sentence when the cache's file is unusable."""

    def __init__(
        self, identity: bytes, cache: ScoreCache, threads: Threads, report: Callable[[str], Awaitable[None]]
    ) -> None:
        self._identity = identity
        self._cache = cache
        self._threads = threads
        self._report = report

    async def keys(self, media: Sequence[Media], prompts: Sequence[Prompt]) -> Keys:
        """Return the key of each sample's answer; None for a sample whose answer cannot be cached."""
        return await self._threads.run(partial(self._made, media, prompts))

    def _made(self, media: Sequence[Media], prompts: Sequence[Prompt]) -> Keys:
        return [key_of(self._identity, digest_of(one), prompt) for one, prompt in zip(media, prompts, strict=True)]

    async def look_up(self, keys: Keys) -> dict[bytes, Score]:
        """Return the known answers."""
        asked = [key for key in keys if key is not None]
        return await self._threads.run(partial(self._cache.get, asked)) if asked else {}

    async def keep(self, answers: Mapping[bytes, Score]) -> None:
        """Store answers. Warn once if the cache file is unusable."""
        await self._threads.run(partial(self._cache.put, answers))
        if (problem := self._cache.new_problem()) is not None:
            await self._report(f"warning: reward.cache.path: {problem}; scores are not kept there")

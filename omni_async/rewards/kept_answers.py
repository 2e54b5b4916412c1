"""Asks the score cache for the answers of a reward's scorers, off the event loop.

Owns the cache and its thread, and waits for it alone; unblocked by its file, see `omni_async.rewards.score_file`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from omni_async.config.schema import ScoreCache as CacheConfig
from omni_async.media import Media
from omni_async.rewards.cache import ScoreCache, digest_of, key_of
from omni_async.rewards.threads import Threads
from omni_async.types import Prompt, Score

# The key of every answer that may be kept, by the scorer's number and the sample's position.
Keys = dict[tuple[int, int], bytes]


class KeptAnswers:
    """The kept answers of scorers with these `identities`; None: of that scorer none are kept.

    `report` gets a sentence when the file cannot be used."""

    def __init__(
        self,
        identities: Sequence[bytes | None],
        config: CacheConfig,
        threads: Threads,
        report: Callable[[str], Awaitable[None]],
    ) -> None:
        self._identities = identities
        self._cache = ScoreCache(config)
        self._threads = threads
        self._report = report
        self._reported = False

    async def keys(self, media: Sequence[Media], prompts: Sequence[Prompt]) -> Keys:
        return await self._threads.run(partial(self._made, media, prompts))

    def _made(self, media: Sequence[Media], prompts: Sequence[Prompt]) -> Keys:
        digests = [digest_of(one) for one in media]
        found = {
            (number, i): key_of(identity, digests[i], prompts[i])
            for number, identity in enumerate(self._identities)
            if identity is not None
            for i in range(len(media))
        }
        return {place: key for place, key in found.items() if key is not None}

    async def look_up(self, keys: Sequence[bytes]) -> dict[bytes, Score]:
        """Return the answers that are known."""
        return await self._threads.run(partial(self._cache.get, keys))

    async def keep(self, answers: dict[bytes, Score]) -> None:
        await self._threads.run(partial(self._cache.put, answers))
        if self._cache.problem is not None and not self._reported:
            self._reported = True
            await self._report(f"warning: reward.cache.path: {self._cache.problem}; scores are not kept there")

    def close(self) -> None:
        self._threads.close()
        self._cache.close()

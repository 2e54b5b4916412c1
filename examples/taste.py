"""An asynchronous scorer that queries a service; docs/rewards/own.md explains its attributes.

In a recipe: `reward: {scorers: [{name: "taste.py:TasteScorer", params: {url: "http://127.0.0.1:9000"}}]}`
"""

from __future__ import annotations

import aiohttp

from omni_async.media import Media
from omni_async.rewards.base import Outage, Scorer
from omni_async.types import Prompt, Score


class TasteScorer(Scorer):
    name, accepts, needs, concurrency = "taste", ("image",), ("style",), 64

    def __init__(self, *, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        self._session = self._session or aiohttp.ClientSession()
        scores = []
        for one, prompt in zip(media, prompts, strict=True):
            brightness = float(one.pixels.mean())
            asked = {"style": prompt.metadata["style"], "brightness": brightness}
            async with self._session.post(self._url, json=asked) as answer:
                if answer.status == 503:
                    raise Outage("it is loading")
                answer.raise_for_status()
                scores.append(Score(float((await answer.json())["taste"]), {"brightness": brightness}))
        return scores

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

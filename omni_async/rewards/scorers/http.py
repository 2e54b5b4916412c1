"""Calls reward servers: `omni-async serve-reward`, or any server of the protocol of `docs/rewards/http.md`.

Waits for their answers, see `omni_async.rewards.scorers.model_servers`. A sample's key is computed from its content, so
that a server which has scored it already can answer a repeated request from memory.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Literal

import msgspec
import xxhash

from omni_async.aio.backoff import Backoff
from omni_async.aio.threads import in_daemon_thread
from omni_async.config.redact import one_line, redact_text
from omni_async.config.section import Urls
from omni_async.media import Media
from omni_async.plugins.families import PARTS
from omni_async.rewards import wire
from omni_async.rewards.base import Addresses, Outage, ScoreError, Scorer, Unbounded
from omni_async.rewards.scorers.model_servers import BadAnswer, Connections, ModelServers, Question, Retries, Seconds
from omni_async.types import Prompt, Score


class HttpScorer(Scorer):
    """A scorer that returns the value, parts and text of a server's answer.

    `urls`: servers that score alike; `token` is sent to each of them. `server`: a role of the run whose workers are
    also such servers. `path`: the prefix of the protocol's own path. `timeout_s`: the longest time of one attempt.
    `hedge_s`: after this time a second server is called concurrently, and the first answer counts; null: never.
    `connections`: the most that are open at once. `form`: the encoding of samples."""

    name = "http"
    accepts = PARTS
    cost = "elsewhere"

    def __init__(
        self,
        *,
        urls: Urls = (),
        server: str | None = None,
        path: str = "",
        token: str | None = None,
        timeout_s: Seconds = 15.0,
        hedge_s: Seconds | None = None,
        retries: Retries = 2,
        backoff_s: Seconds = 0.5,
        backoff_max_s: Seconds = 10.0,
        connections: Connections = 64,
        form: Literal["msgpack", "json"] = "msgpack",
    ) -> None:
        self._form = wire.MSGPACK if form == "msgpack" else wire.JSON
        self._path = path + wire.PATH
        self._servers = ModelServers(
            urls,
            server,
            token=token,
            timeout_s=timeout_s,
            hedge_s=hedge_s,
            retries=retries,
            pauses=Backoff(backoff_s, backoff_max_s),
            connections=connections,
        )
        # Without it, keys would reveal to any client of the server which samples another client has scored.
        self._salt = secrets.token_bytes(16)

    def connect(self, addresses: Addresses) -> None:
        self._servers.connect(addresses)

    async def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        body = await in_daemon_thread(self._encoded, media, prompts)
        question = Question(self._path, body, {"Content-Type": self._form})
        read = partial(self._answer, len(media))
        answer = await self._servers.ask(question, read, lambda content: wire.decode_refusal(content, self._form))
        failed = [one for one in answer.scores if one.error is not None or one.value is None]
        for outcome in sorted(failed, key=lambda one: one.kind != "outage"):
            kind = {"outage": Outage, "unbounded": Unbounded}.get(outcome.kind, ScoreError)
            raise kind(redact_text(one_line(outcome.error or "the server sent neither a value nor an error", 300)))
        return [Score(one.value, one.parts, one.text) for one in answer.scores if one.value is not None]

    def _answer(self, num_samples: int, content: bytes) -> wire.Answer:
        try:
            answer = wire.decode_answer(content, self._form)
        except wire.WireError as error:
            raise BadAnswer(f"sent no answer of the protocol: {error}") from None
        if len(answer.scores) != num_samples:
            raise ScoreError(f"answered with {len(answer.scores)} scores for {num_samples} samples")
        return answer

    def _encoded(self, media: list[Media], prompts: list[Prompt]) -> bytes:
        samples = tuple(self._sample(one, prompt) for one, prompt in zip(media, prompts, strict=True))
        return wire.encode(wire.Request(1, samples), self._form)

    def _sample(self, media: Media, prompt: Prompt) -> wire.WireSample:
        sample = wire.sent_sample(media, prompt, None)
        digest = xxhash.xxh3_128(self._salt)
        digest.update(msgspec.msgpack.encode(sample.prompt))
        for part in media.arrays:
            array: wire.Array = getattr(sample.media, part)
            digest.update(msgspec.msgpack.encode((part, array.shape, array.rate)))
            digest.update(array.data)
        if sample.media.text is not None:
            digest.update(msgspec.msgpack.encode(("text", sample.media.text)))
        return msgspec.structs.replace(sample, key=digest.hexdigest())

    async def close(self) -> None:
        await self._servers.close()

"""Scores every sample with a vision-language model, through any endpoint of OpenAI's chat completions.

An image is sent unchanged, a video as frames spaced evenly between its first and its last. A text is quoted in the
question, after the prompt's images. The questions and the reading of answers are in
`omni_async.rewards.scorers.judging`. Servers, retries and waiting are in `omni_async.rewards.scorers.model_servers`.
"""

from __future__ import annotations

import base64
import io
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from omni_async.aio.backoff import Backoff
from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import all_of
from omni_async.config.section import Urls
from omni_async.data.image_files import read_prompt_image
from omni_async.media import Media, evenly
from omni_async.rewards.base import Addresses, ScoreError, Scorer, describe
from omni_async.rewards.scorers.judging import (
    ANSWER_PROMPTS,
    PROMPTS,
    Mode,
    Reply,
    Template,
    preference,
    rating,
    read_refusal,
    read_reply,
    reading,
)
from omni_async.rewards.scorers.model_names import MOST_NAMES, is_version_of, listed_names
from omni_async.rewards.scorers.model_servers import Connections, ModelServers, Question, Retries, Seconds
from omni_async.rewards.scorers.ocr import missing_text
from omni_async.types import Prompt, Score

_PATH = "/v1/chat/completions"
_MODELS = "/v1/models"


class _OtherModelError(ScoreError):
    """Another model than the judge answered."""


class VlmJudgeScorer(Scorer):
    """The judge. `model`: the name that its servers serve it by.

    `answers_as`: the name in its answers, if it is neither this name, nor a version of it, nor listed as the same.
    `urls`: servers, without `/v1`, which all receive `token`; `server`: an entry of `reward.servers`, or another role
    of the run. `mode`, and its texts `prompt` and `system`: see `omni_async.rewards.scorers.judging`. `lowest` and
    `highest`: of a rating. `frames`: of a video. `side`: the most pixels of an image's longer side; a larger image is
    scaled down. `from_text`: take yes or no from the text if a server sends no log-probabilities. `least_mass`: the
    least probability of the two words together.

    Parts: `prompt_tokens` and `completion_tokens`, the tokens that the judge read and wrote."""

    name = "vlm_judge"
    accepts = ("image", "video", "text")
    cost = "elsewhere"

    def __init__(
        self,
        *,
        model: str,
        answers_as: str | None = None,
        urls: Urls = (),
        server: str | None = None,
        token: str | None = None,
        mode: Mode = "yes_no",
        prompt: str | None = None,
        system: str | None = None,
        lowest: float = 1.0,
        highest: float = 10.0,
        from_text: bool = False,
        least_mass: Annotated[float, Meta(ge=0, le=1)] = 0.1,
        frames: Annotated[int, Meta(ge=1, le=256)] = 4,
        side: Annotated[int, Meta(ge=16, le=8192)] = 1024,
        image_format: Literal["png", "jpeg"] = "png",
        max_tokens: Annotated[int, Meta(ge=1, le=8192)] | None = None,
        temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0,
        top_logprobs: Annotated[int, Meta(ge=2, le=20)] = 20,
        timeout_s: Seconds = 60.0,
        hedge_s: Seconds | None = None,
        retries: Retries = 2,
        backoff_s: Seconds = 0.5,
        backoff_max_s: Seconds = 10.0,
        connections: Connections = 256,
    ) -> None:
        self._question = _template(PROMPTS[mode] if prompt is None else prompt, lowest, highest)
        # The question about a text, None if the mode has none.
        own = ANSWER_PROMPTS.get(mode) if prompt is None else prompt
        self._about_text = _template(own, lowest, highest) if own is not None and mode in ANSWER_PROMPTS else None
        self._system = system
        self._model = model
        self._names = {model} if answers_as is None else {model, answers_as}
        self._mode = mode
        self._range = lowest, highest
        self._from_text, self._least_mass = from_text, least_mass
        self._frames, self._side, self._format = frames, side, image_format
        one_token = mode in ("yes_no", "pairwise")
        self._settings: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens or (1 if one_token and not from_text else 16 if mode != "text" else 256),
            "temperature": temperature,
        }
        if one_token:
            self._settings |= {"logprobs": True, "top_logprobs": top_logprobs}
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

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require the fields of the judge's own prompt, a text to read, or an image to compare with."""
        mode = params["mode"]
        question = PROMPTS[mode] if params["prompt"] is None else params["prompt"]
        missing = _template(question, params["lowest"], params["highest"]).missing(prompt)
        if missing is not None:
            return f"the prompt has no {missing}"
        if mode == "pairwise" and not prompt.images:
            return "the prompt has no image to compare the sample with"
        return missing_text(prompt) if mode == "text" else None

    def connect(self, addresses: Addresses) -> None:
        self._servers.connect(addresses)

    async def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return await all_of(map(self._score, range(len(media)), media, prompts))

    async def _score(self, position: int, media: Media, prompt: Prompt) -> Score:
        try:
            question = self._asked(media, prompt)
            shown = await in_daemon_thread(self._shown, media, prompt)
            if self._mode == "pairwise":
                return await self._compared(shown, prompt, question)
            reply = await self._ask(shown, question)
            return _scored(self._value(reply, prompt), reply)
        except ScoreError as error:
            raise type(error)(f"{describe(position, prompt)}: {error}") from None

    def _value(self, reply: Reply, prompt: Prompt) -> float:
        if self._mode == "rating":
            return rating(reply, *self._range)
        if self._mode == "text":
            return reading(reply, prompt)
        return preference(reply, "yes", "no", self._from_text, self._least_mass)

    def _asked(self, media: Media, prompt: Prompt) -> str:
        """Return the question about a sample. ScoreError if the mode or the judge's prompt is of other media."""
        if media.text is None:
            return self._question.filled(prompt)
        if self._about_text is None:
            raise ScoreError(f"mode {self._mode} judges images, the sample is a text")
        return self._about_text.filled(prompt, media.text)

    async def _compared(self, sample: list[str], prompt: Prompt, question: str) -> Score:
        """Ask for the better of the sample and the prompt's image, in both orders, because judges prefer a position."""
        other = await in_daemon_thread(self._encoded, read_prompt_image(prompt.images[0]))
        replies = await all_of((self._ask(sample + other, question), self._ask(other + sample, question)))
        first, second = (preference(reply, "a", "b", self._from_text, self._least_mass) for reply in replies)
        return _scored((first + 1 - second) / 2, *replies)

    async def _ask(self, images: list[str], asked: str) -> Reply:
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        content.append({"type": "text", "text": asked})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        body = msgspec.json.encode({**self._settings, "messages": messages})
        question = Question(_PATH, body, {"Content-Type": "application/json"})
        known = self._names
        try:
            return await self._servers.ask(question, self._read, read_refusal)
        except _OtherModelError:
            bodies = await self._servers.fetch(_MODELS)
            listed = [await in_daemon_thread(listed_names, body, self._model) for body in bodies]
            names = self._names.union(*listed)
            if len(names) <= MOST_NAMES:  # a server may list other names every time
                self._names = names
            if self._names == known:
                raise
        return await self._servers.ask(question, self._read, read_refusal)

    def _read(self, content: bytes) -> Reply:
        """Read an answer. Raises as `read_reply` does, and ScoreError if another model answered."""
        reply = read_reply(content)
        if reply.model is None or reply.model in self._names or is_version_of(reply.model, self._model):
            return reply
        raise _OtherModelError(
            f"answered as {reply.model[:200]!r}, asked for {self._model!r};"
            " if it is the same model, set params.answers_as"
        )

    def _shown(self, media: Media, prompt: Prompt) -> list[str]:
        """Return the data URLs of the sample's pictures; of the prompt's images if the sample is a text."""
        if media.text is None:
            return self._encoded(media)
        return [url for image in prompt.images for url in self._encoded(read_prompt_image(image))]

    def _encoded(self, media: Media) -> list[str]:
        """Return the data URLs of the image, or of frames of the video."""
        pixels = [media.pixels] if media.image is not None else [*evenly(media.frames, self._frames)]
        return [self._data_url(one) for one in pixels]

    def _data_url(self, pixels: NDArray[np.uint8]) -> str:
        from PIL import Image

        image = Image.fromarray(np.ascontiguousarray(pixels))
        image.thumbnail((self._side, self._side))
        buffer = io.BytesIO()
        image.save(buffer, self._format.upper(), **({"quality": 95} if self._format == "jpeg" else {}))
        return f"data:image/{self._format};base64,{base64.b64encode(buffer.getvalue()).decode()}"

    async def close(self) -> None:
        await self._servers.close()


def _template(question: str, lowest: float, highest: float) -> Template:
    if not lowest < highest:
        raise ValueError(f"highest: expected more than lowest = {lowest:g}, got {highest:g}")
    return Template(question, lowest=f"{lowest:g}", highest=f"{highest:g}")


def _scored(value: float, *replies: Reply) -> Score:
    parts = {
        "prompt_tokens": float(sum(reply.prompt_tokens for reply in replies)),
        "completion_tokens": float(sum(reply.completion_tokens for reply in replies)),
    }
    return Score(value, parts, " / ".join(reply.text.strip() for reply in replies) or None)

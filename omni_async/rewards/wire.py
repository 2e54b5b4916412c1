"""Defines the messages of reward servers and their clients: version 1 of the protocol of `docs/rewards/http.md`.

The same structs are encoded in MessagePack, with bytes as bytes, or in JSON, with bytes as base64. Both sides treat
received messages as foreign data: decoding checks kinds, `sample_of` checks the rest, and neither can run code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from omni_async.config import decoding
from omni_async.config.decoding import decode_json, decode_msgpack
from omni_async.config.redact import one_line
from omni_async.data.image_files import digest_of, encoded_bytes
from omni_async.media import Media
from omni_async.types import Fault, Prompt, PromptAudio, PromptFile, PromptImage, PromptVideo

File = TypeVar("File", bound=PromptFile)

PATH = "/v1/score"
MSGPACK, JSON = "application/msgpack", "application/json"
# Why a sample has no score: the sample itself, a scorer that is down, or a value beyond reward.max_abs.
Kind = Literal["sample", "outage", "unbounded"]
_FAULTS: dict[Kind, Fault] = {"sample": "retry", "outage": "outage", "unbounded": "reject"}

_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "float32": np.dtype("<f4")}
_DEEPEST = 50  # levels of a prompt's metadata
_MOST_VALUES = 20_000  # of a prompt's metadata
# Values of a message: of all metadata together, and as many parts as an answer can have.
_MOST_ASKED, _MOST_ANSWERED, _MOST_REFUSED = 250_000, 600_000, 1000
_MOST_FILES = 16  # of a kind, of a prompt
_MOST_SAMPLES = 1024
Extent = Annotated[int, Meta(ge=1, le=2**31)]
_LONGEST_TEXT = 2**20  # characters: as long as a line of a prompt file
Text = Annotated[str, Meta(max_length=_LONGEST_TEXT)]


class WireError(ValueError):
    """A received message breaks the protocol; the text is one line, for the other side."""


class Array(msgspec.Struct, frozen=True):
    """One part of a sample's media: `data` are its elements, row by row, little-endian.

    `rate`: frames a second of a video, samples a second of audio."""

    dtype: Literal["uint8", "float32"]
    shape: Annotated[tuple[Extent, ...], Meta(min_length=2, max_length=4)]
    data: bytes
    rate: Annotated[float, Meta(gt=0, le=1e6)] | None = None


class Written(msgspec.Struct, frozen=True):
    """A sample that is a text. `finish`: `stop`, or `length` if it ended at the largest number of tokens.

    `tokens`: their number, if known."""

    text: Text
    finish: Literal["stop", "length"] = "stop"
    tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None


class WireMedia(msgspec.Struct, frozen=True, omit_defaults=True):
    """At least one part of `omni_async.media.Media`."""

    image: Array | None = None
    video: Array | None = None
    audio: Array | None = None
    text: Written | None = None


class WirePrompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt; `images` are the bytes of its PNG, JPEG or WebP files, `audio` and `video` those of its other files."""

    text: Text
    index: Annotated[int, Meta(ge=0, le=2**62)] = 0
    target: Text | None = None
    metadata: dict[str, Any] = {}
    images: Annotated[tuple[bytes, ...], Meta(max_length=_MOST_FILES)] = ()
    audio: Annotated[tuple[bytes, ...], Meta(max_length=_MOST_FILES)] = ()
    video: Annotated[tuple[bytes, ...], Meta(max_length=_MOST_FILES)] = ()


class WireSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sample. Samples with the same `key` are the same sample: a server may answer the second from memory."""

    prompt: WirePrompt
    media: WireMedia
    key: Annotated[str, Meta(min_length=1, max_length=128)] | None = None


class Request(msgspec.Struct, frozen=True):
    version: Literal[1]
    samples: Annotated[tuple[WireSample, ...], Meta(min_length=1, max_length=_MOST_SAMPLES)]


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer for one sample: a value, with parts and a text, or an error and its kind."""

    value: float | None = None
    parts: dict[str, float] = {}
    text: str | None = None
    error: str | None = None
    kind: Kind = "sample"


class Answer(msgspec.Struct, frozen=True):
    """One outcome per sample, in their order."""

    version: Literal[1]
    scores: Annotated[tuple[Outcome, ...], Meta(max_length=_MOST_SAMPLES)]


class Refusal(msgspec.Struct, frozen=True):
    """The body of every status but 200."""

    error: str


def kind_of(fault: Fault) -> Kind:
    return next((kind for kind, one in _FAULTS.items() if one == fault), "sample")


_ENCODERS: dict[str, msgspec.msgpack.Encoder | msgspec.json.Encoder] = {
    MSGPACK: msgspec.msgpack.Encoder(),
    JSON: msgspec.json.Encoder(),
}


def encode(message: Any, form: str) -> bytes:
    return _ENCODERS[form].encode(message)


def widening(body: bytes | bytearray, form: str) -> int:
    """Return the most bytes that the texts of a request may take in memory beyond the bytes of its body.

    Raises WireError for MessagePack that is not a request."""
    if form == JSON:
        return 0 if body.isascii() and b"\\u" not in body else 3 * len(body)
    try:
        return decoding.widening(body, _MOST_ASKED, _LONGEST_TEXT)
    except msgspec.DecodeError as error:
        raise WireError(str(error)) from None


def decode_request(body: bytes | bytearray, form: str) -> Request:
    """Return a client's request; WireError if the body is not a request."""
    return _decoded(body, form, Request, _MOST_ASKED)


def decode_answer(body: bytes, form: str) -> Answer:
    """Return a server's answer; WireError if the body is not an answer."""
    return _decoded(body, form, Answer, _MOST_ANSWERED)


def decode_refusal(body: bytes, form: str) -> str:
    """Return a server's own reason for a refusal, or an empty text if it has no readable reason."""
    try:
        refusal: Refusal = _decoded(body, form, Refusal, _MOST_REFUSED)
    except WireError:
        return ""
    return refusal.error


def _decoded(body: bytes | bytearray, form: str, kind: type[Any], most: int) -> Any:
    """Return a message of at most `most` values, which are counted before any is decoded."""
    try:
        if form == MSGPACK:
            return decode_msgpack(body, kind, most, _LONGEST_TEXT)
        return decode_json(body, kind, most)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise WireError(one_line(str(error), 300)) from None


# ---- samples ---------------------------------------------------------------------------------------------------------


def sent_sample(media: Media, prompt: Prompt, key: str | None) -> WireSample:
    """Convert a sample to its message; ValueError if a file of its prompt cannot be read."""
    rates = {"image": None, "video": media.fps, "audio": media.sample_rate}
    media = media.numpy()
    parts: dict[str, Any] = {name: _sent(getattr(media, name), rates[name]) for name in media.arrays}
    if media.text is not None and media.finish is not None:
        parts["text"] = Written(media.text, media.finish, media.tokens)
    files = (tuple(map(encoded_bytes, part)) for part in (prompt.images, prompt.audio, prompt.video))
    sent = WirePrompt(prompt.text, prompt.index, prompt.target, prompt.metadata, *files)
    return WireSample(sent, WireMedia(**parts), key)


def _sent(array: Any, rate: float | None) -> Array:
    form: Literal["uint8", "float32"] = "uint8" if array.dtype == np.uint8 else "float32"
    return Array(form, tuple(array.shape), array.astype(_DTYPES[form], copy=False).tobytes(), rate)


def sample_of(sample: WireSample) -> tuple[Media, Prompt]:
    """Return the media, as read-only arrays, and the prompt; WireError names the invalid part."""
    found = sample.media
    try:
        media = Media(
            image=_array("image", found.image),
            video=_array("video", found.video),
            fps=found.video.rate if found.video else None,
            audio=_array("audio", found.audio),
            sample_rate=_whole(found.audio.rate) if found.audio else None,
            text=found.text.text if found.text else None,
            finish=found.text.finish if found.text else None,
            tokens=found.text.tokens if found.text else None,
        )
    except ValueError as error:
        raise WireError(one_line(str(error), 300)) from None
    if media.audio is not None and not np.isfinite(media.audio).all():
        raise WireError("audio: expected finite numbers")
    sent = sample.prompt
    _require_plain(sent.metadata, count())
    images, audio = _carried(PromptImage, sent.images), _carried(PromptAudio, sent.audio)
    video = _carried(PromptVideo, sent.video)
    return media, Prompt(sent.index, sent.text, sent.target, sent.metadata, images, audio=audio, video=video)


def _carried(kind: type[File], contents: tuple[bytes, ...]) -> tuple[File, ...]:
    return tuple(kind(f"{kind.part} {i} of the prompt", digest_of(one), one) for i, one in enumerate(contents))


def _array(part: str, sent: Array | None) -> Any:
    if sent is None:
        return None
    dtype = _DTYPES[sent.dtype]
    if (expected := math.prod(sent.shape) * dtype.itemsize) != len(sent.data):
        shape = list(sent.shape)
        raise WireError(f"{part}: {sent.dtype} of shape {shape} has {expected} bytes, got {len(sent.data)}")
    return np.frombuffer(sent.data, dtype).reshape(sent.shape).astype(sent.dtype, copy=False)


def _whole(rate: float | None) -> int | None:
    if rate is not None and rate != int(rate):
        raise WireError(f"audio: expected a whole number of samples a second, got {rate:g}")
    return None if rate is None else int(rate)


def num_values(tree: Any) -> int:
    """Return the number of values in metadata, without their keys."""
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return 1 + sum(map(num_values, items))


def _require_plain(value: Any, values: Iterator[int], depth: int = 0) -> None:
    """Refuse metadata that no JSON file could hold: MessagePack has bytes, times and extensions."""
    if next(values) > _MOST_VALUES or depth > _DEEPEST:
        raise WireError(f"metadata: more than {_MOST_VALUES} values, or nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise WireError(f"metadata: keys are texts, got a {type(name).__name__}")
            _require_short(name)
            _require_plain(item, values, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _require_plain(item, values, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise WireError("metadata: expected finite numbers")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise WireError("metadata: expected integers of 64 bits")
    elif isinstance(value, str):
        _require_short(value)
    elif value is not None and not isinstance(value, int | float):
        raise WireError(f"metadata: expected what JSON holds, got a {type(value).__name__}")


def _require_short(text: str) -> None:
    if len(text) > _LONGEST_TEXT:
        raise WireError(f"metadata: expected texts of {_LONGEST_TEXT} characters at most, got {len(text)}")

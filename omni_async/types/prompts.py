"""Defines a prompt and the files that it carries."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class PromptFile(msgspec.Struct, frozen=True, gc=False):
    """A file that a prompt carries: its absolute path, and the digest of its bytes.

    Without a file, as for a generated image, `content` holds the bytes, and `path` describes them."""

    part: ClassVar[str]

    path: str
    digest: str
    content: bytes | None = None


class PromptImage(PromptFile, frozen=True, gc=False):
    part: ClassVar[str] = "image"


class PromptAudio(PromptFile, frozen=True, gc=False):
    part: ClassVar[str] = "audio"


class PromptVideo(PromptFile, frozen=True, gc=False):
    part: ClassVar[str] = "video"


class Prompt(msgspec.Struct, frozen=True):
    """One row of a table of prompts.

    `index` is the row's position among the non-empty rows; grouping never uses `text`. `negative_prompt` replaces that
    of the sampling spec; None: the spec's."""

    index: int
    text: str
    target: str | None = None
    metadata: dict[str, Any] = {}
    images: tuple[PromptImage, ...] = ()
    negative_prompt: str | None = None
    audio: tuple[PromptAudio, ...] = ()
    video: tuple[PromptVideo, ...] = ()

    @property
    def files(self) -> tuple[PromptFile, ...]:
        """Return its files in the order of the model's input."""
        return *self.images, *self.video, *self.audio

    @property
    def content(self) -> list[Any]:
        """Return all of it but its position, for digests: files by their digests, and nothing for an absent part."""
        negative = [] if self.negative_prompt is None else [self.negative_prompt]
        heard = [[one.digest for one in self.audio]] if self.audio else []
        seen = [["video", *(one.digest for one in self.video)]] if self.video else []
        images = [image.digest for image in self.images]
        return [self.text, self.target, self.metadata, images, *negative, *heard, *seen]

    @property
    def digests(self) -> tuple[str, ...]:
        """Return the digests of its files."""
        return tuple(one.digest for one in self.files)

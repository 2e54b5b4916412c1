"""Caches the conditioning of the latest prompts: a group repeats its prompt, and text encoders are frozen."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from tensordict import TensorDict

from omni_async.policy import Codec
from omni_async.types import SampleRequest


class ConditioningCache:
    """A cache for one thread. `size` prompts are kept, the least recently used one goes first."""

    def __init__(self, codec: Codec, size: int = 64) -> None:
        self.codec = codec
        self._size = size
        self._kept: OrderedDict[tuple[Any, ...], TensorDict] = OrderedDict()

    def of(self, request: SampleRequest) -> TensorDict:
        """Return the request's conditioning, batch size []; with the unconditional branch if the request is guided.

        Shared between callers: not to be written to."""
        prompt = request.prompt
        key = (prompt.text, tuple(image.digest for image in prompt.images), request.spec)
        if key not in self._kept:
            self._kept[key] = self.codec.encode(prompt, request.spec)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

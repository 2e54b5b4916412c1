"""What every section of the schema is made of."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


def doc(text: str, **bounds: Any) -> Meta:
    """A field's documentation and bounds."""
    return Meta(description=text, **bounds)


Positive = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of every section: unknown keys are errors, values never change after loading."""

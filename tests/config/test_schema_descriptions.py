"""Tests that the schema documents itself: every field has a description, and its bounds can be put in words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from omni_async.config import Config
from omni_async.config.describe import annotation_at, describe, description, fields_of, struct_of, walk

FIELDS = {path: (annotation, default) for path, annotation, default in walk(Config)}


def test_every_field_is_described_and_says_what_it_allows() -> None:
    for path, (annotation, _) in FIELDS.items():
        assert description(annotation).strip() and description(annotation).endswith((".", "?")), path
        text = describe(annotation)
        assert text and not any(word in text for word in ("<class", "typing.", "Annotated")), (path, text)
        assert describe(annotation_at(Config, path.replace("[]", ".0").split("."))) == text


def test_the_walk_reaches_every_field_of_every_section() -> None:
    def count(section: type[msgspec.Struct]) -> int:
        nested = [struct_of(annotation) for annotation in fields_of(section).values()]
        return len(nested) + sum(count(s) for s in nested if s is not None)

    assert len(FIELDS) == count(Config)
    assert {"model.lora.rank", "reward.scorers[].name", "rollout.sde.window.range", "trainer.ema.decay"} <= set(FIELDS)


def test_required_fields_are_those_without_a_sensible_default() -> None:
    required = {path for path, (_, default) in FIELDS.items() if default is msgspec.NODEFAULT}
    named = {"model.path", "reward.scorers[].name", "validation.prompts", "emulation.profile", "roles[].name"}
    assert required == {"model", "data", *named}


def test_every_section_refuses_unknown_keys_and_never_changes() -> None:
    sections = {Config} | {s for annotation, _ in FIELDS.values() if (s := struct_of(annotation)) is not None}
    for section in sections:
        assert section.__struct_config__.forbid_unknown_fields and section.__struct_config__.frozen, section


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (Annotated[int, Meta(ge=1, lt=9)], "int >= 1, < 9"),
        (Annotated[float, Meta(gt=0)] | None, "float > 0 or null"),
        (tuple[Annotated[float, Meta(gt=0)], Annotated[float, Meta(gt=0)]] | None, "list of 2 float > 0 or null"),
        (Literal["a", "b"], "one of 'a', 'b'"),
        (tuple[int, int], "list of 2 int"),
        (Annotated[tuple[str, ...], Meta(min_length=1)], "list of str length >= 1"),
        (dict[str, Any], "mapping"),
        (Config, "mapping"),
        (Annotated[int, Meta(multiple_of=16)], "int multiple of 16"),
        (Annotated[str, Meta(pattern="^a$")], "str matching ^a$"),
    ],
)
def test_bounds_are_put_in_words(annotation: Any, text: str) -> None:
    assert describe(annotation) == text


def test_items_of_a_list_have_the_annotation_of_an_item_also_where_there_may_be_none() -> None:
    for path in ("algorithm.correction.k1.0", "algorithm.correction.k1.1", "algorithm.correction.band.1"):
        assert describe(annotation_at(Config, path.split("."))) == "float > 0"
    assert describe(annotation_at(Config, ["trainer", "optimizer", "betas", "1"])) == "float >= 0, < 1"


def test_paths_that_leave_the_schema_have_no_annotation() -> None:
    inside_values = ("run.seed.x", "reward.scorers.0.params.x", "model.lora.rank.0", "algorithm.correction.cap.0")
    for path in ("nothing", "0", *inside_values):
        assert annotation_at(Config, path.split(".")) is None

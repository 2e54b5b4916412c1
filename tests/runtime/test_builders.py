"""Tests how the roles' parts that other packages bring are built: what fails is named."""

import pytest

from omni_async.programs import RolloutProgram
from omni_async.runtime import builders
from tests.config.recipe import MINIMAL, load_text

NAMED = ("rollout.calls=2", "rollout.program={name: refine, settings: {judge: {name: jpeg_size}}}")


def raises(config: object) -> None:
    raise OSError("no such file")


def forgets(config: object) -> None:
    """Returns no program."""


@pytest.mark.parametrize(
    ("build", "said"), [("raises", "OSError: no such file"), ("forgets", "expected a Program, got a NoneType")]
)
def test_a_rollout_program_that_is_not_built_is_named(monkeypatch, build, said):
    monkeypatch.setattr(builders, "find_program", lambda name: RolloutProgram(f"{__name__}:{build}"))
    with pytest.raises(RuntimeError, match=f"rollout.program 'refine' was not built: {said}"):
        builders.built_program(load_text(MINIMAL, *NAMED))


def test_the_program_of_a_recipe_is_built_and_none_where_it_names_none():
    assert type(builders.built_program(load_text(MINIMAL, *NAMED))).__name__ == "Refine"
    assert builders.built_program(load_text(MINIMAL)) is None

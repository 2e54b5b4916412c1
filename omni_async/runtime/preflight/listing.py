"""Lists the names that a recipe may use, for `omni-async list`.

First come model families, with their outputs and engines, then engines, trainer backends, transitions, scorers, roles,
rollout programs and algorithms. Broken registrations of other packages are marked. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from omni_async.algorithms.registry import find_objective, objective_names
from omni_async.config.describe import describe, description, fields_of, walk
from omni_async.config.rollout import Rollout, Sde
from omni_async.config.section import Section
from omni_async.plugins.backends import backend_names, load_backend
from omni_async.plugins.families import family_names, find_family
from omni_async.plugins.programs import find_program, program_names
from omni_async.plugins.services import find_service, service_names
from omni_async.records.write.console import columns
from omni_async.rewards.registry import names

T = TypeVar("T")

_BROKEN = "(cannot be used)"
_HEADINGS = ("model families", "media", "components", "engines", "batching")


def listing(what: str | None = None) -> Iterator[str]:
    """Yield the lines of the list, or only those of the part `what`."""
    for kind, lines in _LINES.items():
        if what in (None, kind):
            yield from lines()


def _families() -> Iterator[str]:
    yield from columns([_HEADINGS, *(_family(name) for name in family_names())])


def _named(kind: str, found: Callable[[], str]) -> Callable[[], Iterator[str]]:
    """Return a function that yields a kind's one line, with the names that `found` returns."""
    return lambda: iter([f"{kind:<16}{found()}"])


def _algorithms() -> Iterator[str]:
    yield "algorithms"
    width = max(map(len, objective_names())) + 1
    for name in objective_names():
        try:
            objective = find_objective(name)
        except ValueError as error:
            yield f"  {name:<{width}}(cannot be used: {error})"
            continue
        yield f"  {name:<{width}}{objective.summary}"
        for path, field, _ in walk(objective.settings, "algorithm.settings.") if objective.settings else ():
            yield f"{'':16}{path}: {describe(field)}. {description(field)}"


def _usable(find: Callable[[str], T], name: str) -> T | None:
    try:
        return find(name)
    except ValueError:
        return None


def _marked(names: Iterable[str], find: Callable[[str], object]) -> Iterator[str]:
    """Yield the names; a name that `find` refuses is marked."""
    return (name if _usable(find, name) else f"{name} {_BROKEN}" for name in names)


def _family(name: str) -> tuple[str, ...]:
    """Return a family's row.

    It contains the media of its default sample, its trained components, its engines and their batching of its samples.
    """
    family = _usable(find_family, name)
    if family is None:
        return f"  {name} {_BROKEN}", "", "", "", ""
    media = dict.fromkeys(shape.part for shape in family.sampling().media())
    engines = ["vllm_omni"] * (family.vllm_pipeline is not None) + ["vllm"] * family.on_vllm
    engines.append("diffusers" if family.draws == "latents" else "transformers")
    return (
        f"  {family.name}",
        ", ".join(media),
        ", ".join(family.components),
        ", ".join(engines),
        _choices(Rollout, "batching"),
    )


def _choices(section: type[Section], field: str) -> str:
    return describe(fields_of(section)[field]).removeprefix("one of ").replace("'", "")


_NONE = "none is installed"
_LINES: dict[str, Callable[[], Iterator[str]]] = {
    "families": _families,
    "engines": _named("engines", lambda: _choices(Rollout, "engine")),
    "backends": _named("backends", lambda: ", ".join(_marked(backend_names(), load_backend))),
    "transitions": _named("transitions", lambda: _choices(Sde, "kind")),
    "scorers": _named("scorers", lambda: ", ".join(names())),
    "roles": _named("roles", lambda: ", ".join(_marked(service_names(), find_service)) or _NONE),
    "programs": _named("programs", lambda: ", ".join(_marked(program_names(), find_program)) or _NONE),
    "algorithms": _algorithms,
}

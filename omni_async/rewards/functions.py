"""Makes scorers of functions `(images, prompts, **params)`, and names rewards that Python code passes to a run.

A reward with an import path is named `module:name`. Any other, such as a lambda or a function of a notebook, is named
`python:name`. This process keeps it under that name, and receives it from the driver if it is a worker's.
"""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from omni_async.rewards.base import Scorer, is_scorer
from omni_async.types import Prompt

PASSED = "python:"  # begins the name of a reward without an import path
_DECLARED = ("accepts", "requires", "concurrency", "needs", "cost", "deterministic", "version")

# Like `sys.modules`: what a name means in this process. Bytes are a pickle that is not loaded yet.
_passed: dict[str, Any] = {}


class NotPassed(LookupError):
    """No Python code of this process has passed a reward of that name."""


def scorer_of(function: Callable[..., Any]) -> type[Scorer]:
    """Return a class of scorers around a function `(images, prompts, **params)`, which may be asynchronous.

    Parameters after the first two are the constructor's. Attributes of `Scorer` that the function has, such as
    `accepts`, are the class's. Raises ValueError, one line, if the function does not take two positional arguments."""
    signature = inspect.signature(function)
    try:
        taken = signature.bind_partial(None, None).arguments
    except TypeError:
        raise ValueError(f"takes {signature}, expected (images, prompts), and further parameters by keyword") from None
    others = [one for name, one in signature.parameters.items() if name not in taken]
    params = [
        one.replace(kind=one.KEYWORD_ONLY) for one in others if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]

    def __init__(self: Any, **params: Any) -> None:
        self.params = params

    def score(self: Any, media: list[Any], prompts: list[Prompt]) -> Any:
        return function(media, prompts, **self.params)

    async def awaited(self: Any, media: list[Any], prompts: list[Prompt]) -> Any:
        return await function(media, prompts, **self.params)

    # Where `typing.get_type_hints` finds the types of the parameters.
    __init__.__annotations__ = {one.name: one.annotation for one in params if one.annotation is not one.empty}
    __init__.__wrapped__ = function  # type: ignore[attr-defined]
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    name = label_of(function)
    described = {
        **{name: getattr(function, name) for name in _DECLARED if hasattr(function, name)},
        "name": name,
        "__module__": function.__module__,
        "__qualname__": getattr(function, "__qualname__", name),
        "__signature__": inspect.Signature(params),
        "__init__": __init__,
        "score": awaited if is_async else score,
    }
    return cast(type[Scorer], type(name, (Scorer,), described))


def label_of(reward: Any) -> str:
    """Return the name of a function or class without `<` and `>`, or the name of an object's class."""
    return str(getattr(reward, "__name__", type(reward).__name__)).strip("<>")


# ---- rewards of Python code ------------------------------------------------------------------------------------------


def named(reward: Any, own: str | None = None) -> str:
    """Return a name of `reward.scorers` for a function or class. Raises ValueError, one line, if it is neither.

    `own`: its name if it has no import path; None: the function's."""
    if not is_scorer(reward) and (isinstance(reward, type) or not callable(reward)):
        kind = reward.__name__ if isinstance(reward, type) else f"{type(reward).__name__} object"
        raise ValueError(f"expected a function (images, prompts) or a class with a method `score`, got {kind}")
    if (path := _import_path(reward)) is not None:
        return path
    name = PASSED + (label_of(reward) if own is None else own)
    _passed[name] = reward
    return name


def _import_path(reward: Any) -> str | None:
    """Return `module:name` of an object that another process can import, None for any other."""
    module, name = getattr(reward, "__module__", None), getattr(reward, "__qualname__", "")
    found = sys.modules.get(module) if module not in (None, "__main__") else None
    if getattr(found, "__spec__", None) is None:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is reward else None


def passed(name: str) -> Any:
    """Return the reward that was passed as `name`. Raises NotPassed, or the exception of unpickling it."""
    try:
        found = _passed[name]
    except KeyError:
        raise NotPassed(name) from None
    if isinstance(found, bytes):
        found = _passed[name] = pickle.loads(found)  # noqa: S301 (the driver pickled it)
    return found


def receive(pickled: Mapping[str, bytes]) -> None:
    """Keep the rewards that the driver passed to this process, by name; they are unpickled when they are used."""
    _passed.update(pickled)

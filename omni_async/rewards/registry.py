"""Finds scorers by name, and turns the `params` of a recipe into arguments of their constructors.

A name is in the table below, or an entry point of the group `omni_async.scorers`, or names a class or function as
`module:name` or `path/file.py:name`, or names a reward that Python code passed (`functions.py`). Parameters are the
constructor's keyword arguments, checked against its type hints (`Annotated[int, Meta(ge=1)]` bounds included). A
scorer's module is foreign code: any failure of its import becomes one line with the place of the failure.

A parameter `env:NAME`, at any depth, is the value of the environment variable NAME in the process that builds the
scorer, so no recipe needs to contain a secret. The value of such a parameter, or of a parameter named like a secret, is
masked in everything the scorer raises.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_type_hints

import msgspec

from omni_async.accelerator import require_accelerator
from omni_async.config import reward as sections
from omni_async.config.redact import REFERENCE, SHORTEST, redact, redact_text, resolve_references, secrets_in
from omni_async.config.tree import file_of
from omni_async.control.reward_formula import is_asked
from omni_async.plugins.entry_points import find_point, registered_names
from omni_async.plugins.extras import missing_extra
from omni_async.plugins.families import PARTS, MediaShape
from omni_async.rewards import base, functions
from omni_async.rewards.base import Scorer, accepted_parts, declared, is_scorer
from omni_async.rewards.failures import call_discreetly, place_of
from omni_async.rewards.own_files import run_file
from omni_async.types import Prompt

ENTRY_POINT_GROUP = "omni_async.scorers"

_BUILT_IN = {
    name: EntryPoint(name, f"omni_async.rewards.scorers.{name}:{cls}", ENTRY_POINT_GROUP)
    for name, cls in (
        ("ocr", "OcrScorer"),
        ("scene_text", "SceneTextScorer"),
        ("clip_score", "ClipScoreScorer"),
        ("pick_score", "PickScoreScorer"),
        ("hps_v2", "HpsV2Scorer"),
        ("image_reward", "ImageRewardScorer"),
        ("hps_v3", "HpsV3Scorer"),
        ("aesthetic", "AestheticScorer"),
        ("clap", "ClapScorer"),
        ("video_audio", "VideoAudioScorer"),
        ("frame_consistency", "FrameConsistencyScorer"),
        ("object_checks", "ObjectChecksScorer"),
        ("jpeg_size", "JpegSizeScorer"),
        ("motion_smoothness", "MotionSmoothnessScorer"),
        ("exact_match", "ExactMatchScorer"),
        ("choice", "ChoiceScorer"),
        ("math_answer", "MathAnswerScorer"),
        ("pattern", "PatternScorer"),
        ("overlong", "OverlongScorer"),
        ("http", "HttpScorer"),
        ("vlm_judge", "VlmJudgeScorer"),
    )
}
_DEVICE = "device"
_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_SHOWN_FOLDERS = 4


class ScorerConfigError(ValueError):
    """`reward.scorers` names something unknown, or gives it parameters it does not take."""


def _refused(name: str, why: str) -> ScorerConfigError:
    return ScorerConfigError(f"scorer {name!r}: {why}")


def names() -> tuple[str, ...]:
    """Return every registered name, sorted."""
    return registered_names(ENTRY_POINT_GROUP, _BUILT_IN)


def _load(name: str) -> type[Any]:
    loaded = _object(name)
    if is_scorer(loaded):
        return cast(type[Any], loaded)
    if not callable(loaded) or isinstance(loaded, type):
        expected = "is not a class with a method `score(media, prompts)`, and no function (images, prompts)"
        raise _refused(name, f"{name.rpartition(':')[2]!r} {expected}")
    try:
        return functions.scorer_of(loaded)
    except ValueError as error:
        raise _refused(name, str(error)) from None


def _object(name: str) -> Any:
    """Return the object that a scorer's name names. Raises ScorerConfigError."""
    if name.startswith(functions.PASSED):
        try:
            return _imported(name, name, partial(functions.passed, name))
        except functions.NotPassed:
            way = "it was passed to omni_async.train and has no import path; pass it as reward= from Python again"
            raise _refused(name, way) from None
    if (file := file_of(name)) is not None:
        if not Path(file).is_file():
            raise _refused(name, f"there is no file {file}")
        return _attribute(name, _imported(name, file, partial(run_file, file)), file, name[len(file) + 1 :])
    if ":" not in name:
        module, _, last = name.rpartition(".")
        own = " or your own 'module:name' or 'path/file.py:name'"
        if module:
            own += f", as in {f'{name}:name' if last == 'py' else f'{module}:{last}'!r}"
        try:
            point = find_point(name, ENTRY_POINT_GROUP, f"scorer {name!r}", _BUILT_IN, own)
        except ValueError as error:
            raise ScorerConfigError(str(error)) from None
    elif not _OWN.fullmatch(name):
        raise _refused(name, "expected 'module:name', names joined by dots, or 'path/file.py:name'")
    else:
        point = EntryPoint(name=name, value=name, group=ENTRY_POINT_GROUP)
    module = _imported(name, point.module, partial(import_module, point.module))
    return _attribute(name, module, point.module, point.attr)


def _attribute(name: str, module: ModuleType, shown: str, attributes: str) -> Any:
    loaded: Any = module
    for attribute in attributes.split("."):
        if not hasattr(loaded, attribute):
            named = [key for key, value in vars(loaded).items() if getattr(value, "__module__", "") == module.__name__]
            defined = f"it defines {', '.join(named) or 'no class or function'}"
            raise _refused(name, f"module {shown!r} has no {attributes!r}; {defined}")
        loaded = getattr(loaded, attribute)
    return loaded


def _imported(name: str, module: str, load: Callable[[], Any]) -> Any:
    """Return what `load` returns. Any failure becomes a ScorerConfigError with its text and its place."""
    try:
        return load()
    except functions.NotPassed:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            why = f"there is no {error.name!r} in {_searched()}; start in its folder, or add it to PYTHONPATH"
            raise _refused(name, f"cannot import {module!r}: {why}") from None
        if (missing := missing_extra(error.name)) is not None:
            raise _refused(name, missing) from None
        problem: BaseException = error
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code; KeyboardInterrupt stays the user's)
        problem = error
    why = f"{type(problem).__name__}: {str(problem) or 'no reason given'}{place_of(problem)}"
    raise _refused(name, f"cannot import {module!r}: {why}") from None


def _searched() -> str:
    """Return the folders that modules are searched in, without Python's own folders, as a text."""
    python = Path(os.__file__).parent
    found = dict.fromkeys(str(Path(entry).absolute()) for entry in sys.path if not entry.endswith(".zip"))
    own = str(python), str(python / "lib-dynload")
    shown = [folder for folder in found if folder not in own and Path(folder).is_dir()]
    more = f" and {len(shown) - _SHOWN_FOLDERS} more folders of the Python path" if len(shown) > _SHOWN_FOLDERS else ""
    return ", ".join(shown[:_SHOWN_FOLDERS]) + more


def _signature(name: str, scorer: type) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return the constructor's signature, and the types of its parameters."""
    try:
        # `__init__` is only read.
        return inspect.signature(scorer), get_type_hints(scorer.__init__, include_extras=True)  # type: ignore[misc]
    except Exception as error:  # noqa: BLE001 (annotations are foreign code)
        why = f"{type(error).__name__}: {error}; names in them must be there at run time, not under TYPE_CHECKING alone"
        raise _refused(name, f"the annotations of its constructor cannot be evaluated: {why}") from None


def _named(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in signature.parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _required(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the parameters that a recipe must give; the run passes `device`."""
    return tuple(p.name for p in _named(signature) if p.default is p.empty and p.name != _DEVICE)


def _arguments(name: str, scorer: type, params: dict[str, Any]) -> dict[str, Any]:
    """Convert `params` to the types of the constructor's keyword arguments. A required `device` is left to `build`."""
    signature, hints = _signature(name, scorer)
    allowed = {p.name: hints.get(p.name, Any) for p in _named(signature)}
    converted: dict[str, Any] = {}
    for key, value in params.items():
        if key not in allowed:
            takes = ", ".join(allowed) or "none"
            raise ScorerConfigError(f"scorer {name!r} takes no parameter {key!r}; it takes {takes}")
        where = f"scorer {name!r}, parameter {key!r}"
        try:
            given = resolve_references(value, where)
        except ValueError as error:
            raise ScorerConfigError(str(error)) from None
        try:
            converted[key] = msgspec.convert(given, allowed[key])
        except msgspec.ValidationError as error:
            why = redact_text(str(error), secrets_in({key: given}))
            raise ScorerConfigError(f"{where}: {why}, got {redact({key: value})[key]!r}") from None
        except (TypeError, ValueError) as error:
            raise ScorerConfigError(f"{where}: a recipe cannot give a {allowed[key]}: {error}") from None
    if missing := [key for key in _required(signature) if key not in converted]:
        raise ScorerConfigError(f"scorer {name!r} needs the parameter {', '.join(map(repr, missing))}")
    return converted


def _referenced(value: Any) -> Iterator[str]:
    """Yield the values of all `env:NAME` references in a tree."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _referenced(item)
    elif isinstance(value, str) and value.startswith(REFERENCE):
        yield os.environ.get(value.removeprefix(REFERENCE), "")


def secrets_of(config: sections.Scorer) -> frozenset[str]:
    """Return every credential that the scorer was given, so that its messages can be shown without them."""
    return secrets_in(config.params) | {found for found in _referenced(config.params) if len(found) >= SHORTEST}


def check(config: sections.Scorer, made: Sequence[MediaShape]) -> None:
    """Raise `ScorerConfigError` if `build` would, or if the scorer accepts no part of samples with such media.

    Loads no model (the scorer's module is imported)."""
    scorer = _load(config.name)
    _arguments(config.name, scorer, config.params)
    _require_calls(config)
    accepts: Any = accepted_parts(scorer)
    if not isinstance(accepts, tuple | list) or not accepts or not set(accepts) <= set(PARTS):
        raise _refused(config.name, f"accepts must be a tuple of {', '.join(PARTS)}, got {accepts!r}")
    if (cost := cost_of(config)) not in base.COSTS:
        raise _refused(config.name, f"cost must be one of {', '.join(base.COSTS)}, got {cost!r}")
    parts = [one.part for one in made]
    if not set(accepts) & set(parts):
        takes, drawn = " or ".join(accepts), " and ".join(parts)
        if declared(scorer).accepts is None:
            takes += " (it has no `accepts`)"
            drawn += f"; declare accepts = {(*parts,)} in the class, or NAME.accepts = {(*parts,)} below the function"
        raise ScorerConfigError(f"scorer {config.name!r} accepts {takes}, but the samples are {drawn}")
    required = declared(scorer).requires
    if missing := [part for part in required if part not in parts]:
        raise _refused(config.name, f"needs samples with {' and '.join(required)}, and they have no {missing[0]}")


def _require_calls(config: sections.Scorer) -> None:
    """Require that the recipe lets no more calls of the scorer run at once than the scorer allows."""
    allowed, wanted = concurrency_of(config), config.concurrency
    if allowed is not None and wanted is not None and wanted > allowed:
        at_once = "one call" if allowed == 1 else f"{allowed} calls"
        raise _refused(config.name, f"it takes {at_once} at a time (its `concurrency`), got concurrency: {wanted}")
    if config.hedge_s is not None and allowed == 1:
        raise _refused(config.name, f"hedge_s: it takes one call at a time (its `concurrency`), got {config.hedge_s:g}")


def prompt_check(config: sections.Scorer) -> Callable[[Prompt], str | None] | None:
    """Return a check of the prompts that the scorer scores, made of its `needs` and its `check_prompt`.

    None if it has neither. Raises ScorerConfigError if they are unusable."""
    scorer = _load(config.name)
    needs, ask = _needs(config.name, scorer), _own_check(config, scorer)
    if not needs and ask is None:
        return None

    def check(prompt: Prompt) -> str | None:
        if not is_asked(config, prompt):
            return None
        missing = [need for need in needs if not _has(prompt, need)]
        if missing:
            return f"scorer {config.name!r}: needs {', '.join(map(repr, missing))}, which the prompt does not have"
        return None if ask is None else ask(prompt)

    return check


def _needs(name: str, scorer: type) -> tuple[str, ...]:
    needs: Any = declared(scorer).needs
    if not isinstance(needs, tuple | list) or not all(isinstance(one, str) for one in needs):
        raise _refused(name, f"needs must be a tuple of texts, got {needs!r}")
    return tuple(needs)


def _has(prompt: Prompt, need: str) -> bool:
    if need == "target":
        return prompt.target is not None
    return bool(getattr(prompt, need)) if need in ("images", "audio") else need in prompt.metadata


def _own_check(config: sections.Scorer, scorer: type) -> Callable[[Prompt], str | None] | None:
    """Return the scorer's `check_prompt`, if it has one, as a function that raises nothing."""
    ask: Any = declared(scorer).check_prompt
    if ask in (None, Scorer.check_prompt):
        return None
    if not isinstance(inspect.getattr_static(scorer, "check_prompt"), classmethod | staticmethod):
        why = "prompts are checked before a scorer is built"
        raise _refused(config.name, f"check_prompt must be a classmethod or staticmethod: {why}")
    params, secrets = _all_arguments(config, scorer), secrets_of(config)

    def check(prompt: Prompt) -> str | None:
        try:
            missing = ask(prompt, params)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code)
            missing = f"check_prompt failed: {type(error).__name__}: {error}{place_of(error)}"
        if not isinstance(missing, str | None):
            missing = f"check_prompt returned a {type(missing).__name__}, expected what is missing as text, or None"
        return None if missing is None else f"scorer {config.name!r}: {redact_text(missing, secrets)}"

    return check


def _all_arguments(config: sections.Scorer, scorer: type) -> dict[str, Any]:
    """Return the constructor's keyword arguments, defaults included."""
    signature, _ = _signature(config.name, scorer)
    bound = signature.bind_partial(**_arguments(config.name, scorer, config.params))
    bound.apply_defaults()
    return bound.arguments


def arguments_of(config: sections.Scorer) -> dict[str, Any]:
    """Return the keyword arguments that the scorer is built with, defaults included. ScorerConfigError as `check`."""
    return _all_arguments(config, _load(config.name))


def check_files(config: sections.Scorer) -> None:
    """Raise `ScorerConfigError` if a built-in scorer's `check_params` misses a file that its parameters name.

    Loads no model."""
    scorer = _load(config.name)
    if config.name in _BUILT_IN and (missing := scorer.check_params(_all_arguments(config, scorer))) is not None:
        raise _refused(config.name, redact_text(missing, secrets_of(config)))


def media_of(name: str) -> frozenset[str]:
    """Return the parts of media that the scorer accepts. ScorerConfigError if the name is unknown."""
    return frozenset(accepted_parts(_load(name)))


def required_params(name: str) -> tuple[str, ...]:
    """Return the parameters that a recipe must give the scorer. ScorerConfigError if the name is unknown."""
    return _required(_signature(name, _load(name))[0])


def takes_param(name: str, param: str) -> bool:
    """Return whether the scorer has such a parameter. ScorerConfigError if the name is unknown."""
    return param in _signature(name, _load(name))[0].parameters


def concurrency_of(config: sections.Scorer) -> int | None:
    """Return how many calls of the scorer may run at once, None for any number; see `Scorer`."""
    try:
        return base.concurrency_of(_load(config.name))
    except ValueError as error:
        raise _refused(config.name, str(error)) from None


def cost_of(config: sections.Scorer) -> str:
    """Return the cost class of a sample of the scorer, one of `COSTS`; see `Scorer`."""
    return str(declared(_load(config.name)).cost)


def build(config: sections.Scorer, gpus: float = 0.0) -> Scorer:
    """Build the scorer that `config` names, with its model loaded.

    `gpus`: the number of accelerators of its worker. It decides the argument `device` of a constructor that requires
    one: the accelerator of this process, or "cpu"."""
    scorer = _load(config.name)
    arguments = _arguments(config.name, scorer, config.params)
    device = _signature(config.name, scorer)[0].parameters.get(_DEVICE)
    if device is not None and device.default is device.empty and _DEVICE not in arguments:
        key = "placement.reward.gpus" if config.pool is None else f"reward.pools: resources.gpus of {config.pool!r}"
        arguments[_DEVICE] = str(require_accelerator(key, gpus)) if gpus > 0 else "cpu"
    return cast(Scorer, call_discreetly(lambda: scorer(**arguments), secrets_of(config)))

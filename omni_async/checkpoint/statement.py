"""States what a checkpoint's numbers depend on, and compares that with the recipe that continues from it.

A checkpoint states its whole recipe, the digest of every file that the recipe names (`contents.py`), and the further
policies that it holds. Each key of the recipe has one of four rules:

    free      it decides where and how fast a run computes, or what it reports
    named     the run continues with the new value, which the console and `changes.jsonl` report
    again     named, and groups that wait for the trainer are generated again
    refused   the checkpoint's tensors or counters would mean something else

Only the tables below define these rules. A key that they do not list is named, so a new key is never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from omni_async import __version__
from omni_async.algorithms.registry import find_objective, stored_policies
from omni_async.checkpoint.contents import MODEL
from omni_async.config import Config
from omni_async.config.redact import redact

# `*` is one part of a key. A rule holds for everything below its key; the longest key counts.
FREE = (
    *("schedule", "run", "placement", "tracking", "checkpoint", "emulation"),
    # The content of these files is compared instead.
    *("model.path", "algorithm.teacher.path", "data.prompts", "data.preferences", "validation.prompts"),
    *("reward.cache", "data.max_prompt_chars"),
    *(f"rollout.{key}" for key in ("workers", "max_inflight", "max_batch", "batching", "conditioning_cache")),
    *(f"rollout.{key}" for key in ("offload", "timeout_s", "retries", "emulated")),
    *(f"reward.{key}" for key in ("workers", "batch", "streaming", "timeout_s", "hedge_s", "retries", "backoff_s")),
    *(f"reward.{key}" for key in ("backoff_max_s", "outage_s", "probe", "pools")),
    *(f"reward.scorers.*.{key}" for key in ("pool", "batch", "concurrency", "latency_s", "timeout_s", "hedge_s")),
    *(f"reward.servers.*.{key}" for key in ("replicas", "resources", "urls", "access")),
    *("buffer.trajectories", "buffer.groups", "buffer.max_bytes"),
    *(f"weights.{key}" for key in ("transport", "bucket_mb", "timeout_s")),
    *(f"trainer.{key}" for key in ("backend", "workers", "sequence_parallel", "shard", "gather", "offload", "compile")),
    *(f"trainer.{key}" for key in ("updates", "max_mismatch", "streaming", "gradient_checkpointing", "peak_tflops")),
    *("validation.share", "roles.*.workers", "roles.*.resources"),
)
# Keys that determine a sample and its score.
AGAIN = (
    *("run.seed", "reward.scorers", "reward.servers", "reward.combine", "reward.gated", "reward.max_abs"),
    *("emulation.profile", "emulation.payload_scale"),
    *(f"rollout.{key}" for key in ("group_size", "sampling", "buckets", "num_inference_steps")),
    *(f"rollout.{key}" for key in ("share_initial_noise", "sde", "calls", "program")),
)


def _jump(before: Any, now: Any) -> str:
    if isinstance(before, int | float) and isinstance(now, int | float) and before:
        return f"the policy would jump by the factor {now / before:g}"
    return "the policy would jump"


# By key: the consequence.
REFUSED: dict[str, str | Callable[[Any, Any], str]] = {
    "model.pipeline": "its tensors are of another model family",
    "model.lora": "its tensors would not fit",
    "model.lora.rank": "its factors have another shape",
    "model.lora.alpha": _jump,
    "model.lora.target_modules": "its factors are of other layers",
    "algorithm.name": "the policies and statistics that it keeps are another algorithm's",
    "trainer.steps_per_update": "schedules count optimizer steps",
    "trainer.optimizer.name": "its optimizer state is another optimizer's",
    "trainer.ema": "it keeps a moving average or has none",
}
NAMED = ("trainer.ema.*",)  # below a refused key
# With `algorithm.advantage.track_prompts`, statistics of a prompt are kept by its number and over all updates.
TRACKED = (
    *("data.prompts", "data.preferences", "algorithm.advantage.aggregate", "reward.combine", "reward.gated"),
    *(f"reward.scorers.*.{key}" for key in ("name", "weight", "params", "when", "gate", "components")),
    *("reward.scorers", "reward.servers.*.model"),
)
# Keys below these belong to other packages or the user.
_FREE_FORM = (
    *(f"reward.scorers.*.{key}" for key in ("params", "when", "components")),
    *("rollout.program.settings", "algorithm.settings", "algorithm.teacher.sampling", "roles.*.settings"),
)
_UNORDERED = ("model.lora.target_modules",)
_TRACKING = "algorithm.advantage.track_prompts"
_DECAY, _RISE = "trainer.optimizer.schedule", "algorithm.awm.ema_coef_end"


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The statement of a checkpoint.

    recipe: the resolved configuration of the attempt that wrote it, as plain values, without credentials.
    contents: digests of files, by the key that names them, as returned by `contents_of`.
    policies: the further policies whose tensors it holds, without the moving average of `trainer.ema`.
    made_by: the version of omni_async."""

    recipe: dict[str, Any]
    contents: dict[str, str] = {}
    policies: tuple[str, ...] = ()
    made_by: str = __version__


class Change(msgspec.Struct, frozen=True):
    """A key whose value, or whose file's content, differs from the checkpoint's statement.

    why_not: why the checkpoint cannot continue with it; None: it can.
    again: whether groups that wait for the trainer are generated again."""

    key: str
    before: Any
    now: Any
    why_not: str | None = None
    again: bool = False

    def __str__(self) -> str:
        before, now = value_text(self.before), value_text(self.now)
        if self.why_not is None:
            return f"{self.key}: {before} -> {now}"
        if self.now == OTHER:
            return f"{self.key}: its content is not what the checkpoint states ({self.why_not})"
        return f"{self.key}: the checkpoint has {before}, the recipe {now}; keep {before} ({self.why_not})"


# Values of a key that names a file.
SAME, OTHER = "the content that the checkpoint states", "other content"


def stated(config: Config, contents: Mapping[str, str]) -> Statement:
    """Return the statement of the checkpoints that a run with this configuration writes."""
    return Statement(plain(config), dict(contents), _policies(config))


def plain(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, without credentials."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(redact(msgspec.to_builtins(config))))
    return found


def _policies(config: Config) -> tuple[str, ...]:
    stored = stored_policies(find_objective(config.algorithm.name), config)
    return tuple(one for one in stored if one != "ema")  # `trainer.ema` decides about it


def changes_since(statement: Statement, config: Config, contents: Mapping[str, str], tracked: bool) -> list[Change]:
    """Return every relevant difference between a checkpoint's statement and a recipe.

    Args:
        statement: the checkpoint's.
        config: the recipe's.
        contents: the digests of its files; a file whose key is missing is not compared.
        tracked: whether the checkpoint has statistics of prompts."""
    before, now = statement.recipe, plain(config)
    emulated = config.emulation is not None
    tracked = tracked and config.algorithm.advantage.track_prompts
    by_content = statement.contents.keys() & contents.keys()
    differing = [one for one in _differences(before, now) if _rule(one[0], FREE) <= _listed(one[0])]
    found = [_judged(*one, emulated, tracked) for one in differing if one[0] not in by_content]
    whole = tuple(f"{key}." for key, _, _ in differing)  # keys below belong to another list
    found += [
        _judged(key, SAME, OTHER, emulated, tracked)
        for key in sorted(by_content)
        if statement.contents[key] != contents[key] and not key.startswith(whole)
    ]
    found += _missing_parts(statement.contents, contents)
    found += _longer_schedule(before, now)
    return found if emulated else [*found, *_other_policies(statement, config, found)]


def value_text(value: Any) -> str:
    """Format a value for one line."""
    if value in (SAME, OTHER):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 200 else f"{text[:200]}..."


def _longer_schedule(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield a change of the number of updates if a schedule depends on it."""
    updates = [value_at(tree, "trainer.updates") for tree in (before, now)]
    depends = value_at(now, _DECAY) != "constant" or value_at(now, _RISE) is not None
    if depends and updates[0] != updates[1]:
        yield Change("trainer.updates", *updates)


def _other_policies(statement: Statement, config: Config, found: Sequence[Change]) -> Iterator[Change]:
    """Yield a change if the recipe needs other further policies than the checkpoint holds."""
    kept = _policies(config)
    if kept != statement.policies and not any(one.key == "algorithm.name" for one in found):
        asked = ", ".join(str(one) for one in found if one.key.startswith("algorithm."))
        why = f"a checkpoint holds the policies that its algorithm needs{asked and f', and it changed: {asked}'}"
        yield Change("algorithm", list(statement.policies), list(kept), why)


def _missing_parts(stated: Mapping[str, str], contents: Mapping[str, str]) -> Iterator[Change]:
    """Yield a change for each part of the base model that the recipe's model lacks."""
    if any(key.startswith(MODEL) for key in contents):
        for key in sorted(stated.keys() - contents.keys()):
            if key.startswith(MODEL):
                yield Change(key, SAME, None, "the base model has no such part")


def _judged(key: str, before: Any, now: Any, emulated: bool, tracked: bool) -> Change:
    why_not: str | None = None
    if key.startswith(MODEL):
        why_not = "the checkpoint was trained from another model; name that one as model.path"
    elif (rule := _longest(key, (*REFUSED, *NAMED))) in REFUSED:
        reason = REFUSED[rule]
        why_not = reason if isinstance(reason, str) else reason(before, now)
    elif tracked and _longest(key, TRACKED) is not None:
        why_not = f"the statistics that the checkpoint keeps of every prompt are of the former; or {_TRACKING}=false"
    again = _longest(key, AGAIN) is not None
    return Change(key, before, now, None if emulated else why_not, again)


def _differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield keys with different values. A key that only one of the two has is of another version and not compared."""
    if isinstance(before, dict) and isinstance(now, dict):
        free_form = _longest(key, _FREE_FORM) is not None
        for name in now if not free_form else {**before, **now}:
            if name in before or free_form:
                yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now) and _sections(before, now):
        for number, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{key}.{number}")
    elif before != now and not (key in _UNORDERED and _as_set(before) == _as_set(now)):
        yield key, before, now


def _as_set(value: Any) -> Any:
    return set(map(str, value)) if isinstance(value, list) else value


def _sections(*lists: Sequence[Any]) -> bool:
    return all(isinstance(item, dict) for items in lists for item in items)


def value_at(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key of plain data; None if it is missing."""
    value: Any = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _listed(key: str) -> int:
    return max(_rule(key, AGAIN), _rule(key, tuple(REFUSED)), 0)


def _rule(key: str, patterns: Sequence[str]) -> int:
    """Return the number of parts of the longest pattern that matches the key; -1 if none matches."""
    found = _longest(key, patterns)
    return -1 if found is None else found.count(".") + 1


def _longest(key: str, patterns: Sequence[str] | Mapping[str, Any]) -> str | None:
    parts = key.split(".")
    matching = [pattern for pattern in patterns if _matches(parts, pattern.split("."))]
    return max(matching, key=lambda pattern: pattern.count("."), default=None)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(pattern) <= len(parts) and all(
        wanted in ("*", part) for part, wanted in zip(parts, pattern, strict=False)
    )

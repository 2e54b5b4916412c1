"""Finds errors in prompt files, the checkpoint's architecture and scorers before anything heavy starts.

Imports no torch.

With `emulation` there is only a profile to check: no model, prompt file or scorer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import psutil
from msgspec.structs import replace

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import BUILT_IN, find_objective
from omni_async.checkpoint.contents import contents_of
from omni_async.config import Config, ConfigError
from omni_async.config.held import num_with_media
from omni_async.config.hub import how_to_get
from omni_async.config.load import family_of
from omni_async.config.ray_cluster import VARIABLE
from omni_async.config.redact import with_secrets
from omni_async.config.schema import Emulation
from omni_async.control.control_state import LedgerState
from omni_async.control.reward_formula import RewardFormula
from omni_async.data.prompts import PromptCheck, load_prompts
from omni_async.data.split import held_out, shared_note
from omni_async.performance.law import unmeasured, with_estimates
from omni_async.performance.profile import Payload, load_profile, require_room, require_times
from omni_async.plugins.extras import missing_extra
from omni_async.plugins.families import PipelineFamily, SamplingSpec, find_family
from omni_async.plugins.programs import find_program
from omni_async.records.write.sinks.registry import require_usable
from omni_async.rewards import registry as scorers
from omni_async.rewards.scorers.addresses import urls_of
from omni_async.roles.inputs import RunInputs
from omni_async.roles.plan import Plan, require_trainable
from omni_async.runtime.preflight.devices import (
    check_backend,
    check_object_store,
    check_shares,
    check_vllm,
    joined_cluster,
    require_accelerators,
)
from omni_async.runtime.preflight.model_files import announce_digest, check_checkpoint, check_sequence, check_teacher
from omni_async.runtime.preflight.prompt_limits import PromptLimits
from omni_async.runtime.preflight.resume import find_resume_point
from omni_async.types import Prompt

_VALIDATION = "validation.prompts"
# Enough that an epoch never ends within an update.
_SYNTHETIC_PROMPTS = 1000
# Emulated devices do not hang, however their profile's time scale relates to a timeout.
_NEVER_S = 1e6
# Copies of a version that exist at once: the source, the buckets, and two versions in the object store.
_WEIGHT_COPIES = 4

Tell = Callable[[str], None]


def _nowhere(text: str) -> None:
    """Discard a line."""


def preflight(config: Config, elsewhere: bool = False, tell: Tell = _nowhere) -> RunInputs:
    """Check a configuration. Raises ConfigError, one line, naming the key.

    Args:
        config: loaded.
        elsewhere: the recipe is for another machine, so this one need not have the accelerators.
        tell: receives a line before each step that may take long."""
    joined = joined_cluster(config)
    inputs = _preflight(config, elsewhere, tell)
    if not elsewhere:
        check_object_store(config)
    if joined is None or joined.named_by != VARIABLE:
        return inputs
    note = (
        f"warning: {VARIABLE} is set: the run joins the Ray cluster at {joined.address}; unset it to start a local Ray"
    )
    return dataclasses.replace(inputs, notes=(*inputs.notes, note))


def _preflight(config: Config, elsewhere: bool, tell: Tell) -> RunInputs:
    _check_run_dir(config.run.dir)
    _check_services(config)
    require_usable(config)
    plan = require_trainable(config)
    if config.emulation is not None:
        return _from_checkpoint(_emulated(config, config.emulation, plan))
    try:
        family = find_family(config.model.pipeline or family_of(Path(config.model.path)))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_shares(config)
    check_backend(config)
    _check_objective(config)
    checks = [*_check_scorers(config), *_check_program(config, family)]
    if config.reward.hedge_s is not None and all(scorers.concurrency_of(one) == 1 for one in config.reward.scorers):
        names = ", ".join(scorer.name for scorer in config.reward.scorers)
        raise ConfigError(
            f"reward.hedge_s: {names} takes one call at a time (its `concurrency`), so no call is made twice; leave it"
            " out"
        )
    buckets = {f"rollout.buckets.{i}.sampling": bucket.sampling for i, bucket in enumerate(config.rollout.buckets)}
    specs = {"rollout.sampling": config.rollout.sampling, **buckets}
    _check_media(specs)
    check_checkpoint(Path(config.model.path), family, specs)
    taught: dict[str, SamplingSpec] = {}
    if (teacher := config.algorithm.teacher) is not None:
        taught = {"algorithm.teacher.sampling": teacher.spec_of(config.rollout.sampling)}
        check_teacher(Path(teacher.path), Path(config.model.path), family, taught)
    checks.append(inputs_check(family, [*specs.values(), *taught.values()]))
    check_sequence(config.trainer.sequence_parallel, Path(config.model.path), family, specs)
    limits = PromptLimits(Path(config.model.path), specs | taught, config.rollout.engine_args.get("max_model_len"))
    limits.check_negative()
    offline = config.data.preferences is not None
    _tell_reading("preference pairs" if offline else "prompts", config.data.preferences or config.data.prompts, tell)
    prompts = _prompts(config, checks, limits)
    validation: list[Prompt] = []
    if config.validation is not None and config.validation.split is not None:
        prompts, validation = held_out(prompts, config.validation.split)
        tell(f"{len(prompts)} prompts to train on, {len(validation)} held out for validation")
    elif config.validation is not None:
        _tell_reading("validation prompts", config.validation.prompts, tell)
        validation = load_validation(config, checks, limits.problems)
        if (note := shared_note(prompts, validation)) is not None:
            limits.notes.append(note)
    if not elsewhere:  # last: errors of the recipe also show on a machine that is too small
        check_vllm(config)
        require_accelerators(config)
    notes = (*limits.notes, *_precision_notes(config))
    read = RunInputs(config, family, tuple(prompts), tuple(validation), notes=notes)
    announce_digest(Path(config.model.path), tell)
    return _from_checkpoint(read)


def _tell_reading(what: str, source: str | None, tell: Tell) -> None:
    with contextlib.suppress(OSError):
        if source is not None and Path(source).exists():  # the error for a missing file is the only line
            tell(f"reading and checking the {what} in {Path(source).name}")


def _precision_notes(config: Config) -> Iterator[str]:
    """Yield a warning if the recipe insists on ratios between an engine and a trainer that round."""
    mode, ratio = config.algorithm.correction.mode, find_kind(find_objective(config.algorithm.name).kind).ratio
    if config.model.dtype != "float32" and mode in ("bypass", "interpolated") and ratio:
        yield (
            f"warning: algorithm.correction.mode: {mode} takes ratios between engine and trainer, whose"
            f" {config.model.dtype} kernels may differ by more than the clip range; auto measures that"
        )


def _check_services(config: Config) -> None:
    """Check that the secrets of services and the models of servers exist; scorers' secrets are checked elsewhere."""
    for number, role in enumerate(config.roles):
        try:
            with_secrets(role.settings, f"roles.{number}.settings")
        except ValueError as error:
            raise ConfigError(str(error)) from None
    for number, server in enumerate(config.reward.servers if config.emulation is None else ()):
        try:
            urls_of(server)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if server.replicas and not Path(server.model).exists():
            raise ConfigError(f"reward.servers.{number}.model: {how_to_get(Path(server.model))}")


def _check_run_dir(folder: str) -> None:
    """Check that run folders can be created in `folder`, as far as possible without creating one."""
    wanted = Path(folder).absolute()
    try:
        found = next(path for path in (wanted, *wanted.parents) if path.exists())
        is_folder, is_open = found.is_dir(), os.access(found, os.W_OK | os.X_OK)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot make a run folder in {wanted}: {error.strerror or error}") from None
    if not (is_folder and is_open):
        problem = "is not writable" if is_folder else "is not a folder"
        raise ConfigError(f"run.dir: cannot make a run folder in {wanted}: {found} {problem}")


def _check_scorers(config: Config) -> list[PromptCheck]:
    """Check the scorers and return their requirements for every prompt."""
    asked: list[PromptCheck] = []
    for number, scorer in enumerate(config.reward.scorers):
        try:
            scorers.check(scorer, config.rollout.sampling.media())
            scorers.check_files(scorer)
            check = scorers.prompt_check(scorer)
        except ValueError as error:
            raise ConfigError(f"reward.scorers.{number}: {error}") from None
        if check is not None:
            asked.append(check)
    return [*asked, RewardFormula(config.reward).missing]


def _check_media(specs: Mapping[str, SamplingSpec]) -> None:
    """Refuse media that this environment lacks a package for. `specs`: by the recipe's key."""
    packages = {"video": "av", "audio": "soundfile"}
    for where, spec in specs.items():
        for part in (shape.part for shape in spec.media()):
            if part in packages and find_spec(packages[part]) is None:
                raise ConfigError(f"{where}: this model makes {part}, and {missing_extra(packages[part])}")


def _check_program(config: Config, family: PipelineFamily) -> list[PromptCheck]:
    """Check the rollout program, which may belong to another package: refuse recipes that it reports as unsupported.

    Returns its requirements for every prompt."""
    if config.rollout.program is None:
        return []
    found = find_program(config.rollout.program.name)
    if problem := next(found.problems(config, family), None):
        raise ConfigError(problem)
    try:
        found.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code)
        why = f"{found.build!r} cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(f"rollout.program.name: {config.rollout.program.name!r}: {why}") from None
    check = found.prompt_check(config)
    return [] if check is None else [check]


def load_validation(
    config: Config,
    checks: Sequence[PromptCheck] = (),
    problems: Callable[[str, Sequence[Prompt]], Mapping[int, str]] = lambda key, prompts: {},
) -> list[Prompt]:
    """Return the prompts of `validation`, which the configuration has.

    Args:
        config: checked.
        checks: requirements on every prompt.
        problems: the model's requirements, of the prompts of a key.

    Raises:
        ConfigError: as `load_prompts`."""
    assert config.validation is not None
    file, split = config.validation.prompts, config.validation.split
    key = "data.prompts" if split is not None else _VALIDATION
    longest, columns = config.data.max_prompt_chars, config.data.columns
    prompts = load_prompts(
        str(file or config.data.prompts), key, longest, checks, partial(problems, key), columns=columns
    )
    return prompts if split is None else held_out(prompts, split)[1]


def inputs_check(family: PipelineFamily, specs: Sequence[SamplingSpec]) -> PromptCheck:
    """Return a check that refuses prompts with inputs that the family does not take, or without a required image.

    `specs`: of the samples; a negative prompt is encoded if one of them is guided."""
    guided = any(spec.guided and hasattr(spec, "negative_prompt") for spec in specs)

    def check(prompt: Prompt) -> str | None:
        if prompt.negative_prompt is not None and not guided:
            return (
                "negative_prompt: the samples have no unconditional branch; raise the guidance of rollout.sampling, or"
                " leave the column out with data.columns.negative_prompt=null"
            )
        if family.needs_images and not prompt.images:
            return f"images: the prompt has none, but model.pipeline {family.name!r} needs one"
        column = "images" if len(prompt.images) > 1 else "image"
        carried = (
            ("images", column, len(prompt.images), family.prompt_images),
            ("audio", "audio", len(prompt.audio), family.prompt_audio),
            ("video", "video", len(prompt.video), family.prompt_video),
        )
        for part, column, given, most in carried:
            if given > most:
                out = "" if most else f"; leave the column out with data.columns.{column}=null"
                why = f"{part}: the prompt has {given}, but model.pipeline {family.name!r}"
                return f"{why} takes {most or 'none'}{out}"
        return None

    return check


def _from_checkpoint(inputs: RunInputs) -> RunInputs:
    passed: list[str] = []
    contents = contents_of(inputs.config, inputs.prompts, inputs.validation_prompts)
    inputs = dataclasses.replace(inputs, contents=contents)
    point = find_resume_point(inputs.config, passed, contents)
    resume = str(point.folder) if point else None
    config = replace(inputs.config, checkpoint=replace(inputs.config.checkpoint, resume=resume))
    if point is None:
        return dataclasses.replace(inputs, config=config, notes=(*inputs.notes, *passed))
    start = point.state.control
    if point.run is None:
        start = replace(start, ledger=LedgerState(), images=0, rewards=(), rounds=())  # a new run counts from 0
    notes = (*inputs.notes, *passed, *point.notes)
    return dataclasses.replace(
        inputs,
        config=config,
        start=start,
        run=point.run,
        untouched=point.run is not None,
        notes=notes,
        changes=point.changes,
    )


def _check_objective(config: Config) -> None:
    """Load another package's objective, which may be missing. The built-in ones always exist."""
    objective = find_objective(config.algorithm.name)
    if objective not in BUILT_IN:
        try:
            objective.load()
        except ValueError as error:
            raise ConfigError(f"algorithm.name: {error}") from None


def _emulated(config: Config, emulation: Emulation, plan: Plan) -> RunInputs:
    """Return the inputs of a job without a model.

    `model`, `data`, `reward.scorers` and `validation` are ignored."""
    profile = load_profile(emulation.profile)
    require_times(config, profile)
    notes = unmeasured(profile, config, recomputes_proximal=plan.proximal)
    profile = with_estimates(profile, config).scaled(emulation.time_scale)
    sizes = {
        name: round(size * emulation.payload_scale) for name, size in msgspec.structs.asdict(profile.payload).items()
    }
    profile = replace(profile, payload=Payload(**sizes))
    require_room(config, profile.payload)
    _check_memory(config, profile.payload)
    ignored = "model, prompts, scorers and validation" if config.validation else "model, prompts and scorers"
    if config.rollout.program is not None:
        ignored = f"rollout program, {ignored}"
    return RunInputs(
        config=replace(
            config,
            validation=None,
            rollout=replace(config.rollout.as_one_call, timeout_s=_NEVER_S),
            weights=replace(config.weights, timeout_s=_NEVER_S),
        ),
        family=PipelineFamily(
            config.model.pipeline or "emulated", policy="", sampling=SamplingSpec, model_index_class=""
        ),
        prompts=tuple(Prompt(i, f"emulated prompt {i}") for i in range(_SYNTHETIC_PROMPTS)),
        validation_prompts=(),
        profile=profile,
        notes=(
            (
                f"emulated: every device replays profile {profile.name} at {emulation.time_scale:g} times its seconds;"
                f" {ignored} are ignored"
            ),
            *notes,
        ),
    )


def _check_memory(config: Config, payload: Payload) -> None:
    """Refuse payloads that do not fit into memory: they are real, and must all fit while they are alive at once."""
    samples = config.slots * config.rollout.group_size
    held = samples * payload.trajectory + num_with_media(config, config.slots) * payload.media
    if config.buffer.bound is not None:
        held = min(held, config.buffer.bound)
    needed = _WEIGHT_COPIES * payload.weights + held
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"emulation.payload_scale: the payloads of {samples} live samples and {_WEIGHT_COPIES} copies of the"
            f" weights take {needed / 1e9:.1f} GB, {available / 1e9:.1f} GB are free; lower it"
        )


def _prompts(config: Config, checks: list[PromptCheck], limits: PromptLimits) -> list[Prompt]:
    longest = config.data.max_prompt_chars
    if config.data.preferences is not None:
        from omni_async.data.preferences import PreferencePairs

        if (made := [one.part for one in config.rollout.sampling.media()]) != ["image"]:
            raise ConfigError(f"data.preferences: pairs are images, but the samples are {' and '.join(made)}")
        pairs = PreferencePairs(config.data.preferences, config.data.columns)
        prompts = pairs.prompts(longest, partial(limits.problems, "data.preferences"))
        if (note := pairs.check_images()) is not None:
            limits.notes.append(note)
        return prompts
    if config.data.prompts is None:
        raise ConfigError("data.prompts: required")
    problems = partial(limits.problems, "data.prompts")
    columns = config.data.columns
    return load_prompts(config.data.prompts, "data.prompts", longest, checks, problems, columns=columns)

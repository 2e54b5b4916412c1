"""Refuses combinations that cannot work, each with the reason and a solution.

Bounds of single values are in the schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from omni_async.config.draws import TOKEN_ENGINES, draws_problems
from omni_async.config.engine_args import engine_problems
from omni_async.config.held import num_with_media
from omni_async.config.reward import Scorer
from omni_async.config.schema import Config
from omni_async.config.section import size_text
from omni_async.plugins.backends import find_backend
from omni_async.plugins.families import SamplingSpec
from omni_async.worker import BUILT_IN_ROLES

_MOST_LIVE_GROUPS = 100_000
_LEAST_SHARE = 0.0001  # of a CPU or an accelerator


def check(config: Config) -> str | None:
    """Return the first problem found, or None."""
    return next(_problems(config), None)


def _problems(c: Config) -> Iterator[str]:
    for part in (
        draws_problems,
        _data,
        _calls,
        _window,
        _sharing,
        _placement,
        _staleness,
        _batching,
        engine_problems,
        _training,
        _reward,
        _runtime,
    ):
        yield from part(c)
    names = [role.name for role in c.roles]
    for number, name in enumerate(names):
        if name in names[:number]:
            yield f"roles.{number}.name: {name!r} is there twice; raise its `workers` instead"


def _data(c: Config) -> Iterator[str]:
    if c.emulation is not None:
        if c.data.preferences is not None:
            yield "emulation.profile: emulated devices generate their samples; leave out data.preferences"
    elif c.data.prompts is None and c.data.preferences is None:
        yield (
            "data.prompts: required, expected a table of prompts (.txt, .jsonl, .csv, .parquet, ...), or"
            " data.preferences for offline diffusion_dpo"
        )
    if (validation := c.validation) is not None and (validation.prompts is None) == (validation.split is None):
        if validation.prompts is not None:
            yield (
                "validation.split: validation.prompts is set, perhaps by a recipe that this one extends; set it to"
                " null, or remove the split"
            )
        elif c.emulation is None:
            yield "validation.prompts: required, expected a table of prompts, or validation.split to hold out prompts"


def _calls(c: Config) -> Iterator[str]:
    calls, program = c.rollout.calls, c.rollout.program
    if calls > 1 and program is None:
        yield (
            f"rollout.program: required where a sample takes several calls, got rollout.calls = {calls} and none; name"
            " one, or leave rollout.calls at 1"
        )
    if calls == 1 and program is not None:
        yield f"rollout.calls: a program makes several calls, expected at least 2 with {program.name!r}, got 1"
    if calls > 1 and c.data.preferences is not None:
        yield f"rollout.calls: the samples of data.preferences are not drawn, expected 1, got {calls}"


def _window(c: Config) -> Iterator[str]:
    if c.rollout.sde is None:
        return
    window, steps = c.rollout.sde.window, c.rollout.num_inference_steps
    lo, hi = window.range
    if not 0 <= lo < hi:
        yield f"rollout.sde.window.range: expected 0 <= lo < hi, got {list(window.range)}"
    elif hi - lo < window.size:
        yield f"rollout.sde.window.size: {window.size} steps do not fit into range {list(window.range)}"
    elif hi > steps - 1:
        yield (
            "rollout.sde.window.range: the last step is never trained (its transition is degenerate), so hi may be at"
            f" most num_inference_steps - 1 = {steps - 1}, got {hi}"
        )


def _sharing(c: Config) -> Iterator[str]:
    rollout = c.rollout
    if rollout.share_initial_noise and rollout.sde is None:
        yield (
            "rollout.share_initial_noise: rollout.sde: null adds no other noise, so all samples of a group would be the"
            " same; leave it out"
        )
    if not rollout.share_prefix:
        return
    if not rollout.share_initial_noise:
        yield (
            "rollout.share_prefix: samples take the same steps before the window only if they start from the same"
            " noise; set rollout.share_initial_noise: true, or leave it out"
        )
    if rollout.sde is not None and rollout.sde.window.range[1] == rollout.sde.window.size:
        yield (
            "rollout.share_prefix: every window starts at step 0 with rollout.sde.window.size ="
            f" {rollout.sde.window.size} and range {list(rollout.sde.window.range)}, so no step comes before it; move"
            " the range, or leave it out"
        )
    if rollout.engine == "emulated" and c.emulation is None:
        yield "rollout.share_prefix: expected rollout.engine vllm_omni or diffusers, got emulated; leave it out"


def _placement(c: Config) -> Iterator[str]:
    for key, resources in c.resources.items():
        gpus = resources.gpus
        if gpus > 1 and gpus != int(gpus):
            yield (
                f"{key}.gpus: Ray divides one accelerator, but no more than one: expected a part of 1 or a"
                f" whole number, got {gpus:g}"
            )
        for kind, asked in (("cpus", resources.cpus), ("gpus", gpus)):
            if 0 < asked < _LEAST_SHARE:
                yield f"{key}.{kind}: Ray counts in ten-thousandths, expected at least {_LEAST_SHARE}, got {asked:g}"


def _staleness(c: Config) -> Iterator[str]:
    buffer, every = c.buffer, c.weights.publish_every
    live = c.slots
    if live > _MOST_LIVE_GROUPS:
        yield (
            f"staleness.max_updates: (S + 1) x trainer.groups_per_update = {live} groups may be alive at once, at most"
            f" {_MOST_LIVE_GROUPS} are kept track of; lower one of them"
        )
    ahead = min(live - c.trainer.groups_per_update, buffer.groups)
    if isinstance(c.staleness.reserve, int) and c.staleness.reserve > ahead:
        yield (
            f"staleness.reserve: {c.staleness.reserve} groups do not fit: at most {ahead} groups can be ahead of the"
            " update being trained, staleness.max_updates x trainer.groups_per_update and no more than buffer.groups;"
            " lower it or raise these"
        )
    if c.staleness.exact and buffer.groups < live:
        yield (
            f"buffer.groups: staleness.exact waits for all {live} admitted groups, so they must fit; got"
            f" {buffer.groups}"
        )
    if c.staleness.exact and every != 1:
        yield (
            "weights.publish_every: staleness.exact trains on nothing older than S updates, so every update is"
            f" published; got {every}"
        )
    if c.staleness.exact and buffer.bound is not None:
        yield (
            "buffer.max_bytes: staleness.exact waits for a whole number of updates' groups, which a bound in bytes may"
            f" keep out; leave one of them out, got {buffer.max_bytes}"
        )
    samples, media = c.trainer.groups_per_update * c.rollout.group_size, _media_bytes(c)
    held = num_with_media(c, c.trainer.groups_per_update)
    if media and buffer.bound is not None and buffer.bound <= held * media:
        yield (
            f"buffer.max_bytes: an update's {samples} trajectories are held together, and {held} media of"
            f" {size_text(media)}: expected more than {size_text(held * media)}, got {buffer.max_bytes}"
        )
    if c.staleness.max_updates + 1 < every:
        yield (
            f"staleness.max_updates: {c.staleness.max_updates} is smaller than weights.publish_every - 1 ="
            f" {every - 1}: the trainer would wait for groups that only a publish admits; raise"
            " max_updates or lower publish_every"
        )
    if c.weights.payload == "lora" and c.model.lora is None:
        yield "weights.payload: 'lora' needs model.lora; use 'full' or set model.lora.rank"


def _media_bytes(c: Config) -> int:
    """Return the bytes of the largest sample's images and videos, uint8; 0 if they are unknown."""
    specs = [spec for spec in c.rollout.specs if isinstance(spec, SamplingSpec) and c.emulation is None]
    pixels = [[part.shape for part in spec.media() if part.part in ("image", "video")] for spec in specs]
    return max((sum(map(math.prod, shapes)) for shapes in pixels), default=0)


def _batching(c: Config) -> Iterator[str]:
    if c.rollout.batching == "step":
        return
    if c.weights.swap == "step":
        set_by = " (set by schedule: async)" if c.schedule == "async" else ""
        yield (
            f"weights.swap: 'step'{set_by} swaps between two denoising steps, and rollout.batching: request takes all"
            " steps of a batch at once; use swap: request or drain, or batching: step"
        )
    if c.rollout.engine in ("emulated", *TOKEN_ENGINES) and c.emulation is None:
        yield (
            "rollout.batching: 'request' is for the engines vllm_omni and diffusers, not for"
            f" {c.rollout.engine!r}; use 'step'"
        )


def _training(c: Config) -> Iterator[str]:
    t = c.trainer
    if t.groups_per_update % t.steps_per_update:
        yield (
            f"trainer.steps_per_update: {t.steps_per_update} does not divide groups_per_update = {t.groups_per_update}"
        )
    elif t.groups_per_update // t.steps_per_update % t.groups_per_micro_batch:
        yield (
            f"trainer.groups_per_micro_batch: {t.groups_per_micro_batch} does not divide the"
            f" {t.groups_per_update // t.steps_per_update} groups of an optimizer step; use a divisor"
        )
    if t.optimizer.fused and t.optimizer.name != "adamw":
        yield f"trainer.optimizer.fused: only adamw has one kernel, got {t.optimizer.name}; leave it out"
    if t.optimizer.max_alignment is not None and t.optimizer.name == "sgd" and t.optimizer.momentum == 0:
        yield "trainer.optimizer.max_alignment: sgd without momentum keeps no earlier gradients; set momentum, or adamw"
    if (size := t.optimizer.step_size) is not None and size.by == "ess" and size.target > 1:
        yield f"trainer.optimizer.step_size.target: an effective sample size is at most 1, got {size.target:g}"
    if t.gather == "step" and (t.workers if t.shard is None else t.shard) == 1:
        yield (
            "trainer.gather: step: one rank holds all weights and gathers none, and would hold them twice; use layer"
        )
    if t.sequence_parallel > 1 and t.compile:
        yield (
            "trainer.compile: layers whose attention exchanges tokens are not compiled, and trainer.sequence_parallel ="
            f" {t.sequence_parallel}; leave one of them out"
        )
    if c.buffer.groups < t.groups_per_update and t.streaming == "off":
        yield (
            f"buffer.groups: {c.buffer.groups} is less than one update's groups_per_update = {t.groups_per_update},"
            " which streaming: off collects first"
        )
    # Ranks without accelerators compute on the CPU; in one process this is known only at runtime.
    on_cpu = c.run.runtime == "ray" and c.placement.trainer.gpus == 0
    try:
        find_backend(t.backend, workers=t.workers, offload=t.offload, on_cpu=on_cpu)
    except ValueError as error:
        yield str(error)
    if c.algorithm.clip_range is not None and c.algorithm.clip_range_nats is not None:
        yield "algorithm.clip_range: give either clip_range or clip_range_nats, not both"


def _reward(c: Config) -> Iterator[str]:
    r, needed = c.reward, c.trainer.groups_per_update * c.rollout.group_size
    if not r.streaming and c.buffer.trajectories < needed:
        yield (
            f"buffer.trajectories: with reward.streaming: false an update's {needed} samples lie there at once, got"
            f" {c.buffer.trajectories}"
        )
    if r.backoff_max_s < r.backoff_s:
        yield (f"reward.backoff_max_s: pauses begin with reward.backoff_s = {r.backoff_s:g}, got {r.backoff_max_s:g}")
    if r.hedge_s is not None and r.hedge_s >= r.timeout_s:
        yield (
            f"reward.hedge_s: a call is given up after reward.timeout_s = {r.timeout_s:g}, so expected less, got"
            f" {r.hedge_s:g}"
        )
    if c.emulation is None and c.data.preferences is None:
        counted = [one for one in r.scorers if one.weight and (not one.components or any(one.components.values()))]
        if not r.scorers and c.algorithm.teacher is None:
            yield "reward.scorers: required, at least one; `omni-async list` shows them"
        elif r.scorers and not counted:
            yield "reward.scorers: every weight is 0, so there is no reward"
    yield from _pools(c)
    for number, scorer in enumerate(r.scorers):
        yield from _scorer(c, f"reward.scorers.{number}", scorer)
    if r.combine == "product" and c.algorithm.advantage.aggregate != "rewards":
        yield (
            "reward.combine: 'product' has no terms that algorithm.advantage.aggregate:"
            f" {c.algorithm.advantage.aggregate} could take apart; use rewards"
        )
    if not abs(r.gated) <= r.max_abs:
        yield f"reward.gated: expected at most reward.max_abs = {r.max_abs:g}, got {r.gated:g}"


def _pools(c: Config) -> Iterator[str]:
    taken = {*BUILT_IN_ROLES, *(role.name for role in c.roles)}
    for key, names in (
        ("pools", [pool.name for pool in c.reward.pools]),
        ("servers", [server.name for server in c.reward.servers]),
    ):
        for number, name in enumerate(names):
            if name in taken:
                yield f"reward.{key}.{number}.name: {name!r} is the name of another role; choose another"
            taken.add(name)
    for number, server in enumerate(c.reward.servers):
        if not server.replicas and not server.urls:
            yield f"reward.servers.{number}: neither replicas nor urls, so nobody would answer; give one of them"
        if server.access is not None and not server.urls:
            yield f"reward.servers.{number}.access: it is for urls, of which there are none; leave it out"
        if server.access is not None and not server.access.startswith("env:"):
            yield f"reward.servers.{number}.access: expected env:NAME, the environment variable that holds it"
    names = [pool.name for pool in c.reward.pools]
    for number, name in enumerate(names):
        if not any(scorer.pool == name for scorer in c.reward.scorers):
            yield f"reward.pools.{number}: no scorer has pool: {name}; name it in one, or leave the pool out"


def _scorer(c: Config, key: str, scorer: Scorer) -> Iterator[str]:
    advantage, pools = c.algorithm.advantage, [pool.name for pool in c.reward.pools]
    server = scorer.params.get("server")
    if ":" not in scorer.name and isinstance(server, str) and server not in c.services:
        known = ", ".join(c.services) or "none"
        yield f"{key}.params.server: expected a name of reward.servers ({known}), got {server!r}"
    if scorer.pool is not None and scorer.pool not in pools:
        yield f"{key}.pool: expected a name of reward.pools ({', '.join(pools) or 'none'}), got {scorer.pool!r}"
    timeout_s = c.reward.timeout_s if scorer.timeout_s is None else scorer.timeout_s
    if scorer.hedge_s is not None and scorer.hedge_s >= timeout_s:
        given_up = f"a call is given up after timeout_s = {timeout_s:g}"
        yield f"{key}.hedge_s: {given_up}, so expected less, got {scorer.hedge_s:g}"
    if advantage.aggregate == "rewards":
        return
    if scorer.gate is not None:
        yield f"{key}.gate: needs algorithm.advantage.aggregate: rewards, got {advantage.aggregate}"
    if advantage.track_prompts and (scorer.when or scorer.on_failure == "leave_out"):
        yield (
            f"{key}: a scorer that is not asked for every sample (when, on_failure: leave_out) has no history to"
            f" compare with; use algorithm.advantage.aggregate: rewards, got {advantage.aggregate} with track_prompts"
        )


def _runtime(c: Config) -> Iterator[str]:
    if c.placement.colocated and c.staleness.max_updates > 0:
        yield (
            "placement.colocated: roles that share devices take turns, which is staleness.max_updates: 0, got"
            f" {c.staleness.max_updates}"
        )
    if c.run.runtime == "ray":
        return
    if c.weights.transport == "collective":
        yield "weights.transport: 'collective' needs run.runtime: ray; in one process use object_store"
    if c.emulation is None and c.rollout.engine == "vllm_omni" and c.data.preferences is None:
        yield (
            "run.runtime: 'inprocess' cannot host the vllm_omni engine (it claims the process); use runtime: ray,"
            " or engine: diffusers"
        )
    if c.emulation is None and c.trainer.workers > 1:
        yield (
            f"run.runtime: 'inprocess' has one trainer rank, got trainer.workers = {c.trainer.workers}; use"
            " runtime: ray"
        )

"""Finds in a run's records the facts that its owner should know, with their meaning and a remedy.

Pure functions over `Seen`. Each only reports what the records support: it compares a share by the lower end of its 95 %
interval, a trend by the interval of its slope, a level by the median of some updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from omni_async.algorithms.mismatch import CLIPPED_AT_MOST
from omni_async.records.read.seen import Seen
from omni_async.records.read.trends import share_at_least, trend

_UPDATES = 100  # maximum number of updates in a trend
_FEWEST_UPDATES = 30  # minimum number of updates for a reliable trend
_HOUR_S = 3600.0


class Alert(msgspec.Struct, frozen=True):
    """Something the owner of a run should know.

    `name`: the alert's id. `says`: the observation, with numbers, and its meaning. `do`: the remedy. `docs`: the
    documentation page with details, and the place on it."""

    name: str
    level: Literal["problem", "warning", "note"]
    says: str
    do: str
    docs: str


def alerts(seen: Seen) -> list[Alert]:
    """Return all alerts, problems first."""
    found = [alert for check in CHECKS if (alert := check(seen)) is not None]
    return sorted(found, key=lambda alert: ("problem", "warning", "note").index(alert.level))


# ---- learning --------------------------------------------------------------------------------------------------------


def reward_flat(seen: Seen) -> Alert | None:
    """Report that neither the training reward nor validation rises.

    A slope interval that contains 0 is not enough, because short runs have one anyway. Its upper end must also be
    small: less than one deviation of an update's reward over all these updates."""
    rewards = seen.rewards(_UPDATES)
    found = trend(rewards)
    if len(rewards) < _FEWEST_UPDATES or found is None or not found.low <= 0 <= found.high:
        return None
    if found.high * len(rewards) > found.noise:
        return None  # it may be rising
    rounds = seen.rounds_since(len(rewards))
    validated = trend(rounds)
    if validated is not None and validated.high > 0 and rounds[-1] >= rounds.max() and len(rounds) > 1:
        return None  # the newest round is the best
    checked = f", nor does validation ({len(rounds)} rounds)" if validated is not None else ""
    return Alert(
        "reward_flat",
        "warning",
        f"The reward has not risen over the last {len(rewards)} updates{checked}: its trend is"
        f" {found.slope * len(rewards):+.2g} ± {(found.high - found.slope) * len(rewards):.2g} over all of them.",
        "If it is as high as the scorer goes, the run is done: stop it. Otherwise raise trainer.optimizer.lr or the"
        " group size, or look whether groups are rejected or rows masked.",
        "tuning.md#symptoms",
    )


def reward_falls(seen: Seen) -> Alert | None:
    """Report a reward that falls."""
    rewards = seen.rewards(_UPDATES)
    found = trend(rewards)
    if len(rewards) < _FEWEST_UPDATES or found is None or found.high >= 0:
        return None
    return Alert(
        "reward_falls",
        "problem",
        f"The reward falls: {found.slope * len(rewards):+.2g} over the last {len(rewards)} updates (95 % interval"
        f" {found.low * len(rewards):+.2g} to {found.high * len(rewards):+.2g}).",
        "Lower trainer.optimizer.lr or staleness.max_updates, and continue from an earlier checkpoint"
        " (checkpoint.resume).",
        "algorithms/correction.md#what-is-logged",
    )


def not_finite(seen: Seen) -> Alert | None:
    """Report a loss or gradient that is no number."""
    lost = [name for name in ("loss", "grad_norm") if name in seen.updates and math.isnan(seen.last(name))]
    if not lost:
        return None
    return Alert(
        "not_finite",
        "problem",
        f"The newest update's {' and '.join(lost)} is not a finite number: the weights are probably lost.",
        "Stop the run and continue from the last good checkpoint with a lower trainer.optimizer.lr or"
        " trainer.optimizer.max_grad_norm.",
        "configuration.md",
    )


def zero_variance(seen: Seen) -> Alert | None:
    """Report many groups that are generated in vain."""
    wasted = sum(reason == "zero reward variance" for _, reason in seen.endings)
    if share_at_least(wasted, len(seen.endings)) <= 0.25:
        return None
    return Alert(
        "zero_variance",
        "warning",
        f"{wasted} of the last {len(seen.endings)} groups were rejected because all their samples had the same reward:"
        " they cost as much as others and teach nothing.",
        "Use a scorer with finer values, larger groups (rollout.group_size), more noise (rollout.sde.noise_level), or"
        " prompts that are neither always nor never solved.",
        "rewards/index.md",
    )


# ---- off-policy data -------------------------------------------------------------------------------------------------


def engine_mismatch(seen: Seen) -> Alert | None:
    """Report that engine and trainer compute different policies of the same weights."""
    error, honest = seen.measured("engine_mismatch_velocity"), seen.measured("engine_mismatch_honest")
    if error is None or honest is None or error <= honest:
        return None
    return Alert(
        "engine_mismatch",
        "problem",
        f"With the same weights, the velocities of engine and trainer differ by {error:.0%} of their size; rounding"
        f" explains {honest:.0%}. The run does not train the policy that draws its samples.",
        "Stop the run and compare the two with `omni-async parity`: schedule, time, guidance or weights differ.",
        "integrate-a-model.md",
    )


def mismatch_clipped(seen: Seen) -> Alert | None:
    """Report that rounding alone puts rows outside the clip range."""
    share, error = seen.measured("engine_mismatch_clipped"), seen.measured("engine_mismatch_velocity")
    if share is None or share <= CLIPPED_AT_MOST or seen.last("proximal_ratio") == 1.0:
        return None
    std = (seen.measured("engine_mismatch_nats/variance") or 0.0) ** 0.5
    velocity = "" if error is None else f" (a velocity error of {error:.1%})"  # tokens have none
    return Alert(
        "mismatch_clipped",
        "warning",
        f"{share:.0%} of the rows are outside the clip range before any update: rounding alone moves log-ratios by"
        f" {std:.2g} nats{velocity}.",
        "Set algorithm.correction.mode: auto or none, so that ratios are taken to the trainer's own policy.",
        "algorithms/correction.md#bfloat16-engines",
    )


def low_ess(seen: Seen) -> Alert | None:
    """Report samples that are too far from the policy they train."""
    level = seen.level("ess")
    if level is None or level >= 0.3:
        return None
    return Alert(
        "low_ess",
        "warning",
        f"The effective sample size is {level:.0%} of the samples: most of them are too far from the policy in"
        " training to count.",
        "Lower staleness.max_updates or trainer.optimizer.lr, or publish more often (weights.publish_every).",
        "algorithms/correction.md#what-is-logged",
    )


def masked(seen: Seen) -> Alert | None:
    """Report a correction that masks most rows."""
    return _most_rows(
        seen.level("masked"),
        "masked",
        "The off-policy correction masks {:.0%} of the rows: they are generated, scored and then left out.",
        "Lower staleness.max_updates or trainer.optimizer.lr, or loosen the rule that masks (the metric masked/<rule>"
        " says which).",
        "algorithms/correction.md#settings",
    )


def clipped(seen: Seen) -> Alert | None:
    """Report an objective that clips most rows."""
    return _most_rows(
        seen.level("clip_fraction"),
        "clipped",
        "{:.0%} of the rows are outside the clip range and add no gradient.",
        "Lower trainer.optimizer.lr or staleness.max_updates, or widen the clip range of the algorithm.",
        "algorithms/index.md",
    )


def _most_rows(share: float | None, name: str, says: str, do: str, docs: str) -> Alert | None:
    return None if share is None or share <= 0.5 else Alert(name, "warning", says.format(share), do, docs)


# ---- waiting ---------------------------------------------------------------------------------------------------------


def starved_trainer(seen: Seen) -> Alert | None:
    """Report a trainer that waits, and the role that it waits for."""
    trainer, rollout, reward = (seen.level(f"busy/{role}") for role in ("trainer", "rollout", "reward"))
    if trainer is None or trainer >= 0.5 or max(rollout or 0.0, reward or 0.0) <= 0.9:
        return None
    slow, more = (
        ("generation", "rollout=N (`omni-async scale`), a larger rollout.max_batch, or fewer steps or tokens a sample")
        if (rollout or 0.0) >= (reward or 0.0)
        else ("scoring", "reward=N (`omni-async scale`), a larger reward.batch, or a cheaper scorer")
    )
    return Alert(
        "starved_trainer",
        "note",
        f"The trainer works {trainer:.0%} of the time and waits for {slow} otherwise, which is busy"
        f" {max(rollout or 0.0, reward or 0.0):.0%}.",
        f"Give {slow} more: {more}.",
        "run-directory.md#tracejson-and-how-to-read-starved-and-backpressured",
    )


def idle_devices(seen: Seen) -> Alert | None:
    """Report engines that wait for the trainer."""
    trainer, rollout = seen.level("busy/trainer"), seen.level("busy/rollout")
    if trainer is None or rollout is None or rollout >= 0.5 or trainer <= 0.9:
        return None
    return Alert(
        "idle_engines",
        "note",
        f"Engines work {rollout:.0%} of the time and wait for the trainer otherwise, which is busy {trainer:.0%}.",
        "Give the trainer more (trainer.workers, a larger trainer.micro_batch_size), or scale engines down.",
        "tuning.md#symptoms",
    )


def withheld(seen: Seen) -> Alert | None:
    """Report a trainer that waits for groups that admission withheld."""
    starved, update = seen.level("admission/starved_s"), seen.level("update_s")
    if starved is None or update is None or starved <= 0.05 * update:
        return None
    return Alert(
        "withheld",
        "note",
        f"The trainer waits {starved:.3g} s of {update:.3g} s per update for groups that were admitted too late.",
        "Set a larger staleness.reserve, in groups: samples become older, and the trainer waits less.",
        "how-it-works.md#admission-just-in-time",
    )


def no_progress(seen: Seen) -> Alert | None:
    """Report a run that is running but makes no updates."""
    if seen.status != "running" or len(seen.updates) < 3:
        return None
    usual = float(np.nanmedian(seen.updates.column("update_s", 20)))
    since = seen.now - seen.last("finished")
    if not since > max(60.0, 10 * usual):
        return None
    return Alert(
        "no_progress",
        "problem",
        f"No update for {since:.0f} s, where one took {usual:.3g} s.",
        "Look at the lanes below for what is under way, and at the run's console for what it waits for.",
        "reliability.md",
    )


# ---- faults ----------------------------------------------------------------------------------------------------------


def outage(seen: Seen) -> Alert | None:
    """Report a scorer that is down now."""
    if seen.status != "running" or seen.told is None or "down" not in seen.told:
        return None
    return Alert(
        "outage",
        "problem",
        f"A role told the run: {seen.told}.",
        "Bring the scorer back: the run waits for it, and loses no samples meanwhile.",
        "reliability.md#a-scorer-that-is-wrong-and-one-that-is-down",
    )


def scorer_fails(seen: Seen) -> Alert | None:
    """Report a scorer that fails for many samples."""
    worst: tuple[float, str, int, int] | None = None
    for label in seen.labels:
        counts = [seen.updates.column(f"scorer/{label}/{name}", 20) for name in ("failed", "samples")]
        failed, asked = (int(np.nansum(one)) for one in counts)
        share = share_at_least(failed, asked)
        if share > 0.05 and (worst is None or share > worst[0]):
            worst = (share, label, failed, asked)
    if worst is None:
        return None
    _, label, failed, asked = worst
    return Alert(
        "scorer_fails",
        "warning",
        f"The scorer {label} failed for {failed} of {asked} samples of the last updates; each is asked for again.",
        "Read its messages on the run's console and the reasons in the ledger; a scorer over HTTP may need a longer"
        " time-out or fewer samples at once.",
        "reliability.md#reward-faults",
    )


def not_scored(seen: Seen) -> Alert | None:
    """Report samples of the newest validation round that have no score."""
    newest = seen.validation[-1] if seen.validation else None
    left_out = "" if newest is None else newest.left_out
    if newest is None or not left_out:
        return None
    return Alert(
        "not_scored",
        "warning",
        f"Validation of version {newest.version}: {left_out}. Its mean is over the other samples alone.",
        "Compare rounds over the samples that both have scored, as the verdict and --which best do, and look at what"
        " the reasons name.",
        "run-directory.md#the-best-checkpoint",
    )


def dropped(seen: Seen) -> Alert | None:
    """Report groups that failures have dropped."""
    lost = [reason for event, reason in seen.endings if event == "dropped" and not _ends_a_run(reason)]
    if share_at_least(len(lost), len(seen.endings)) <= 0.02:
        return None
    return Alert(
        "dropped",
        "warning",
        f"{len(lost)} of the last {len(seen.endings)} groups were dropped, the last one because: {lost[-1]}.",
        "Look at the reasons under How groups ended; what fails for some prompts only is often the prompt.",
        "run-directory.md#ledgerjsonl",
    )


def repeated_faults(seen: Seen) -> Alert | None:
    """Report a part that is lost repeatedly."""
    if not seen.faults:
        return None
    newest = max(fault.time for fault in seen.faults)
    recent = [fault.part.partition(".")[0] for fault in seen.faults if fault.time > newest - _HOUR_S]
    part = max(recent, key=recent.count)
    if recent.count(part) < 3:
        return None
    why = next(fault.reason for fault in reversed(seen.faults) if fault.part.partition(".")[0] == part)
    return Alert(
        "repeated_faults",
        "problem",
        f"{part} was lost {recent.count(part)} times within an hour, the last time because {why}; each loss costs what"
        " it had under way and its loading.",
        "Look for what ends it: memory (dmesg says so of the kernel), a time-out that is too short, a faulty device.",
        "reliability.md#what-dies-while-the-run-continues",
    )


def killed(seen: Seen) -> Alert | None:
    """Report a run that ended without recording an end."""
    if seen.status != "killed":
        return None
    return Alert(
        "killed",
        "problem",
        "The run is not running and left no summary: it was killed, or its machine went down.",
        "Start it again with the same recipe and checkpoint.resume=auto: it continues from its last checkpoint.",
        "getting-started.md#interrupt-and-resume",
    )


CHECKS: tuple[Callable[[Seen], Alert | None], ...] = (
    killed,
    not_finite,
    outage,
    no_progress,
    repeated_faults,
    engine_mismatch,
    mismatch_clipped,
    reward_falls,
    reward_flat,
    zero_variance,
    low_ess,
    masked,
    clipped,
    scorer_fails,
    not_scored,
    dropped,
    starved_trainer,
    withheld,
    idle_devices,
)


def _ends_a_run(reason: str | None) -> bool:
    return reason is not None and reason.startswith(("run interrupted", "run failed"))

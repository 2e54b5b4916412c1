"""Compares recipes: which reaches the same reward sooner, what an update takes, and how far the final rewards differ.

Several seeds of a recipe are one arm. Its curve is their mean, at the updates that all of them have.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from omni_async.commands.report.blocks import Block, Fact, Facts, Text
from omni_async.commands.report.numbers import Estimate, counted, difference, estimate, number, seconds, signed
from omni_async.commands.report.seeds import seeds_of
from omni_async.commands.report.shown import Shown, recipes_of
from omni_async.control.rounds import NotComparable, Round, common, compare, mean
from omni_async.types import finite

ENDS = 5  # updates in a mean of training rewards
_EQUAL = 1.02  # ratio of times that counts as equal
_UNLIKE = "Emulated parts of their recipes differ, so neither times nor rewards are comparable."
_VALIDATION, _TRAINING = "validation reward", "training reward"


class Arm(NamedTuple):
    """The runs of one recipe, and its name on the page."""

    name: str
    runs: Sequence[Shown]


class Point(NamedTuple):
    """The reward of an arm after an update, and the seconds after loading."""

    update: int
    seconds: float
    reward: float


class Reached(NamedTuple):
    """A reward that both arms reached, and the seconds that each of them took to it."""

    reward: float
    times: tuple[float, float]


class Final(NamedTuple):
    """The rewards of both arms at the end, and their difference. `how`: the pairing, or why there is no interval."""

    what: str
    before: float
    after: float
    gain: Estimate
    how: str


class Comparison(NamedTuple):
    """Two arms. `metric`: the reward of `reached`. `update_s`: seconds per update of each; None without an update.

    `reasons`: why a part is missing, a sentence each."""

    before: Arm
    after: Arm
    metric: str
    reached: Reached | None
    update_s: tuple[float, float] | None
    final: Final | None
    reasons: Sequence[str]


def comparisons(shown: Sequence[Shown]) -> list[Comparison]:
    """Compare every recipe with the first; empty for runs of one recipe."""
    first, *others = _arms(shown)
    return [compared(first, other) for other in others]


def compared(before: Arm, after: Arm) -> Comparison:
    """Compare two arms. Each number that the records do not support is None, with the reason in `reasons`."""
    first, *others = map(_emulation, (*before.runs, *after.runs))
    if any(one != first for one in others):
        return Comparison(before, after, _TRAINING, None, None, None, [_UNLIKE])
    reasons: list[str] = []
    metric, reached = _reached(before, after, reasons)
    devices = _devices(before), _devices(after)
    if None not in devices and devices[0] != devices[1]:
        reasons.append(
            f"Their numbers of devices differ: {devices[0]} for {before.name}, {devices[1]} for {after.name}."
        )
    times = [_update_s(arm) for arm in (before, after)]
    update_s = None if times[0] is None or times[1] is None else (times[0], times[1])
    return Comparison(before, after, metric, reached, update_s, _final(before, after, reasons), reasons)


def headline(found: Comparison) -> str:
    """Return a sentence that names the faster arm and by how much."""
    names = found.before.name, found.after.name
    updates = found.update_s
    if found.reached is not None:
        times = found.reached.times
        to = f"{found.metric} {number(found.reached.reward)}"
        if not _differ(times):
            return f"{names[1]} and {names[0]} are equally fast: {to} after {' and '.join(map(seconds, times[::-1]))}"
        fast = times[1] < times[0]
        text = f"{names[fast]} is {_ratio(times)} times as fast: {to} after {_instead(times)}"
        if updates is not None and _differ(updates) and (updates[1] < updates[0]) != fast:
            text += f", although an update takes {seconds(updates[fast])} instead of {seconds(updates[not fast])}"
        return text
    if _UNLIKE in found.reasons:
        return f"{names[1]} and {names[0]} are not comparable"
    if updates is None:
        return f"Too early to compare {names[1]} with {names[0]}"
    if not _differ(updates):
        return f"An update of {names[1]} takes as long as of {names[0]}: {seconds(updates[1])}"
    return f"{names[updates[1] < updates[0]]} is {_ratio(updates)} times as fast: an update takes {_instead(updates)}"


def speed_up(found: Comparison) -> float:
    """Return how many times as fast the second arm is, to the same reward or else per update; 0 if unknown."""
    times = found.reached.times if found.reached is not None else found.update_s
    return 0.0 if times is None or times[1] <= 0 else times[0] / times[1]


def comparison_blocks(found: Comparison) -> list[Block]:
    """Return the numbers of a comparison, and the reasons for missing numbers."""
    names = found.before.name, found.after.name

    def times(label: str, pair: tuple[float, float], more: str = "") -> Fact:
        faster = f"; {names[pair[1] < pair[0]]} is {_ratio(pair)} times as fast" if _differ(pair) else ""
        return Fact(label, " → ".join(map(number, pair)), f"{' → '.join(names)}{faster}{more}")

    items = []
    if found.reached is not None:
        label = f"seconds to {found.metric} {number(found.reached.reward)}"
        items.append(times(label, found.reached.times, ", to the highest reward that both reached"))
    if found.update_s is not None:
        items.append(times("seconds per update", found.update_s))
    if found.final is not None:
        what, before, after, gain, how = found.final
        interval = " (95 % interval)" if gain.half is not None else ""
        items.append(Fact(what, f"{number(before)} → {number(after)}", f"{signed(gain)}{interval}, {how}"))
    texts = [Text(reason, "nothing") for reason in found.reasons]
    return [*([Facts(items)] if items else []), *texts]


def by_prompt(rewards: Sequence[float | None], positions: Iterable[int], per_prompt: int) -> list[list[float]]:
    """Return the rewards at these positions of a round, grouped by prompt; prompts are the independent units."""
    found: dict[int, list[float]] = defaultdict(list)
    for at in positions:
        found[at // per_prompt].append(rewards[at] or 0.0)
    return [*found.values()]


def samples_per_prompt(one: Shown) -> int:
    """Return the number of validation samples of a prompt."""
    given = one.run.setting("validation.samples_per_prompt", 1)
    return given if isinstance(given, int) and given > 0 else 1


def _arms(shown: Sequence[Shown]) -> list[Arm]:
    recipes = recipes_of(shown)
    names = [str(runs[0].run.setting("run.name", runs[0].run.id)) for runs in recipes]
    times = Counter(names)
    return [Arm(name if times[name] == 1 else runs[0].label, runs) for name, runs in zip(names, recipes, strict=True)]


# ---- time ------------------------------------------------------------------------------------------------------------


def _reached(before: Arm, after: Arm, reasons: list[str]) -> tuple[str, Reached | None]:
    if any(_reward_of(one) != _reward_of(before.runs[0]) for one in (*before.runs, *after.runs)):
        reasons.append("Their rewards are not comparable: scorers or weights differ.")
        return _TRAINING, None
    if (why := _other_samples(before, after)) is not None:
        reasons.append(f"Their validation curves are not compared: {why}.")
    metrics = [(_VALIDATION, _validated)] if why is None else []
    for metric, points in (*metrics, (_TRAINING, _trained)):
        curves = _curve(before, points), _curve(after, points)
        if min(map(len, curves)) > 1:
            found = same_reward(*curves)
            if found is None:
                reasons.append(f"There is no {metric} above the start of both that both reached.")
            return metric, found
    reasons.append("There is no reward that both reached: a curve has fewer than two points.")
    return _TRAINING, None


def _other_samples(before: Arm, after: Arm) -> str | None:
    """Return why the validation rounds of runs with the same seed are not of the same samples; None if they are."""
    for one, other in _pairs(before, after):
        rounds = [[each for each in run.run.validation if each.scores] for run in (one, other)]
        same_seed = one.run.setting("run.seed") == other.run.setting("run.seed")
        if same_seed and all(rounds) and rounds[0][-1].drawn != rounds[1][-1].drawn:
            return "their prompts, noise, sampling or scorers differ"
    return None


def same_reward(before: Sequence[Point], after: Sequence[Point]) -> Reached | None:
    """Return the highest reward that both curves reach, and when; None unless it is above the start of both."""
    level = min(max(point.reward for point in curve) for curve in (before, after))
    if level <= max(before[0].reward, after[0].reward):
        return None
    return Reached(level, (_seconds_to(level, before), _seconds_to(level, after)))


def _seconds_to(level: float, curve: Sequence[Point]) -> float:
    """Return when a curve first reaches the level, interpolated between its points. It must reach the level."""
    for one, other in pairwise(curve):
        if one.reward < level <= other.reward:
            share = (level - one.reward) / (other.reward - one.reward)
            return one.seconds + share * (other.seconds - one.seconds)
    raise AssertionError(f"the curve starts at {curve[0].reward} and never crosses {level}")


def _validated(one: Shown) -> list[Point]:
    """Return the complete validation rounds: the mean of an incomplete one is over other samples."""
    wall = {line["update"]: finite(line.get("wall_s")) for line in one.run.updates} | {0: 0.0}
    return [
        Point(each.version, at, each.reward)
        for each in sorted(one.run.validation, key=lambda each: each.version)
        if each.reward is not None and not each.is_incomplete and (at := wall.get(each.version)) is not None
    ]


def _trained(one: Shown) -> list[Point]:
    """Return the mean training reward of each 5 successive updates, at the last of them; none without scorers."""
    found = [
        Point(line["update"], at, reward)
        for line in (one.run.updates if one.is_scored else ())
        if (reward := finite(line.get("reward"))) is not None and (at := finite(line.get("wall_s"))) is not None
    ]
    return [
        last._replace(reward=mean([point.reward for point in found[end - ENDS + 1 : end + 1]]))
        for end, last in enumerate(found)
        if end >= ENDS - 1
    ]


def _curve(arm: Arm, points: Callable[[Shown], list[Point]]) -> list[Point]:
    at: dict[int, list[Point]] = defaultdict(list)
    for one in arm.runs:
        for update, point in {point.update: point for point in points(one)}.items():
            at[update].append(point)
    return [
        Point(update, mean([point.seconds for point in own]), mean([point.reward for point in own]))
        for update, own in sorted(at.items())
        if len(own) == len(arm.runs)
    ]


def _update_s(arm: Arm) -> float | None:
    """Return the seconds per update, from loading to the last update, as the mean of the runs."""
    found = []
    for one in arm.runs:
        last = one.run.updates[-1] if one.run.updates else {}
        wall_s = finite(last.get("wall_s"))
        if wall_s is None or not last["update"]:
            return None
        found.append(wall_s / last["update"])
    return mean(found)


def _emulation(one: Shown) -> tuple[object, ...]:
    """Return what decides whether seconds and rewards of two runs are of the same kind."""
    scale = one.run.setting("emulation.time_scale", 1) if one.is_emulated else None
    return scale, one.run.setting("rollout.engine") == "emulated"


def _devices(arm: Arm) -> str | None:
    """Return the numbers of devices of the runs; None without a summary, or for emulated devices."""
    summaries = [one.run.summary for one in arm.runs if not one.is_emulated]
    return " or ".join(sorted({f"{found.devices:g}" for found in summaries if found is not None})) or None


def _reward_of(one: Shown) -> tuple[object, ...]:
    return tuple(one.run.setting(f"reward.{key}") for key in ("scorers", "combine", "gated"))


def _differ(times: tuple[float, float]) -> bool:
    return max(times) > _EQUAL * min(times)


def _ratio(times: tuple[float, float]) -> str:
    return f"{max(times) / min(times):.2f}" if min(times) > 0 else "many"


def _instead(times: tuple[float, float]) -> str:
    return f"{seconds(min(times))} instead of {seconds(max(times))}"


# ---- the final reward ------------------------------------------------------------------------------------------------


def _final(before: Arm, after: Arm, reasons: list[str]) -> Final | None:
    version = _last_of_both(before, after)
    if version is None:
        found = _final_training(before, after)
        what = "The final rewards are of training" if found is not None else "There is no final reward to compare"
        reasons.append(f"{what}: no validation round is of the same update in all runs.")
        return found
    pairs = _pairs(before, after)
    paired = [(_round(one, version), _round(other, version)) for one, other in pairs]
    what = f"{_VALIDATION} after update {version}"
    try:
        changes = [compare(*rounds).reward for rounds in paired]
    except NotComparable as error:
        reasons.append(f"The final validation rewards are not comparable: {error}.")
        return None
    old, new = (mean([change[side] for change in changes]) for side in (0, 1))
    if len(changes) > 1:
        gain = estimate([later - earlier for earlier, later in changes])
        assert gain is not None
        return Final(what, old, new, gain, f"paired over {seeds_of([one for one, _ in pairs])}")
    gain = _over_prompts(pairs[0], *paired[0])
    if gain is None:
        return Final(what, old, new, Estimate(new - old, None), "no interval: rewards of samples not recorded")
    if gain.half is None:
        return Final(what, old, new, gain, "no interval: one validation prompt")
    reasons.append("The interval does not cover training seeds: only one seed was compared.")
    prompts = len(by_prompt(paired[0][0].rewards, common(*paired[0]), samples_per_prompt(pairs[0][0])))
    return Final(what, old, new, gain, f"paired over {counted(prompts, 'validation prompt')}")


def _over_prompts(pair: tuple[Shown, Shown], before: Round, after: Round) -> Estimate | None:
    """Return the mean difference over the prompts that both rounds scored; None without the samples' rewards."""
    if not (before.scores and after.scores):
        return None
    positions, number_ = common(before, after), samples_per_prompt(pair[0])
    old, new = (by_prompt(one.rewards, positions, number_) for one in (before, after))
    return estimate([mean(later) - mean(earlier) for earlier, later in zip(old, new, strict=True)])


def _pairs(before: Arm, after: Arm) -> list[tuple[Shown, Shown]]:
    """Return the runs of equal seeds; without any, the first run of each arm."""
    seeds = [_by_seed(arm) for arm in (before, after)]
    pairs = [(one, seeds[1][seed]) for seed, one in seeds[0].items() if seed in seeds[1]]
    return pairs or [(before.runs[0], after.runs[0])]


def _by_seed(arm: Arm) -> Mapping[str, Shown]:
    return {str(one.run.setting("run.seed")): one for one in arm.runs}


def _last_of_both(before: Arm, after: Arm) -> int | None:
    """Return the newest version above 0 that all runs have validated."""
    versions = [{each.version for each in one.run.validation if each.reward is not None} for one in before.runs]
    versions += [{each.version for each in one.run.validation if each.reward is not None} for one in after.runs]
    return max(set.intersection(*versions) - {0}, default=None)


def _round(one: Shown, version: int) -> Round:
    return next(each for each in one.run.validation if each.version == version)


def _final_training(before: Arm, after: Arm) -> Final | None:
    """Compare the last updates of the first runs. Their prompts differ, so nothing is paired."""
    ends = [last_updates(arm.runs[0]) for arm in (before, after)]
    if ends[0] is None or ends[1] is None:
        return None
    gain = difference(ends[0], ends[1])
    how = f"not paired: over the groups of the last {ENDS} updates"
    return Final(_TRAINING, ends[0].mean, ends[1].mean, gain, how)


def last_updates(one: Shown, first: bool = False) -> Estimate | None:
    """Return the mean reward of the groups of the last 5 updates, or of the `first` ones; None without rewards."""
    if not one.is_scored:
        return None
    versions = sorted({line.trained_version for line in one.run.ledger if line.trained_version is not None})
    chosen = {*(versions[:ENDS] if first else versions[-ENDS:])}
    return estimate(
        [line.reward for line in one.run.ledger if line.trained_version in chosen and line.reward is not None]
    )

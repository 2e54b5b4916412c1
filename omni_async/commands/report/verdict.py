"""Summarizes the outcome of a run, or of several, in plain words and numbers: the top of the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

from omni_async.commands.emulated import emulated
from omni_async.commands.report.blocks import Block, Cell, Fact, Facts, Section, Table, Text
from omni_async.commands.report.compare import (
    ENDS,
    by_prompt,
    comparison_blocks,
    comparisons,
    headline,
    last_updates,
    samples_per_prompt,
    speed_up,
)
from omni_async.commands.report.numbers import Estimate, counted, difference, estimate, number, seconds, signed
from omni_async.commands.report.seeds import seeds_of
from omni_async.commands.report.setup import setup
from omni_async.commands.report.shown import Shown, recipes_of, tabs
from omni_async.control.rounds import NotComparable, Round, common, compare, first_and_last, mean
from omni_async.records.read.record import ended_groups
from omni_async.records.write.console import groups_left_out
from omni_async.types import finite

LEARNED = "It learned"
_STATUS = {
    "running": "is running",
    "done": "is done",
    "interrupted": "was interrupted",
    "failed": "failed",
    "killed": "was killed, or its machine went down: it left no summary",
}


class Change(msgspec.Struct, frozen=True):
    """A number before and after training.

    `sure`: whether the 95 % interval of the difference excludes zero. `over`: the number of samples in both means,
    unless all."""

    before: Estimate
    after: Estimate
    gain: Estimate
    sure: bool
    over: str = ""


def verdict(shown: Sequence[Shown]) -> Section:
    """Return the section with the outcome of one run, or the comparison of several, and what each run is."""
    if len(shown) == 1:
        return Section("verdict", sentence(shown[0]), blocks=_one(shown[0]))
    found = comparisons(shown)
    seeds = _seeds(shown)
    alone = seeds[0][0] if seeds else f"{len(shown)} runs side by side"
    title = headline(max(found, key=speed_up)) if found else alone
    blocks = emulated_runs(shown)
    for one in found:
        blocks += [*([Text(headline(one))] if len(found) > 1 else []), *comparison_blocks(one)]
    blocks += [Text(text) for _, text in seeds]
    return Section("verdict", title, blocks=blocks, tabs=tabs(shown, _one))


def emulated_runs(shown: Sequence[Shown]) -> list[Block]:
    """Return a warning per kind of emulated runs, with their names if the page has other runs, too."""
    runs: dict[str, list[str]] = defaultdict(list)
    for one in shown:
        if text := emulated(one.run.config):
            runs[text].append(one.label)
    return [
        Text(f"{text}." if len(names) == len(shown) else f"{text}: {', '.join(names)}.", "warning")
        for text, names in runs.items()
    ]


def result(shown: Sequence[Shown]) -> Section:
    """Return the section with the numbers of the outcome, and what they cost."""
    title = "Result and cost"
    if len(shown) == 1:
        return Section("result", title, blocks=[Facts([*_learning(shown[0]), *_pace(shown[0])])])
    return Section("result", title, blocks=[_comparison(shown)])


def sentence(one: Shown) -> str:
    """Return a sentence on whether the run learned."""
    made = counted(len(one.run.updates), "update")
    if not one.run.updates:
        return "No update yet" if one.run.status == "running" else "No update was made"
    if one.run.setting("data.preferences"):
        return f"Trained on preferences for {made}"
    if not one.is_scored:
        return f"Distilled from a teacher for {made}"
    name, change = _decides(one)
    if change is None:
        return f"Too early to say: {made} so far" if one.run.status == "running" else f"Too short to say: {made}"
    return f"{_learned(change)}: {name} {number(change.before.mean)} → {number(change.after.mean)}{change.over}"


def _decides(one: Shown) -> tuple[str, Change | None]:
    """Return the name and value of the change that decides whether a run learned.

    This is the change in validation, if the spread of its rounds was recorded or there is no other change."""
    rounds, rewards = validation_change(one), reward_change(one)
    if rounds and (rounds.gain.half is not None or rewards is None):
        return "validation reward", rounds
    return "training reward", rewards


def _learned(change: Change | None) -> str:
    if change is None or not change.sure:
        return "No clear change"
    return LEARNED if change.gain.mean > 0 else "It got worse"


def reward_change(one: Shown) -> Change | None:
    """Compare the groups of the first 5 and the last 5 updates; None with fewer than 10 updates or without scorers.

    A group is one prompt, so the interval includes the differences between prompts."""
    versions = {line.trained_version for line in one.run.ledger if line.trained_version is not None}
    if not one.is_scored or len(versions) < 2 * ENDS:
        return None
    first, last = last_updates(one, first=True), last_updates(one)
    if first is None or last is None:
        return None
    gain = difference(first, last)
    return Change(first, last, gain, gain.half is not None and abs(gain.mean) > gain.half)


def validation_change(one: Shown) -> Change | None:
    """Compare the first and the last validation round, over the samples that both have scored.

    None unless two comparable rounds have a reward."""
    ends = first_and_last(one.run.validation)
    if ends is None:
        return None
    try:
        compared = compare(*ends)
    except NotComparable:
        return None
    if compared.samples == compared.asked:  # or both are unknown
        before, after = (_whole(one, end.version, mean) for end, mean in zip(ends, compared.reward, strict=True))
    else:
        before, after = _shared(one, *ends)
    gain = difference(before, after)
    return Change(before, after, gain, gain.half is not None and abs(gain.mean) > gain.half, compared.over)


def _whole(one: Shown, version: int, mean: float) -> Estimate:
    """Return a round's mean with the interval that it recorded."""
    line = next(line for line in one.run.rounds if line["update"] == version)
    error = finite(line.get("standard_error"))
    return Estimate(mean, None if error is None else 1.96 * error)


def _shared(one: Shown, first: Round, last: Round) -> tuple[Estimate, Estimate]:
    """Return the means of two rounds over the samples that both scored; prompts count as the independent units."""
    positions = common(first, last)

    def over(rewards: Sequence[float | None]) -> Estimate:
        prompts = by_prompt(rewards, positions, samples_per_prompt(one))
        spread = estimate([mean(values) for values in prompts])
        whole = [value for values in prompts for value in values]
        return Estimate(mean(whole), None if spread is None else spread.half)

    return over(first.rewards), over(last.rewards)


_MOST_ROUNDS = 5  # listed rounds with unscored samples


def incomplete_rounds(one: Shown) -> list[Block]:
    """Count the unscored samples of the newest incomplete validation rounds, with their reasons."""
    rounds = one.run.validation
    found = [(each, text) for each in rounds if (text := each.left_out)]
    listed = [f"Validation of version {each.version}: {text}." for each, text in found[-_MOST_ROUNDS:]]
    if len(found) > _MOST_ROUNDS:
        listed.insert(0, f"{len(found)} of {len(rounds)} validation rounds have samples that were not scored.")
    if (ends := first_and_last(rounds)) is not None:
        try:
            compare(*ends)
        except NotComparable as error:
            listed.append(f"Validation rounds {ends[0].version} and {ends[1].version} are not comparable: {error}.")
    return [Text(text, "warning") for text in listed]


def _one(one: Shown) -> list[Block]:
    run = one.run
    blocks: list[Block] = [*emulated_runs([one]), setup(one)]
    reason = f" ({run.reason})" if run.reason else ""
    ended = f"The run {_STATUS[run.status]}{reason}, after {counted(len(run.updates), 'update')}"
    planned = run.setting("trainer.updates")
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    blocks.append(Text(f"{ended}{of}. {_endings(one)}".strip()))
    blocks += incomplete_rounds(one)
    blocks += [Text(f"{name}: {why}; it is missing on this page.", "warning") for name, why in run.left_out.items()]
    unwritten = run.summary.unwritten if run.summary else {}
    blocks += [
        Text(f"{name} could not be written at the end of the run: {why}", "warning") for name, why in unwritten.items()
    ]
    return blocks


def _learning(one: Shown) -> list[Fact]:
    facts = []
    if (found := validation_change(one)) is not None:
        rounds = counted(len(one.run.rounds), "round")
        facts.append(_fact("validation reward", found, f"first and last of {rounds}"))
    if (found := reward_change(one)) is not None:
        facts.append(_fact("training reward", found, f"first and last {ENDS} updates"))
    return facts


def _fact(label: str, found: Change, what: str) -> Fact:
    sure = " (95 % interval)" if found.gain.half is not None else "; the spread was not recorded"
    return Fact(
        label,
        f"{number(found.before.mean)} → {number(found.after.mean)}",
        f"{signed(found.gain)}{sure}, {what}{found.over}",
    )


def _pace(one: Shown) -> list[Fact]:
    """Return the cost of the run, from its summary or, without one, from its last update."""
    run, summary = one.run, one.run.summary
    last: dict[str, Any] = run.updates[-1] if run.updates else {}
    wall = summary.wall_s if summary else finite(last.get("wall_s"))
    samples = summary.images if summary else finite(last.get("images"))
    facts = [Fact("time", seconds(wall), "after loading" if summary else "after loading, up to the last update")]
    if samples is not None and wall:
        rate = summary.images_per_s if summary else samples / wall  # the summary's omits samples of unrecorded time
        more = "" if one.run.setting("data.preferences") else "; rejected groups included, validation not"
        facts.append(Fact(_samples(one), f"{samples:,.0f}", f"{number(rate)} per second{more}"))
    if summary and wall and not one.is_emulated:  # emulated devices do not exist
        what = f"{summary.devices:g} accelerators, or CPUs without any; those of rewards included"
        facts.append(Fact("device-hours", number(summary.devices * wall / 3600), what))
    if summary and summary.cpu_s:
        of_roles = ", ".join(f"{role} {number(seconds)}" for role, seconds in summary.cpu_s.items())
        facts.append(Fact("CPU seconds", number(sum(summary.cpu_s.values())), f"start included; {of_roles}"))
    return facts


def _samples(one: Shown) -> str:
    """Name the training samples that a run counts: those of preference pairs are read, all others are generated."""
    return "samples read" if one.run.setting("data.preferences") else "generated samples"


def _endings(one: Shown) -> str:
    ended, trained = len(one.run.ledger), sum(line.event == "trained" for line in one.run.ledger)
    if not ended:
        return ""
    if trained == ended:
        return f"All of its {ended:,} groups were trained."
    left_out = groups_left_out(*ended_groups(one.run.ledger))
    return " ".join([f"{trained:,} of {ended:,} groups were trained.", *(f"{line}." for line in left_out)])


def _comparison(shown: Sequence[Shown]) -> Table:
    rows: list[list[Cell]] = []
    for one in shown:
        rewards, rounds = reward_change(one), validation_change(one)
        pace = {fact.label: fact.value for fact in _pace(one)}
        rows.append(
            [
                one.label,
                one.run.status,
                len(one.run.updates),
                *(
                    f"{number(found.before.mean)} → {number(found.after.mean)}{found.over}" if found else None
                    for found in (rounds, rewards)
                ),
                *(pace.get(name) for name in ("time", _samples(one), "device-hours")),
            ]
        )
    made = " or ".join(dict.fromkeys(map(_samples, shown)))
    columns = ["run", "status", "updates", "validation reward", "training reward", "time", made, "device-hours"]
    return Table("comparison", "", columns, rows, "Before and after; the ends of training reward are 5 updates.")


def _seeds(shown: Sequence[Shown]) -> list[tuple[str, str]]:
    """Return, for each recipe with several seeds, how many learned, and their mean gain with its interval."""
    said = []
    for runs in recipes_of(shown):
        rounds = [one for one in runs if validation_change(one) is not None]
        gains = [found.gain.mean for one in rounds if (found := validation_change(one)) is not None]
        average = estimate(gains)
        if average is None or average.half is None:
            continue
        name, learned = (
            runs[0].run.setting("run.name", "recipe"),
            sum(_learned(_decides(one)[1]) == LEARNED for one in runs),
        )
        title = f"{name} learned in {learned} of {seeds_of(runs)}: validation reward {_gain(average.mean)} on average"
        said.append((title, f"{name}: validation reward {signed(average)} over {seeds_of(rounds)} (95 % interval)."))
    return said


def _gain(value: float) -> str:
    return f"{'+' if value >= 0 else ''}{number(value)}"

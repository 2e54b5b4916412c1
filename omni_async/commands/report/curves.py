"""Draws the main results of a run: the reward of every update, and validation."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from omni_async.commands.report.blocks import Axis, Chart, Details, Section, Series, Text, series, thinning_note
from omni_async.commands.report.seeds import with_bands
from omni_async.commands.report.shown import Shown, axes, positions
from omni_async.types import finite

_MOST_NAMED = 5  # rounds
_MOST_PARTS = 64


def curves(shown: Sequence[Shown]) -> Section:
    """Return the section with curves of the reward, of its parts and of validation."""
    offline = any(one.run.setting("data.preferences") for one in shown)
    whole = [
        _validation(shown, "validation/reward", "Validation reward"),
        _preference(shown) if offline else _reward(shown),
        _teacher(shown),
    ]
    parts = [_validation(shown, key, f"Validation: {key.partition('/')[2]}") for key in _parts(shown)]
    drawn, parts = ([block for block in blocks if any(one.y for one in block.series)] for blocks in (whole, parts))
    if not drawn:
        return Section("curves", "Learning", blocks=[Text("There is no update yet.", tone="nothing")])
    folded = [Details("Parts of the validation reward", [*parts])] if parts else []
    return Section("curves", "Learning", blocks=[*drawn, *folded])


def _reward(shown: Sequence[Shown]) -> Chart:
    curves_ = with_bands(shown, lambda one: one.points("reward"))
    hint = (
        "Mean reward of the samples that each update was trained on; prompts differ from update to update, so it jumps."
    )
    return Chart("reward", "Training reward", hint, axes(), Axis("reward"), curves_, note=thinning_note(curves_))


def _teacher(shown: Sequence[Shown]) -> Chart:
    curves_ = with_bands(shown, lambda one: one.points("kl_teacher"))
    hint = "How far the policy is from the teacher at its own samples, per latent element, in the form of kl_form."
    return Chart("teacher", "KL to the teacher", hint, axes(), Axis("KL"), curves_, note=thinning_note(curves_))


def _preference(shown: Sequence[Shown]) -> Chart:
    curves_ = with_bands(shown, lambda one: one.points("accuracy"))
    hint = "Share of preference pairs in which the model already prefers the chosen image."
    y = Axis("pairs ordered right", low=0, high=1)
    return Chart("accuracy", "Preference accuracy", hint, axes(), y, curves_, note=thinning_note(curves_))


def _validation(shown: Sequence[Shown], key: str, title: str) -> Chart:
    curves_ = with_bands(shown, lambda one: round_curve(one, key))
    banded = any(one.low and not one.faint for one in curves_)
    several = any(one.faint for one in curves_)
    band = (
        " The band goes from the worst to the best seed."
        if several
        else " The band is the 95 % interval."
        if banded
        else ""
    )
    hint = f"Mean over the validation prompts, the same seeds in every round; update 0 is the untrained model.{band}"
    return Chart(
        key.replace("/", "-"),
        title,
        hint,
        axes(),
        Axis(key.partition("/")[2]),
        curves_,
        note=" ".join(filter(None, [_incomplete(shown), thinning_note(curves_)])),
    )


def _incomplete(shown: Sequence[Shown]) -> str:
    """Return a note that names the rounds whose mean omits unscored samples; empty if all are complete."""
    found = [
        f"{each.version} ({each.scored} of {each.asked}{f', {one.label}' if len(shown) > 1 else ''})"
        for one in shown
        for each in one.run.validation
        if each.is_incomplete
    ]
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    named = ", ".join(found[:_MOST_NAMED]) + more
    return f"Means over the samples that were scored; not comparable as they are: {named}." if found else ""


def _parts(shown: Sequence[Shown]) -> list[str]:
    """Return the parts of validation, except copies of the reward under another name."""
    keys: dict[str, None] = {}
    for one in shown:
        for line in one.run.rounds:
            same = line["validation/reward"]
            keys |= {key: None for key, value in line.items() if key.startswith("validation/") and value != same}
    return [key for key in keys if key != "validation/reward"][:_MOST_PARTS]


def round_curve(one: Shown, key: str) -> Series:
    """Return a number of every validation round, at the update and the time of its version.

    The reward has its 95 % interval as a band, if the rounds recorded their standard error."""
    at = {line["update"]: line for line in one.run.updates}
    lines = sorted((line for line in one.run.rounds if key in line), key=lambda line: line["update"])
    placed = [{"update": line["update"], "wall_s": at.get(line["update"], {}).get("wall_s", 0.0)} for line in lines]
    curve = series(one.label, positions(placed), [line[key] for line in lines], one.colour)
    errors = [finite(line.get("standard_error")) for line in lines]
    if key != "validation/reward" or None in errors or None in curve.y:
        return curve
    halves = [1.96 * (error or 0.0) for error in errors]
    low, high = ([(y or 0.0) + sign * half for y, half in zip(curve.y, halves, strict=True)] for sign in (-1, 1))
    return replace(curve, low=low, high=high)

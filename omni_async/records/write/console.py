"""Shows a run to a person or a pipe.

A pipe gets exactly one flushed line per update; a terminal gets a live display (live_console.py). Both, the final lines
and `omni-async status` format numbers by the functions here, so that a number has the same label everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TextIO, TypedDict

from omni_async.config.redact import one_line, redact_text
from omni_async.control.reasons import count, listed
from omni_async.control.rounds import Change, not_scored
from omni_async.records.write.summary import ValidationPoint


class UpdateView(TypedDict, total=False):
    """The displayed numbers of one update; unknown numbers are left out.

    `staleness` is a mean, `staleness_counts` maps staleness -> groups, `buffers` name -> (held, capacity), `busy` role
    -> fraction, `extra` further numbers by name, `left_out` "rejected" or "dropped" -> how many groups and why.
    `rate_unit`: the unit of `images_per_s`, `images/s` if it is left out."""

    update: int
    reward: float
    staleness: float
    staleness_counts: dict[int, int]
    images_per_s: float
    rate_unit: str
    buffers: dict[str, tuple[int, int]]
    busy: dict[str, float]
    extra: dict[str, float]
    left_out: dict[str, str]


class Console(Protocol):
    def phase(self, text: str) -> None:
        """Show the phase before the first update: `starting ray`, `loading engine`."""

    def update(self, view: UpdateView) -> None:
        """Show a finished update."""

    def validation(self, point: ValidationPoint) -> None:
        """Show a finished validation round."""

    def note(self, text: str) -> None:
        """Show a notice on a separate line."""

    def close(self, last_words: Sequence[str] = ()) -> None:
        """End the display and leave these lines below it, unwrapped.

        Later calls show nothing; a second `close` has no effect."""


class LineConsole:
    """Lines for pipes and log files: `update 12/120 reward 0.431 staleness 1.2 images/s 21.3 validation reward 0.520`.

    The line also counts groups that were not trained, with the reasons, if the counts have changed since the last line.
    When the reader closes the pipe (`| head`), output stops; the run continues."""

    def __init__(self, stream: TextIO, total_updates: int) -> None:
        self._stream = stream
        self._total = total_updates
        self._validation = ""
        self._left_out: dict[str, str] = {}
        self._closed = False

    def phase(self, text: str) -> None:
        self._line(text)

    def update(self, view: UpdateView) -> None:
        before, self._left_out = self._left_out, view.get("left_out", {})
        shown = {
            "reward": f"{view['reward']:.3f}" if "reward" in view else None,
            **{name: f"{value:.4g}" for name, value in view.get("extra", {}).items()},
            "staleness": f"{view['staleness']:.1f}" if "staleness" in view else None,
            "busy": " ".join(f"{role} {fraction:.0%}" for role, fraction in view.get("busy", {}).items()),
            view.get("rate_unit", "images/s"): f"{view['images_per_s']:.1f}" if "images_per_s" in view else None,
            "validation reward": self._validation,
            **{ending: text for ending, text in self._left_out.items() if before.get(ending) != text},
        }
        words = (f"{name} {text}" for name, text in shown.items() if text)
        self._line(" ".join([f"update {view.get('update', '?')}/{self._total}", *words]))

    def validation(self, point: ValidationPoint) -> None:
        self._validation = validation_reward(point)
        self._line(validated(point))

    def note(self, text: str) -> None:
        self._line(text)

    def close(self, last_words: Sequence[str] = ()) -> None:
        for line in last_words:
            self._write(indented(line))
        self._closed = True

    def _line(self, text: str) -> None:
        self._write(one_line(redact_text(" ".join(text.split()))))

    def _write(self, line: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the stream is closed
            self._closed = True


# ---- numbers for people ----------------------------------------------------------------------------------------------


def validated(point: ValidationPoint) -> str:
    """Format `validation of version 20: reward 0.412, ocr_exact 0.278`, and how many samples have no score and why."""
    numbers = {"reward": point.value, **point.parts}
    shown = ", ".join(f"{name} {number:.3f}" for name, number in numbers.items() if number is not None)
    left_out = not_scored(point.samples, point.asked, point.reasons)
    return f"validation of version {point.version}: {shown or 'no reward'}" + (f"; {left_out}" if left_out else "")


def validation_reward(point: ValidationPoint) -> str:
    """Format `0.412`, or `1.039 (1 of 2 samples)`; an empty text if there is no reward."""
    if point.value is None:
        return ""
    is_whole = point.asked is None or point.samples == point.asked
    return f"{point.value:.3f}" + ("" if is_whole else f" ({point.samples} of {point.asked} samples)")


_MOST_ROUNDS = 3  # listed rounds with unscored samples


def cpu_line(cpu_s: Mapping[str, float]) -> str:
    """Format role -> CPU seconds: `210 CPU s: rollout 101, reward 40, trainer 38, driver 20, ray 11`."""
    of_roles = ", ".join(f"{role} {seconds:.0f}" for role, seconds in cpu_s.items())
    return f"{sum(cpu_s.values()):.0f} CPU s: {of_roles}"


def validation_lines(points: Sequence[ValidationPoint], change: Change | None) -> list[str]:
    """Format the change from the first to the last round, then the rounds with samples that have no score.

    Example: `validation of versions 0 to 100 (6 rounds): reward 0.412 -> 0.903, ocr_exact 0.278 -> 0.900`.

    Args:
        points: the rounds by version, at least one.
        change: compares the first and the last round over the samples scored in both; None: they are not comparable, or
            it was not recorded."""
    with_reward = [one for one in points if one.value is not None]
    if len(with_reward) < 2:
        return [validated(one) for one in points[-_MOST_ROUNDS:]]
    first, last = with_reward[0], with_reward[-1]
    title = f"validation of versions {first.version} to {last.version} ({len(points)} rounds)"
    if change is None and _are_known(first, last):
        why = "not comparable: no sample has a score in both, or their prompts, noise, sampling or scorers differ"
        return [f"{title}: {why}", validated(first), validated(last)]
    numbers, over = (_as_recorded(first, last), "") if change is None else (change.numbers, change.over)
    changes = ", ".join(f"{name} {before:.3f} -> {after:.3f}" for name, (before, after) in numbers.items())
    incomplete = [(one, text) for one in points if (text := not_scored(one.samples, one.asked, one.reasons))]
    lines = [f"  version {one.version}: {text}" for one, text in incomplete[-_MOST_ROUNDS:]]
    if more := len(incomplete) - len(lines):
        lines.insert(0, f"  {more} earlier round{'s' * (more != 1)} with samples that were not scored")
    return [f"{title}: {changes}{over}", *lines]


def _are_known(*points: ValidationPoint) -> bool:
    return all(point.asked is not None for point in points)


def _as_recorded(first: ValidationPoint, last: ValidationPoint) -> dict[str, tuple[float, float]]:
    """Return the means of two rounds that did not record which samples were scored."""
    before, after = ({"reward": one.value, **one.parts} for one in (first, last))
    return {
        name: (value, other)
        for name, value in before.items()
        if value is not None and (other := after.get(name)) is not None
    }


def counts_left_out(
    counts: Mapping[str, int], rejected: Mapping[str, int], dropped: Mapping[str, int]
) -> dict[str, str]:
    """Format `{"dropped": "2: generation failed: ..."}`, without endings that no group has. Takes short reasons."""
    why = {"rejected": rejected, "dropped": dropped}
    return {
        event: f"{counts[event]}" + (f": {listed(reasons)}" if reasons else "")
        for event, reasons in why.items()
        if counts[event]
    }


def groups_left_out(
    counts: Mapping[str, int], rejected: Mapping[str, int], dropped: Mapping[str, int] | None
) -> list[str]:
    """Format `2 of 5 groups were dropped: generation failed: ...`, a line per ending; empty if all were trained.

    Args:
        counts: groups by ending, and all `admitted` groups.
        rejected: reasons of rejected groups -> their number.
        dropped: reasons of dropped groups; None: an earlier version recorded them in `rejected`."""
    why = {"rejected": rejected, "dropped": dropped or {}}
    ended = [event for event in why if counts[event]]
    if dropped is None or sum(rejected.values()) > counts["rejected"]:  # a reason's ending is unknown
        together = Counter(rejected) + Counter(dropped or {})
        if len(ended) > 1:
            lines = [_ended(counts[event], counts["admitted"], event, {}) for event in ended]
            return [*lines, f"groups were rejected or dropped because: {listed(count(together))}"]
        why = dict.fromkeys(why, together)
    return [_ended(counts[event], counts["admitted"], event, why[event]) for event in ended]


def _ended(number: int, admitted: int, how: str, why: Mapping[str, int]) -> str:
    reasons = listed(count(why))
    return f"{number} of {admitted} groups {'was' if number == 1 else 'were'} {how}" + (f": {reasons}" * bool(reasons))


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows with equal numbers of cells as aligned columns."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def staleness(mean: float, counts: Mapping[int, int]) -> str:
    """Format `1.2 updates on average: 3 groups are 1 update old, 1 is 2`. `counts`: staleness in updates -> groups."""
    said: list[str] = []
    for age, groups in sorted(counts.items()):
        noun, unit = ("", "") if said else (" group" + "s" * (groups != 1), " update" + "s" * (age != 1) + " old")
        said.append(f"{groups}{noun} {'is' if groups == 1 else 'are'} {age}{unit}")
    average = f"{mean:.1f} updates on average"
    return f"{average}: {', '.join(said)}" if said else average


def indented(line: str) -> str:
    """Return the line as `one_line` does, with its leading spaces."""
    return " " * (len(line) - len(line.lstrip(" "))) + one_line(line)


def duration(seconds: float) -> str:
    """Format seconds to two units: `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    for unit, size, smaller, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"

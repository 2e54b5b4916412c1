"""Records a run for the driver.

Turns the coordinator's events into console lines, metrics, sample files, a timeline and a summary.

An attempt here is one process of the command, as listed in `attempts.jsonl`. A resumed attempt changes nothing in the
run's folder until it has an update to record; its output is held in memory until then.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from omni_async.aio.clock import Clock
from omni_async.checkpoint.statement import Change
from omni_async.config import Config
from omni_async.config.draws import rate_unit
from omni_async.config.redact import redact_text
from omni_async.config.role_table import WORKING
from omni_async.config.schedule import num_existing_devices
from omni_async.control.control_state import ControlState
from omni_async.control.events import RunEvent
from omni_async.control.rounds import NotComparable, Round, compare, first_and_last
from omni_async.records.read.rounds import line_of
from omni_async.records.write.activity import Activity, busy_fractions
from omni_async.records.write.attempts import Fault
from omni_async.records.write.console import Console, UpdateView, counts_left_out
from omni_async.records.write.devices import Device, RunDevices, UsedDevice, device_metrics
from omni_async.records.write.rundir import RunDirectory, append_jsonl
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.span_log import SpanLog
from omni_async.records.write.stages import FirstSamples, StageSeconds
from omni_async.records.write.summary import Counters, Status, Summary, ValidationPoint, read_ending, summarise
from omni_async.records.write.vanishing import GradientWatch
from omni_async.runtime.cluster import RunControl
from omni_async.runtime.driver.sample_files import SampleFiles
from omni_async.runtime.driver.update_numbers import update_numbers
from omni_async.store import ObjectStore

# Window of the console's figures: recent enough to follow a change, long enough to be steady.
_RECENT_S = 30.0
# Numbers of updates for the estimate of the time left and for the recent reward.
_PACE, _RECENT = 20, 5
_ADMISSION = ("admission/reserve_s", "admission/starved_s")
_SHOWN = ("accuracy", "margin", "kl_teacher", "grad_norm", "clip_fraction")


class Observer:
    """The record of one run. `watch` runs until the last event; `summary` then describes the run's outcome.

    `start`: this process continues from this state. `owns`: whether the folder belongs to this attempt already,
    and no longer to an earlier one. `changes`: the differences between this attempt's recipe and the checkpoint's."""

    def __init__(
        self,
        config: Config,
        run: RunDirectory,
        console: Console,
        sinks: Sinks,
        clock: Clock,
        start: ControlState | None = None,
        owns: bool = True,
        changes: Sequence[Change] = (),
    ) -> None:
        self._config = config
        self._run = run
        self._console, self.tell = console, console.note
        self._sinks = sinks
        self._clock = clock
        self._roles = (*WORKING, *(role.name for role in config.roles))
        self.owns = owns
        self.has_something = owns  # whether there is anything to record, even if recording it failed
        self.made = 0  # updates of this attempt, including updates lost later
        self._held_rounds: list[tuple[Round, float | None]] = []
        self._untaken: deque[RunEvent] = deque()
        self._samples = SampleFiles(run, sinks, console.note)
        if self.owns:
            self._samples.may_save.set()
        self.spans = SpanLog(run.spans, _RECENT_S, held=not self.owns)
        self._stages, self._first = StageSeconds(), FirstSamples(console.phase, config.scored)
        start = start or ControlState()
        self._changes = start.version, tuple(changes)
        self._wall_before = 0.0 if owns else run.wall_s(start.version)
        self._untimed_images = 0 if self._wall_before else start.images
        self.started = clock.now()
        self._activity = Activity((self.started, math.inf))
        self._paces: deque[tuple[float, int]] = deque(maxlen=_PACE + 1)  # (time, version) of this attempt's updates
        self.faults: list[Fault] = []
        self.on_lost: Callable[[str, str], None] = lambda name, reason: None
        self.on_closing: Callable[[], None] = lambda: None
        self.on_line: Callable[[dict[str, Any]], None] = lambda line: None
        self.sampled: Callable[[], list[tuple[str, str, list[Device]]]] = list
        self._devices = RunDevices()
        self._go_on_from(start)

    def recall(self, start: ControlState) -> None:
        """Reset to the state of the run in the checkpoint.

        All spans and faults of this process are kept. Held validation rounds are discarded and run again."""
        self._go_on_from(start)
        if self.owns:
            self._sinks.begin(start.version)

    def _go_on_from(self, start: ControlState) -> None:
        self.closing = asyncio.Event()
        self.ended: dict[str, Any] | None = None
        self._told: dict[str, Any] | None = None  # a role's last phase, such as a scorer that is down
        self._held_rounds.clear()
        self._start, ledger = start, start.ledger
        self._paces.clear()
        self.version = start.version  # the last update, of another run if this one started from it
        self._latest: dict[str, float] = {}  # numbers of the newest update
        self._gradients = GradientWatch()
        self._finished = [(self._clock.now(), start.images)]
        self._staleness = Counter(ledger.staleness)
        events = {"trained": 0, "rejected": 0, "dropped": 0, **ledger.events}
        # Reported by the summary if the coordinator is lost before its last event.
        conservation = {**events, "admitted": ledger.lines, "live": 0}
        why = {"reasons": ledger.reasons, "drop_reasons": ledger.drop_reasons}
        self._last: dict[str, Any] = {"conservation": conservation, "images": start.images, **why}
        self._rewards = [math.nan if reward is None else reward for reward in start.rewards]  # null: not finite
        self._rounds = [*start.rounds]
        updates = range(start.version - len(start.rewards) + 1, start.version + 1)
        if (gaps := self._run.metrics_gaps(updates, [one.version for one in start.rounds])) is not None:
            self._console.note(
                f"warning: {self._run.metrics} {gaps}; the run continues and its summary is right, but pages made from"
                " that file are incomplete"
            )

    def take_over(self) -> None:
        """Take ownership of the folder and the trackers' run, and write the held records: there is something to record.

        Raises RunDirectoryError if that fails."""
        if self.owns:
            return
        self.has_something = True
        self._run.take_over(self._config, self._start.version, self._start.validated)
        self._run.append_changes(*self._changes)
        self.owns = True
        self.spans.begin_file()
        self._sinks.begin(self._start.version)
        for fault in self.faults:
            append_jsonl(self._run.faults, fault)
        held, self._held_rounds = self._held_rounds, []
        for finished, error in held:
            self._log_round(finished, error)
        self._samples.may_save.set()

    def fault(self, fault: Fault) -> None:
        """Record that a part was lost and is back; credentials in the reason are masked."""
        fault = replace(fault, reason=redact_text(fault.reason))
        self.faults.append(fault)
        if self.owns:
            append_jsonl(self._run.faults, fault)

    async def watch(self, coordinator: RunControl, store: ObjectStore) -> None:
        """Handle events until the coordinator has no more. Separate tasks write the sample files."""
        concluded = False
        while not concluded:
            self._untaken.extend(await coordinator.events())
            while self._untaken:
                event = self._untaken.popleft()
                self._handle(event, store)
                concluded |= event.kind == "concluded"  # a role that was given up may still report spans

    async def count(self, coordinator: RunControl) -> None:
        """Count updates until the coordinator has no more events, after `watch` failed.

        The summary thus counts all updates of the ledger, although nothing more is recorded about them, for example
        because a file cannot grow."""
        concluded = False
        while not concluded:
            for event in [*self._untaken, *await coordinator.events()]:
                concluded |= event.kind == "concluded"
                if event.kind == "update" and self.owns:
                    self._counted(event.data)
                elif event.kind == "ended":
                    self.ended = event.data
            self._untaken.clear()

    async def samples_written(self, seconds: float) -> None:
        """Wait until the sample files in progress are written, `seconds` at most.

        Discard them if the attempt has nothing else to record."""
        await self._samples.finish(seconds, keep=self._samples.may_save.is_set())

    def _handle(self, event: RunEvent, store: ObjectStore) -> None:
        match event.kind:
            case "phase":
                self._told = {"at": self._clock.now(), "text": event.data["text"]}
                self._console.phase(event.data["text"])
            case "spans":
                self.spans.add(event.data["spans"])
                self._activity.add(event.data["spans"])
                self._stages.add(event.data["spans"])
                if not self._paces:  # spans arrive a second late, perhaps after the first update
                    self._first.add(event.data["spans"])
            case "update":
                self._update(event.data)
            case "validation":
                self._validated(event.data)
            case "lost":
                self.on_lost(event.data["name"], event.data["reason"])
            case "closing":
                self.closing.set()
                self.on_closing()
            case "ended":
                self.ended = event.data
                if event.data["status"] == "done" and (
                    self._held_rounds or self.faults or read_ending(self._run.summary)[0] != "done"
                ):
                    self.take_over()  # no update was left to make, but the run was not done
        if event.shown:
            self._samples.draw(event, store)

    def _update(self, data: dict[str, Any]) -> None:
        self.take_over()
        version = data["version"]
        self._counted(data)
        self._finished.append((data["finished"], data["images"]))
        if not self._paces:
            self._paces.append((data["started"], version - 1))
        self._paces.append((data["finished"], version))
        while len(self._finished) > 2 and self._finished[1][0] < data["finished"] - _RECENT_S:
            del self._finished[0]
        rate = self._images_per_s(data["finished"])
        busy = self._recently_busy()
        numbers = update_numbers(
            self._config,
            data,
            images_per_s=rate,
            wall_s=self.wall_s(self._clock.now()),
            stages=self._stages.take(),
            busy={role: shares["busy"] for role, shares in busy.items()},
            devices=device_metrics(self.devices()),
        )
        more = {name: data[name] for name in ("finished", "conservation")}
        self._record(version, {**numbers, **more})
        self._sinks.metrics(numbers, version)
        self._latest = numbers
        if (warning := self._gradients.take(version, data["metrics"])) is not None:
            self._console.note(warning)
        self._show(version, numbers, data, busy)

    def _record(self, version: int, line: dict[str, Any]) -> None:
        self._run.append_metrics(version, line)
        self.on_line({"update": version, **line})

    def _counted(self, data: dict[str, Any]) -> None:
        self.made += 1
        self._last = {name: data[name] for name in ("conservation", "images", "reasons", "drop_reasons")}
        self._rewards.append(data["reward"])
        self._staleness.update(data["staleness"])
        self.version = data["version"]

    def _show(
        self, version: int, numbers: dict[str, float], data: dict[str, Any], busy: dict[str, dict[str, float]]
    ) -> None:
        buffers, slots = data["buffers"], data["buffers"]["slots"]
        held = {name: (buffers[name]["reserved"], buffers[name]["capacity"]) for name in ("trajectories", "replay")}
        # In preference pairs the chosen sample always earns 1 and the other 0, so that is no reward to watch.
        reward: UpdateView = {"reward": numbers["reward"]} if self._config.scored else {}
        self._console.update(
            {
                "update": version,
                **reward,
                "staleness": numbers["staleness/mean"],
                "staleness_counts": dict(sorted(Counter(data["staleness"]).items())),
                "images_per_s": numbers["images_per_s"],
                "rate_unit": rate_unit(self._config.rollout.engine),
                "buffers": {"slots": (slots["live"] + slots["awaiting_publication"], slots["capacity"]), **held},
                "busy": {role: busy[role]["busy"] for role in self._roles if role in busy},
                "extra": {name: data["metrics"][name] for name in _SHOWN if name in data["metrics"]},
                "left_out": counts_left_out(data["conservation"], data["reasons"], data["drop_reasons"]),
            }
        )

    def devices(self) -> list[UsedDevice]:
        """Return the accelerators of the run, as last read; empty if it uses none."""
        return self._devices.of(self.sampled())

    def progress(self) -> dict[str, Any]:
        """Return the progress of the run, for `omni-async status`.

        `reward` is the mean of the last 5 updates; staleness and images_per_s are those of the newest update. `eta_s`
        follows from the pace of this attempt's last 20 updates; it is None before the first. `told`: the last phase
        that a role reported."""
        eta = None
        if self._paces:
            (since, first), (until, last) = self._paces[0], self._paces[-1]
            eta = (self._config.trainer.updates - last) * (until - since) / (last - first)
        rewards = self._rewards[-_RECENT:] if self._config.scored else []
        newest = max(self._rounds, key=lambda one: one.version, default=None)
        return {
            "update": self.version,
            "updates": self._config.trainer.updates,
            "eta_s": eta,
            "reward": sum(rewards) / len(rewards) if rewards else None,
            **{name: self._latest.get(name) for name in ("staleness/mean", "staleness/max", "images_per_s")},
            **{name: self._latest[name] for name in (*_SHOWN, *_ADMISSION) if name in self._latest},
            "rate_unit": rate_unit(self._config.rollout.engine),
            "validation": None if newest is None else msgspec.to_builtins(ValidationPoint.of(newest)),
            "told": self._told,
        }

    def wall_s(self, now: float) -> float:
        """Return the seconds since all roles were up, plus the seconds of earlier attempts."""
        return self._wall_before + max(0.0, now - self.started)

    def _images_per_s(self, now: float) -> float:
        """Return the rate over the recent past, or since the start of the run while that is shorter."""
        before = [point for point in self._finished if point[0] < now - _RECENT_S]
        earlier = before[-1] if before else (self.started, self._start.images)
        seconds = now - earlier[0]
        return (self._finished[-1][1] - earlier[1]) / seconds if seconds > 0 else 0.0

    def _recently_busy(self) -> dict[str, dict[str, float]]:
        now = self._clock.now()
        start = max(self.started, now - _RECENT_S)
        return busy_fractions(Activity((start, math.inf), self.spans.recent(start)), now)

    def _validated(self, data: dict[str, Any]) -> None:
        finished = msgspec.convert(data["round"], Round)
        self._rounds.append(finished)
        self._console.validation(ValidationPoint.of(finished))
        if self.owns:
            self._log_round(finished, data["standard_error"])
        else:
            self._held_rounds.append((finished, data["standard_error"]))

    def _log_round(self, finished: Round, error: float | None) -> None:
        means = {f"validation/{name}": value for name, value in {"reward": finished.reward, **finished.parts}.items()}
        counts = {"not_scored": (finished.asked or 0) - (finished.scored or 0), **self._gain(finished)}
        self._record(finished.version, line_of(finished, means, {**counts, "standard_error": error}))
        self._sinks.metrics({name: one for name, one in (means | counts).items() if one is not None}, finished.version)
        if left_out := finished.left_out:
            self._sinks.remark("not_scored", f"version {finished.version}: {left_out}", finished.version)

    def _gain(self, finished: Round) -> dict[str, float]:
        """Return the gain in reward since the first round, over the samples scored in both rounds."""
        ends = first_and_last(one for one in self._rounds if one.version <= finished.version)
        try:
            change = None if ends is None or ends[1] != finished else compare(*ends)
        except NotComparable:
            return {}
        return {} if change is None else {"validation_gain": change.reward[1] - change.reward[0]}

    def summary(
        self,
        status: Status,
        reason: str | None,
        peak_memory: int | None,
        finished: float,
        cpu_s: Mapping[str, float] | None = None,
    ) -> Summary:
        """Return the summary of the run.

        Args:
            status: how it ended.
            reason: why, in one line; None if it is done.
            peak_memory: bytes of all processes; None if that was not sampled.
            finished: when the last role ended, in seconds of the clock.
            cpu_s: role -> CPU seconds."""
        ended = self.ended or self._last
        summary = summarise(
            run=self._run.run_id,
            status=status,
            reason=reason,
            started=self.started,
            finished=finished,
            images=ended["images"],
            rewards=self._rewards,
            staleness=self._staleness.elements(),
            counters=Counters(**ended["conservation"]),
            activity=self._activity,
            devices=num_existing_devices(self._config),
            reject_reasons=ended.get("reasons"),
            drop_reasons=ended.get("drop_reasons"),
            rounds=self._rounds,
            peak_memory_bytes=peak_memory,
            cpu_s=cpu_s,
            wall_before=self._wall_before,
            untimed_images=self._untimed_images,
            faults=len(self.faults),
        )
        if not self._config.scored:
            summary = msgspec.structs.replace(summary, first_reward=None, last_reward=None)
        return summary

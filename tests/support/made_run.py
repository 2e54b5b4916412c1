"""Writes the folder of a fictitious run, with the writers of real runs, with any number of groups and engines."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_async.records.write.ledger_file import JsonlSink
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.span_log import SpanLog
from omni_async.records.write.timeline import write_trace
from omni_async.types import LedgerEntry, Span

ORIGIN = 1_800_000_000.0
_STEPS = 10
_METRICS = ("loss", "grad_norm", "approx_kl", "ess", "masked", "clip_fraction", "engine_mismatch_nats", "advantage_abs")


@dataclass
class MadeRun:
    """The contents of the folder: `samples` of a group, `per_update` groups, and seconds between updates."""

    groups: int
    engines: int = 2
    scorers: int = 1
    samples: int = 4
    per_update: int = 10
    period_s: float = 4.0
    many_metrics: int = 20
    seed: int = 0
    first: int = 0
    rng: random.Random = field(default_factory=random.Random)

    @property
    def updates(self) -> int:
        return self.groups // self.per_update

    def entry(self, group: int) -> LedgerEntry:
        update = group // self.per_update
        rejected = group % 17 == 3
        return LedgerEntry(
            run="made",
            group=group,
            prompt=group % 97,
            event="rejected" if rejected else "trained",
            reason="zero reward variance" if rejected else None,
            admitted_version=max(0, update - 2),
            trained_version=None if rejected else update + 1,
            staleness=None if rejected else update - max(0, update - 1),
            step_versions=(max(0, update - 1), update),
            attempts=1,
            reward=0.5 + 0.1 * self.rng.random(),
            text=f"prompt {group % 97}",
        )

    def metrics(self, update: int) -> dict[str, Any]:
        noise = self.rng.random
        numbers = {name: noise() for name in _METRICS} | {f"detail/{n}": noise() for n in range(self.many_metrics)}
        groups = update * self.per_update
        return {
            "reward": 0.5 + 0.1 * noise(),
            "staleness/mean": 1.0,
            "staleness/max": 2,
            "admission/reserve_s": 0.5,
            "admission/starved_s": 0.0,
            "images": groups * self.samples,
            "images_per_s": self.per_update * self.samples / self.period_s,
            "update_s": self.period_s,
            "wall_s": update * self.period_s,
            **numbers,
            "busy/rollout": 0.9,
            "busy/reward": 0.4,
            "busy/trainer": 0.6,
            "buffers/trajectories": 12,
            "buffers/replay": 6,
            "finished": ORIGIN + update * self.period_s,
            "conservation": {"admitted": groups, "trained": groups, "rejected": 0, "dropped": 0, "live": 0},
        }

    def spans(self, group: int) -> Iterator[Span]:
        """Yield the spans of one group, from its samples to its training."""
        update = group // self.per_update
        begin = ORIGIN + group * self.period_s / self.per_update
        engine = f"rollout-{group % self.engines}"
        drawn = 0.5 * self.period_s
        for sample in range(self.samples):
            args: dict[str, Any] = {"sample": f"g{group}.s{sample}", "versions": f"{max(0, update - 1)}..{update}"}
            args |= {"version_steps": [[max(0, update - 1), 6], [update, _STEPS - 6]], "trajectory_bytes": 20_000}
            yield Span(engine, "generate", begin + 0.01 * sample, begin + drawn + 0.01 * sample, args)
        scored = begin + drawn + 0.1
        scorer = f"reward-{group % self.scorers}"
        score = {"samples": self.samples, "scorer": "made", "prompts": [group % 97]}
        yield Span(scorer, "score", scored, scored + 0.2, score)
        train = scored + 0.3
        yield Span(
            "trainer",
            "train",
            train,
            train + 0.25 * self.period_s / self.per_update,
            {"version": update, "group": group},
        )
        if group % self.per_update == 0:
            yield Span("trainer", "starved", train - 0.1, train, {})
            yield Span("publisher", "publish", train, train + 0.3, {"version": update, "megabytes": 2.5})

    def write(self, folder: Path, over: bool = False) -> RunDirectory:
        """Write the lines of groups from `first` to `groups`; the folder may already contain earlier groups."""
        self.rng.seed(self.seed)
        folder.mkdir(parents=True, exist_ok=True)
        run = RunDirectory(folder)
        run.samples.mkdir(exist_ok=True)
        if not run.config_yaml.exists():
            run.config_yaml.write_text("run: {name: made}\n", encoding="utf-8")
        ledger = JsonlSink(run.ledger)
        log = SpanLog(run.spans, keep_s=0.0, held=self.first > 0)
        spans: list[Span] = []
        for group in range(self.first, self.groups):
            ledger(self.entry(group))
            spans += self.spans(group)
            if (group + 1) % self.per_update == 0:
                update = (group + 1) // self.per_update
                run.append_metrics(update, self.metrics(update))
                if update % 10 == 0:
                    run.append_metrics(update, {"validation/reward": 0.5, "validation/made": 0.5})
                self._log(log, run, spans)
                spans = []
        self._log(log, run, spans)
        if over:
            write_trace(run.trace, log)
            log.remove_file()
        return run

    def _log(self, log: SpanLog, run: RunDirectory, spans: list[Span]) -> None:
        ordered = sorted(spans, key=lambda span: span.end)
        if self.first == 0:
            log.add(ordered)
            return
        with run.spans.open("ab") as file:  # a log would overwrite its file
            file.write(log._encoder.encode_lines(ordered))

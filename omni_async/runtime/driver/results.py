"""Writes the results of a run when it ends.

The summary comes first. Every file is written separately, so a failed write does not cost the others.

An attempt of the command that has nothing to record leaves the results of earlier attempts unchanged: it only adds its
line to `attempts.jsonl`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config.writing import write_atomic
from omni_async.performance.measure import measure
from omni_async.performance.profile import encode_profile, is_empty
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.rundir import RunDirectory, append_jsonl
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.span_log import SpanLog
from omni_async.records.write.summary import Summary, write_summary
from omni_async.records.write.timeline import write_trace
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.driver.observer import Observer

logger = logging.getLogger(__name__)

# Spans of a profile, which are in memory at once: about 90 MB.
MOST_MEASURED = 100_000
# Seconds for the trackers, when the run leaves at once and when it ends in order.
_SOON_S = 3.0
_IN_ORDER_S = 60.0


@dataclass(eq=False)
class Results:
    """The files written into `run` at its end. `at_once`: only files that take no time."""

    run: RunDirectory
    inputs: RunInputs
    sinks: Sinks
    at_once: bool
    _unwritten: dict[str, str] = field(default_factory=dict, init=False)

    def write(self, observer: Observer, summary: Summary, attempt: Attempt) -> Summary:
        """Write all results.

        Args:
            observer: of this attempt of the command; unless it owns the run's files, only `attempt` is written.
            summary: of the run.
            attempt: the line for `attempts.jsonl`.

        Returns:
            The summary as it is then on disk, with the files that could not be written."""
        path = self.run.summary
        if observer.owns and not self._try_to_write(path, lambda: write_summary(path, summary)):
            self._remove(lambda: observer.spans.give_room(MOST_MEASURED))
            self._try_to_write(path, lambda: write_summary(path, summary))
        self._try_to_write(self.run.attempts, lambda: append_jsonl(self.run.attempts, attempt))
        if observer.owns and not self.at_once:
            self._write_from_spans(observer, summary)
        if observer.owns and self._unwritten:
            summary = replace(summary, unwritten={**self._unwritten})
            self._try_to_write(path, lambda: write_summary(path, summary))
        if observer.owns and path.name not in self._unwritten:
            self._remove(lambda: self.run.former_summary.unlink(missing_ok=True))
        self._end_tracking(observer, summary)
        return replace(summary, unwritten=self._unwritten)

    def _write_from_spans(self, observer: Observer, summary: Summary) -> None:
        """Write the profile and the timeline; an attempt that made updates replaces the files of an earlier attempt."""
        run, spans = self.run, observer.spans
        if observer.made:
            self._try_to_write(run.profile, lambda: self._write_profile(summary, spans))
        if observer.made or not run.trace.exists():
            self._try_to_write(run.trace, lambda: write_trace(run.trace, spans))
        if run.trace.name not in self._unwritten:
            self._remove(spans.remove_file)

    def _write_profile(self, summary: Summary, spans: SpanLog) -> None:
        replayed = self.inputs.profile
        how = f", on emulated devices that replayed {replayed.name}" if replayed else ""
        part = f", its newest {MOST_MEASURED:,} of {len(spans):,} spans" if len(spans) > MOST_MEASURED else ""
        source = f"run {summary.run}, {summary.updates} update{'s' * (summary.updates != 1)}{how}{part}"
        config, newest = self.inputs.config, spans.newest(MOST_MEASURED)
        profile = measure(newest, config, samples_per_rank=samples_per_rank(config), name=summary.run, source=source)
        if not is_empty(profile):
            write_atomic(self.run.profile, encode_profile(profile))

    def _remove(self, remove: Callable[[], None]) -> None:
        """Remove a file that is not needed any more. If that fails, log a warning; the file does no harm."""
        try:
            remove()
        except OSError as error:
            logger.warning("%s cannot be removed: %s", error.filename, error.strerror or error)

    def _try_to_write(self, path: Path, write: Callable[[], None]) -> bool:
        """Write a file and return whether that succeeded."""
        self._unwritten.pop(path.name, None)
        try:
            write()
        except KeyboardInterrupt:
            self._unwritten[path.name] = "skipped on Ctrl-C"
        except Exception as error:  # noqa: BLE001 (it is reported, and the other results are written)
            cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
            why = cause.strerror if isinstance(cause, OSError) else None
            self._unwritten[path.name] = why or f"{type(error).__name__}: {error}"
        return path.name not in self._unwritten

    def _end_tracking(self, observer: Observer, summary: Summary) -> None:
        """End the run in the trackers.

        An attempt with nothing to record never began there, and `finish` leaves the trackers' run unchanged."""
        run = self.run
        if observer.owns and not self.at_once:
            for path in (run.config_yaml, run.summary, run.profile, run.trace):
                if path.exists() and path.name not in self._unwritten:
                    self.sinks.artifact(path)
        self.sinks.finish(summary.status, _SOON_S if self.at_once else _IN_ORDER_S)

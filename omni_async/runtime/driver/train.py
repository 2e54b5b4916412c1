"""Takes one training run from a checked configuration to an exit code.

Starts a cluster, runs it to its end, records events.

Within one process a run makes one attempt after another, each on its own cluster. It ends when it is over or has lost a
part too often. If an attempt loses its trainer or its coordinator, the next one continues from the last checkpoint, in
the same folder, ledger and tracker runs. All of them are one attempt of the command: one line of `attempts.jsonl`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
from msgspec.structs import replace

from omni_async.aio.clock import WallClock
from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import Stopped, is_cancelled, unless
from omni_async.checkpoint.folders import newest_first
from omni_async.checkpoint.state import CheckpointError
from omni_async.config import Config, ConfigError
from omni_async.config.changed import changed
from omni_async.config.ray_cluster import cluster_address
from omni_async.config.redact import redact, redact_text
from omni_async.control.control_state import ControlState
from omni_async.records.read.next_steps import next_steps
from omni_async.records.write.attempts import Attempt, Fault
from omni_async.records.write.console import Console, groups_left_out, validation_lines
from omni_async.records.write.live_console import for_stream
from omni_async.records.write.logs import DRIVER, Consoles, LogConsole, log_path
from omni_async.records.write.memory import MemorySampler
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.sinks.base import About, SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.sinks.registry import enabled, open_sinks
from omni_async.records.write.summary import Summary
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.failures import told
from omni_async.rewards.functions import PASSED, passed
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.cluster import Cluster, PeerLost
from omni_async.runtime.driver.callbacks import Callback
from omni_async.runtime.driver.control_socket import ControlSocket
from omni_async.runtime.driver.observer import Observer
from omni_async.runtime.driver.results import Results
from omni_async.runtime.driver.session import Ending, Interruption, Session, describe, interrupts, listen
from omni_async.runtime.keeper import GaveUp, Restarts
from omni_async.runtime.preflight.resume import newest_of_run
from omni_async.runtime.start_times import WORKERS, StartTiming

logger = logging.getLogger(__name__)

EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 130}
_FROM_PYTHON = "only omni_async.train(..., reward=...) from Python"
# Seconds for a cluster to close, in a run that leaves at once.
_SOON_S = 5.0


def _passed_rewards(config: Config) -> list[str]:
    """Return the names of rewards that Python code passed, which have no import path."""
    scorers = config.reward.scorers if config.emulation is None else ()
    return [one.name for one in scorers if one.name.startswith(PASSED)]


def _pickled(config: Config, names: Sequence[str]) -> dict[str, bytes]:
    """Pickle rewards for workers in other processes. Raises ConfigError, one line, if one cannot be pickled."""
    if not names or config.run.runtime == "inprocess":
        return {}
    from omni_async.runtime.on_ray.local import prepare_driver

    prepare_driver()  # before Ray is imported
    from ray import cloudpickle

    pickled = {}
    for name in names:
        try:
            pickled[name] = cloudpickle.dumps(passed(name))
        except Exception as error:  # noqa: BLE001 (pickling runs foreign code)
            why = f"{told(error)}; create such objects inside the function, or set run.runtime=inprocess"
            raise ConfigError(f"reward: {name} cannot be pickled for the reward workers: {why}") from None
    return pickled


def build_cluster(inputs: RunInputs, run: RunDirectory, attempt: int) -> Cluster:
    """Build the cluster that `run.runtime` names; Ray is imported only for its own.

    Args:
        inputs: the inputs of the roles.
        run: the run's folder.
        attempt: number of this attempt in this process, from 1."""
    if inputs.config.run.runtime == "inprocess":
        from omni_async.runtime.inprocess import InProcessCluster

        return InProcessCluster(inputs, run)
    from omni_async.runtime.on_ray.local import prepare_driver

    prepare_driver()  # before Ray is imported
    from omni_async.runtime.on_ray.cluster import RayCluster

    return RayCluster(inputs, run, attempt)


def train(
    inputs: RunInputs,
    console: Console | None = None,
    callbacks: Sequence[Callback] = (),
    begun: Callable[[RunDirectory], object] = lambda run: None,
    timing: StartTiming | None = None,
) -> Summary:
    """Run to the end.

    Args:
        inputs: the checked recipe, with its data.
        console: shows the run; None: standard output.
        callbacks: called with every line of the metrics.
        begun: called with the run's folder once it exists.
        timing: shows the stages of the start.

    Raises:
        RunDirectoryError, SinkUnusableError, ConfigError: problems that only the cluster could detect, before anything
            is generated. Every other failure is in the summary's status and reason."""
    config, clock, names = inputs.config, WallClock(), _passed_rewards(inputs.config)
    inputs = dataclasses.replace(inputs, passed=_pickled(config, names))
    run = RunDirectory.create(config, clock) if inputs.run is None else RunDirectory.reopen(inputs.run)
    if inputs.run is None:
        run.append_changes(inputs.start.version, inputs.changes)
    elif inputs.untouched:
        _state_resumption(run, inputs.start)
    updates = config.trainer.updates
    log = LogConsole(log_path(run.logs, DRIVER), updates, clock)
    console = Consoles(console or for_stream(sys.stdout, updates, inputs.start.version), log)
    begun(run)
    console.phase(f"run {run.run_id}")
    for note in (*inputs.notes, *(f"{name} has no import path: {_FROM_PYTHON} resumes the run" for name in names)):
        console.phase(note)
    memory = MemorySampler()
    memory.start()
    try:
        return asyncio.run(_Run(inputs, run, console, memory, callbacks, timing or StartTiming()).to_its_end())
    finally:
        memory.stop()
        console.close()
        run.release()


class _Run:
    def __init__(
        self,
        inputs: RunInputs,
        run: RunDirectory,
        console: Console,
        memory: MemorySampler,
        callbacks: Sequence[Callback],
        timing: StartTiming,
    ) -> None:
        self._inputs, self._callbacks, self._timing = inputs, callbacks, timing
        timing.end("check")
        self._config = inputs.config
        self._run = run
        self._console = console
        self._memory = memory
        self._clock = WallClock()
        self._began = self._clock.now()
        self._restarts = Restarts(inputs.config.run.restarts, self._clock)
        self._opening: asyncio.Task[Sinks] | None = None
        self._sinks: Sinks | None = None
        self._observer: Observer | None = None

    async def to_its_end(self) -> Summary:
        async with interrupts(self._console.note) as interrupted:
            if enabled(self._config.tracking):
                self._opening = asyncio.create_task(in_daemon_thread(_open_sinks, self._inputs, self._run))
            async with ControlSocket(self._run.control) as control:
                control.stop = interrupted.request
                try:
                    ending = await unless(interrupted.at_once.wait(), self._attempts(interrupted, control))
                except Stopped:
                    ending = Ending(
                        "interrupted",
                        "at once, by a second Ctrl-C: no checkpoint was waited for, and there is no timeline",
                    )
            finished = self._clock.now()
            if isinstance(ending.cause, SinkUnusableError):
                raise ending.cause
            at_once = interrupted.at_once.is_set()
            observer = self._observer or self._observe(self._inputs)
            # A run that failed to start is recorded too.
            if observer.owns and self._sinks is None and self._opening is not None:
                with contextlib.suppress(SinkUnusableError, TimeoutError):
                    async with asyncio.timeout(_SOON_S if at_once else None):
                        self._sinks = await self._opening
            interrupted.release_ctrl_c()
            summary = self._write(ending, observer, finished, at_once)
            if isinstance(ending.cause, ConfigError):
                raise ending.cause  # its one line is the whole report
            return summary

    def _write(self, ending: Ending, observer: Observer, finished: float, at_once: bool) -> Summary:
        """Write the results of the run, and print the last lines about it."""
        results = Results(self._run, self._inputs, self._sinks or Sinks(), at_once)
        spans = results.spans_of(observer)
        summary = observer.summary(ending.status, ending.reason, self._memory.stop(), finished, spans)
        wall_s, start = observer.wall_s(finished if observer.owns else observer.started), self._inputs.start
        command_attempt = Attempt(
            self._began, self._clock.now(), summary.status, summary.reason, start.version, observer.version, wall_s
        )
        summary = results.write(observer, summary, spans, command_attempt)
        refused = isinstance(ending.cause, ConfigError)
        again = _FROM_PYTHON if _passed_rewards(self._config) else "the same command"
        self._console.close(() if refused else _farewell(self._run, observer, summary, self._sinks or Sinks(), again))
        return summary

    def _observe(self, inputs: RunInputs) -> Observer:
        """Create the observer.

        If the run is resumed, the folder belongs to an earlier process until there is something to record."""
        sinks, owns = self._sinks or Sinks(), not inputs.untouched
        changes = () if self._inputs.run is None else self._inputs.changes
        return Observer(self._config, self._run, self._console, sinks, self._clock, inputs.start, owns, changes)

    async def _attempts(self, interrupted: Interruption, control: ControlSocket) -> Ending:
        inputs, fault = self._inputs, None
        for attempt in count(1):
            ending = await self._attempt(inputs, attempt, interrupted, control, fault)
            if ending.lost is None or interrupted.is_set():
                return ending
            found = self._clock.now()
            interrupted.starting = "starting again"
            try:
                pause = self._restarts.pause("the run", ending.lost)
                inputs = await in_daemon_thread(self._from_last_checkpoint)
                if self._observer is not None:
                    self._observer.recall(inputs.start)
            except (GaveUp, OSError, CheckpointError) as error:
                return Ending("failed", str(error), error)
            version = inputs.start.version
            again = f"again from update {version}" if version else "again from the start"
            self._console.note(f"{ending.lost}; {again}" + (f" in {pause:g} s" if pause else ""))
            fault = Fault(found, ending.lost.partition(" ")[0], ending.lost, f"attempt {attempt + 1}, {again}", 0.0)
            try:
                await unless(interrupted.wait(), asyncio.sleep(pause))
            except Stopped:
                return Ending("interrupted", "before it was started again")
        raise AssertionError("unreachable")

    async def _attempt(
        self, inputs: RunInputs, attempt: int, interrupted: Interruption, control: ControlSocket, fault: Fault | None
    ) -> Ending:
        """Run one attempt, on its own cluster. `fault`: the loss that ended the previous attempt."""
        ending = Ending()
        cluster: Cluster | None = None
        try:
            on_ray = self._config.run.runtime == "ray"
            # Without Ray, building the roles imports the libraries of their models, which takes seconds.
            self._begin(control, interrupted, self._reaching() if on_ray else self._loading(inputs))
            building = in_daemon_thread(build_cluster, inputs, self._run, attempt)
            cluster = await unless(interrupted.wait(), building)
            cluster.tell = self._console.phase
            await unless(interrupted.wait(), cluster.connect())
            self._timing.end("Ray" if on_ray else "imports")
            listen(interrupted)
            if on_ray:
                self._begin(control, interrupted, self._loading(inputs))
            await unless(interrupted.wait(), cluster.start())
            self._timing.end(WORKERS)
            listen(interrupted)  # loading models, or libraries, may install signal handlers in this process
            await self._open_trackers(control, interrupted)
            self._timing.show("trackers", cluster.starts, self._console.note)
            interrupted.starting = None
            offline = self._config.data.preferences is not None
            self._console.phase("reading the first preference pairs" if offline else "generating the first samples")
            if self._observer is None:
                self._observer = self._observe(inputs)
            if fault is not None:
                self._observer.fault(msgspec.structs.replace(fault, seconds=self._clock.now() - fault.time))
            parts = self._config, cluster, self._observer
            session = Session(*parts, self._restarts, self._clock, self._callbacks)
            control.answer = session.answer
            ending = await session.run(interrupted)
        except Stopped:
            when = "before the first update" if attempt == 1 else "while it was being started again"
            ending.because("interrupted", when)
        except Exception as error:
            ending.because("failed", describe(error), error)
            hopeless = attempt == 1 or isinstance(error, SinkUnusableError | WrongScorer)
            if isinstance(error, PeerLost) or not hopeless:
                ending.lost = describe(error)
            logger.debug("the run failed", exc_info=error)
        finally:
            control.answer, control.doing = None, "ending"
            if cluster is not None:
                await _close_cluster(cluster, _SOON_S if is_cancelled() else None)
        return ending

    def _reaching(self) -> str:
        joined = cluster_address(self._config.run)
        return f"joining Ray at {joined.address}" if joined else "starting Ray"

    def _loading(self, inputs: RunInputs) -> str:
        if inputs.profile is not None:
            return "starting the emulated devices"
        engines = "engines, scorers" if self._config.scored else "engines"
        models = engines if self._config.data.preferences is None else "the encoders of the pairs"
        return f"loading {models} and the trainer (up to a minute)"

    async def _open_trackers(self, control: ControlSocket, interrupted: Interruption) -> None:
        if self._opening is None:
            return
        if not self._opening.done():
            self._begin(control, interrupted, "connecting to the trackers")
        self._sinks = await unless(interrupted.wait(), asyncio.shield(self._opening))
        for address in self._sinks.live:
            self._console.phase(address)

    def _begin(self, control: ControlSocket, interrupted: Interruption, text: str) -> None:
        """Show a step of the start, to `omni-async status` and after a signal as well."""
        control.doing = interrupted.starting = text
        self._console.phase(text)

    def _from_last_checkpoint(self) -> RunInputs:
        """Return inputs that continue from the newest checkpoint or, without one, from where this process began.

        Results after that checkpoint are void. Raises CheckpointError if no existing checkpoint can be used: starting
        over in this folder would remove them."""
        refused: list[str] = []
        point = newest_of_run(self._config, self._run.path, refused, self._inputs.contents)
        for note in refused:
            self._console.note(note)
        if point is None and refused:
            raise CheckpointError(f"{self._run.path} has no checkpoint to resume from; see the console for the reason")
        start = self._inputs.start if point is None else point.state.control
        resume = self._config.checkpoint.resume if point is None else str(point.folder)
        untouched = self._inputs.untouched and not (self._observer is not None and self._observer.owns)
        if untouched:
            _state_resumption(self._run, start)
        else:
            self._run.void_metrics(start.version, start.validated)
        config = replace(self._config, checkpoint=replace(self._config.checkpoint, resume=resume))
        return dataclasses.replace(self._inputs, config=config, start=start, run=self._run.path, untouched=untouched)


def _state_resumption(run: RunDirectory, start: ControlState) -> None:
    run.state_resumption(start.version, start.validated, start.ledger.lines)


def _open_sinks(inputs: RunInputs, run: RunDirectory) -> Sinks:
    config = inputs.config
    params, others = redact(msgspec.to_builtins(config)), redact(changed(config))
    about = About(run, params, others, inputs.family.name, goes_on=inputs.run is not None)
    return open_sinks(inputs.config.tracking, about, inputs.start.version)


async def _close_cluster(cluster: Cluster, seconds: float | None) -> None:
    """Close the cluster. `seconds`: how long a run that leaves at once waits for that."""
    try:
        async with asyncio.timeout(seconds):
            await cluster.close()
    except Exception as error:  # noqa: BLE001 (how the run ended is known, and failing here would lose that record)
        why = redact_text(str(error)) or (
            "it takes too long" if isinstance(error, TimeoutError) else type(error).__name__
        )
        logger.warning("the cluster was not closed: %s", why)


def _farewell(run: RunDirectory, observer: Observer, summary: Summary, sinks: Sinks, again: str) -> list[str]:
    """Return the last lines for the console: how the run ended, where its files are and what can be done with them.

    `again`: what resumes the run."""
    ended = summary.status + (f" {summary.reason}" if summary.reason else "")
    made = f"{summary.updates} update{'s' * (summary.updates != 1)}"
    lost = [f"  not written: {name} ({why})" for name, why in summary.unwritten.items()]
    if not observer.owns:
        nothing = f"this attempt made no update; {run.path} is as it was, with {made}"
        there = f"this attempt's updates are in the ledger and checkpoints of {run.path}, but not in its results"
        return [f"{ended}: {there if observer.has_something else nothing}", *lost]
    lines = [f"{ended}: {made} in {summary.wall_s:.0f} s after loading"]
    counts = msgspec.to_builtins(summary.counters)
    lines += groups_left_out(counts, summary.reject_reasons, summary.drop_reasons)
    if summary.validation:
        lines += validation_lines(summary.validation, summary.validation_change)
    names = ("samples", "metrics", "ledger", "logs", "summary", "profile", "timeline")
    paths = (run.samples, run.metrics, run.ledger, run.logs, run.summary, run.profile, run.trace)
    files = dict(zip(names, paths, strict=True))
    written = {name: any(path.iterdir()) if path.is_dir() else path.exists() for name, path in files.items()}
    lines += [f"  {name:<9} {path}" for name, path in files.items() if written[name]]
    if run.trace.exists():
        lines.append("            (open the timeline at https://ui.perfetto.dev)")
    lines += lost
    lines += [f"  {label:<9} {where}" for label, where in sinks.where]
    lines += next_steps(run)
    if summary.status != "done" and any(newest_first(run.checkpoints)):
        lines.append(f"{again} with checkpoint.resume=auto resumes it")
    return lines

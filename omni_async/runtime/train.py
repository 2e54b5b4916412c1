"""One training run, from a checked configuration to an exit code: brings a cluster up, supervises its roles, records what happens.

Whatever ends a run (done, a failure of any role, Ctrl-C), the same path closes it: the coordinator ends, the trainer leaves a checkpoint, the
rest of the events is taken, and trace, summary and MLflow are written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from omni_async.checkpoint.folders import newest_first
from omni_async.config import Config
from omni_async.control.clock import WallClock
from omni_async.control.supervisor import Supervisor, TaskFailed
from omni_async.performance.measure import measure
from omni_async.performance.profile import write_profile
from omni_async.runtime.cluster import Cluster
from omni_async.runtime.observer import Observer
from omni_async.runtime.preflight import RunInputs
from omni_async.tracking.console import Console, for_stream
from omni_async.tracking.memory import MemorySampler
from omni_async.tracking.mlflow_connect import MlflowUnusableError
from omni_async.tracking.mlflow_sink import MlflowSink
from omni_async.tracking.rundir import RunDirectory
from omni_async.tracking.summary import Status, Summary, write_summary
from omni_async.tracking.timeline import write_trace

logger = logging.getLogger(__name__)

# How long the coordinator gets to take the driver's last words and to tell the rest, and the last pictures to be drawn.
_LAST_EVENTS_S = 10.0
_PICTURES_S = 30.0
_LOADING = {
    "ray": "starting Ray; loading engines, scorers and the trainer (up to a minute)",
    "inprocess": "loading engines, scorers and the trainer",
}
EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 130}


@dataclass
class Ending:
    """How the run ended; the first cause stays."""

    status: Status = "done"
    reason: str | None = None
    cause: BaseException | None = field(default=None, repr=False)

    def because(self, status: Status, reason: str, cause: BaseException | None = None) -> None:
        if self.status == "done":
            self.status, self.reason, self.cause = status, reason, cause


def build_cluster(inputs: RunInputs, run: RunDirectory) -> Cluster:
    if inputs.config.run.runtime == "inprocess":
        from omni_async.runtime.inprocess import InProcessCluster

        return InProcessCluster(inputs, run)
    from omni_async.runtime.ray_cluster import RayCluster

    return RayCluster(inputs, run)


def train(inputs: RunInputs, console: Console | None = None) -> Summary:
    """Run to the end. Raises RunDirectoryError or MlflowUnusableError before anything is generated; every other failure is in the summary's
    status and reason."""
    config, clock = inputs.config, WallClock()
    start = inputs.start
    run = (
        RunDirectory.create(config, clock)
        if inputs.run is None
        else RunDirectory.reopen(inputs.run, config, start.version, start.validated)
    )
    console = console or for_stream(sys.stdout, config.trainer.updates)
    console.phase(f"run {run.run_id}")
    for note in inputs.notes:
        console.phase(note)
    memory = MemorySampler()
    memory.start()
    try:
        return asyncio.run(_train(inputs, run, console, memory))
    finally:
        memory.stop()
        console.close()


async def _train(inputs: RunInputs, run: RunDirectory, console: Console, memory: MemorySampler) -> Summary:
    config, clock = inputs.config, WallClock()
    ending = Ending()
    opening: asyncio.Task[MlflowSink] | None = None
    mlflow: MlflowSink | None = None
    observer: Observer | None = None
    cluster: Cluster | None = None
    async with _interrupts() as interrupted:
        try:
            if config.tracking.mlflow.enabled:
                opening = asyncio.create_task(asyncio.to_thread(_open_mlflow, config, run, inputs.run is not None))
            console.phase(_LOADING[config.run.runtime] if inputs.profile is None else "starting the emulated devices")
            cluster = await asyncio.to_thread(build_cluster, inputs, run)
            await _unless(interrupted, cluster.start())
            mlflow = await opening if opening else None
            console.phase("generating the first samples")
            observer = Observer(config, run, console, mlflow, clock)
            if inputs.run is not None:
                observer.recall(inputs.start.images, inputs.start.ledger.staleness)
            await _run(cluster, observer, interrupted, ending, config.run.closing_timeout_s)
        except Interrupted:
            ending.because("interrupted", "before the first update")
        except Exception as error:
            ending.because("failed", _describe(error), error)
            logger.debug("the run failed", exc_info=error)
        finished = clock.now()
        if cluster is not None:
            await cluster.close()
        if isinstance(ending.cause, MlflowUnusableError):
            raise ending.cause
        if opening is not None and mlflow is None:  # a run that failed to start is recorded too, where that is possible
            with contextlib.suppress(MlflowUnusableError):
                mlflow = await opening
    observer = observer or Observer(config, run, console, mlflow, clock)
    summary = observer.summary(ending.status, ending.reason, memory.stop(), finished)
    _write(run, inputs, observer, summary, mlflow)
    console.close(_farewell(run, summary, mlflow))
    return summary


async def _run(cluster: Cluster, observer: Observer, interrupted: asyncio.Event, ending: Ending, closing_s: float) -> None:
    """From the first sample until every role has finished."""
    coordinator, store = cluster.coordinator, cluster.store
    async with Supervisor() as services, Supervisor() as supervisor:
        watching = services.start("driver", observer.watch(coordinator, store))
        services.start("interrupts", _stop_when(interrupted, coordinator))
        for name, work in cluster.services().items():
            services.start(name, work)
        for name, work in cluster.work().items():
            supervisor.start(name, work)
        failure: TaskFailed | None = None
        try:
            await _first(services.wait(), supervisor.wait(), observer.closing.wait())
        except TaskFailed as error:
            failure = error
            with contextlib.suppress(Exception):  # the coordinator itself may be what failed, or does not answer
                async with asyncio.timeout(_LAST_EVENTS_S):
                    await coordinator.fail(_describe(error))
        unfinished = await _close_in_order(supervisor, closing_s)
        with contextlib.suppress(Exception):  # a coordinator that fails, or a driver that does, has nothing more to tell
            async with asyncio.timeout(_LAST_EVENTS_S):
                await coordinator.conclude()
                await watching
        await observer.pictures_drawn(_PICTURES_S)
        # The coordinator keeps the first failure it learned of; what breaks after that is a consequence.
        ended = observer.ended or {"status": "failed", "reason": "the coordinator never said how the run ended"}
        if observer.ended and ended["status"] == "failed":
            ending.because("failed", ended["reason"] or "failed", failure)
        if failure:
            ending.because("failed", _describe(failure), failure)
        if unfinished:
            ending.because("failed", unfinished)
        if ended["status"] != "done":
            ending.because(ended["status"], ended["reason"] or ended["status"])


async def _close_in_order(supervisor: Supervisor, seconds: float) -> str | None:
    """The roles see that the run is over; the trainer ends its update and writes its checkpoint. What went wrong with that, if anything."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            await supervisor.settle()
            await supervisor.wait()
    except Exception as error:  # noqa: BLE001 (the run is over; how closing it went is one more thing to tell)
        return (
            f"the roles were not done run.closing_timeout_s = {seconds:g} after the run was over"
            if deadline.expired()
            else _describe(error)
        )
    return None


class Interrupted(Exception):
    """Ctrl-C before there was anything to stop in order."""


@contextlib.asynccontextmanager
async def _interrupts() -> AsyncIterator[asyncio.Event]:
    """SIGINT and SIGTERM set the event; a second one falls through to Python's own handling."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def ring() -> None:
        event.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: nobody can interrupt us
            loop.add_signal_handler(number, ring)
    try:
        yield event
    finally:
        for number in signals:
            with contextlib.suppress(RuntimeError, ValueError):
                loop.remove_signal_handler(number)


async def _unless(interrupted: asyncio.Event, work: Any) -> None:
    """Do the work, or raise Interrupted."""
    task, interrupt = asyncio.ensure_future(work), asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({task, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Interrupted
        task.result()
    finally:
        interrupt.cancel()
        task.cancel()
        await asyncio.gather(task, interrupt, return_exceptions=True)


async def _stop_when(interrupted: asyncio.Event, coordinator: Any) -> None:
    await interrupted.wait()
    await coordinator.stop("by a signal")
    await asyncio.Event().wait()  # a service: it ends by being cancelled


async def _first(*works: Any) -> None:
    """Until the first of them is done; its exception is raised, the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _open_mlflow(config: Config, run: RunDirectory, goes_on: bool) -> MlflowSink:
    return MlflowSink(config.tracking.mlflow, Path(config.run.dir), run.run_id, msgspec.to_builtins(config), goes_on)


def _describe(error: BaseException) -> str:
    if isinstance(error, TaskFailed) and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _write(run: RunDirectory, inputs: RunInputs, observer: Observer, summary: Summary, mlflow: MlflowSink | None) -> None:
    write_trace(run.trace, observer.spans)
    write_summary(run.summary, summary)
    how = f", on emulated devices that replayed {inputs.profile.name}" if inputs.profile else ""
    source = f"run {run.run_id}, {summary.updates} update{'s' * (summary.updates != 1)}{how}"
    write_profile(run.profile, measure(observer.spans, inputs.config, name=run.run_id, source=source))
    if mlflow:
        for path in (run.config_yaml, run.summary, run.profile, run.trace):
            mlflow.log_artifact(path)
        mlflow.finish(summary.status)


def _farewell(run: RunDirectory, summary: Summary, mlflow: MlflowSink | None) -> list[str]:
    """How it ended and where everything is, for a person who has just watched it happen."""
    reason = f" {summary.reason}" if summary.reason else ""
    lines = [f"{summary.status}{reason}: {summary.updates} update{'s' * (summary.updates != 1)} in {summary.wall_s:.0f} s after loading"]
    curve = [point.parts.get("ocr_exact", point.value) for point in summary.validation]
    if curve:
        lines.append(f"validation {curve[0]:.3f} -> {curve[-1]:.3f} over {len(curve)} rounds")
    places = {
        "images": run.samples,
        "metrics": run.metrics,
        "ledger": run.ledger,
        "summary": run.summary,
        "profile": run.profile,
        "timeline": run.trace,
    }
    lines += [f"  {name:<9} {path}" for name, path in places.items()]
    if summary.status != "done" and any(newest_first(run.checkpoints)):
        lines.append("            (the same command with checkpoint.resume=auto goes on with it)")
    lines.append("            (open the timeline at https://ui.perfetto.dev)")
    if mlflow:
        lines.append(f"  MLflow    {mlflow.ui_command}")
    return lines

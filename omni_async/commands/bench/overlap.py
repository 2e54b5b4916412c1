"""Runs an overlap benchmark: every arm once per round, one after the other in this process, and measures each.

A run's own folder records whether the run is complete, so the same call continues after any interruption.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
import rich.console
from msgspec.structs import replace

from omni_async.commands.bench.comparison import answer, compare, median_run
from omni_async.commands.bench.measure import NotMeasurableError, measure, run_profile
from omni_async.commands.bench.page import page
from omni_async.commands.bench.plan import (
    DEFAULT_ARMS,
    Job,
    Plan,
    PlannedArm,
    finished_run,
    make_plan,
    parse_arms,
    stamp,
)
from omni_async.commands.bench.progress import Progress
from omni_async.commands.bench.result import ArmRecord, Overlap, Prediction, RunRecord, describe_machine, write_overlap
from omni_async.commands.bench.table import markdown
from omni_async.commands.command_line import require_outside
from omni_async.config import Config, ConfigError
from omni_async.config.ray_cluster import cluster_address
from omni_async.config.redact import redact, redact_text, secrets_in
from omni_async.config.schedule import num_existing_devices
from omni_async.config.writing import write_atomic
from omni_async.performance.law import async_step
from omni_async.performance.profile import Profile, load_profile
from omni_async.records.write.console import Console
from omni_async.records.write.rundir import RunDirectoryError
from omni_async.records.write.summary import Summary
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.placement import plan_placements
from omni_async.simulation.result import times_of
from omni_async.simulation.simulate import simulate

Train = Callable[[RunInputs, Console], Summary]
# Mean seconds of a step, in the profile's time.
Simulator = Callable[[Config, Profile], float]


def train_here(inputs: RunInputs, console: Console) -> Summary:
    from omni_async.runtime.driver.train import train

    return train(inputs, console)


def simulated_step(config: Config, profile: Profile) -> float:
    """Simulate the recipe's updates, but at least 200: fewer give noisy results if service times vary."""
    return simulate(config, profile, seed=config.run.seed).step_s


def run_overlap(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    out: Path,
    profile: str | None = None,
    repeats: int = 5,
    updates: int | None = None,
    steps: int | None = None,
    arms: Sequence[str] = DEFAULT_ARMS,
    terminal: rich.console.Console | None = None,
    train: Train | None = None,
    simulator: Simulator | None = None,
) -> Overlap:
    """Run all incomplete runs in `out`, and write `overlap.json`, `.html`, `.md` and `.png` there.

    Args:
        recipe: the recipe that every arm runs.
        overrides: `key.path=value` for every arm.
        out: the folder of runs and results.
        profile: the profile for emulated devices, in place of the recipe's; None: the recipe's.
        repeats: rounds, each with one run of every arm.
        updates: trainer.updates of every run; None: the recipe's.
        steps: in place of `updates`, how many to measure: each arm's runs are just long enough.
        arms: names of arms, as `parse_arms` takes them.
        terminal: the console for progress.
        train: replaces the real run.
        simulator: replaces the real simulator.

    Raises:
        ConfigError: the configuration is wrong, and nothing has run. A failed run is recorded with its reason instead.
        KeyboardInterrupt: the benchmark was interrupted; the results so far are written."""
    train, simulator = train or train_here, simulator or simulated_step
    if profile is not None:
        overrides = [*overrides, f"emulation.profile={profile}"]
    plan = make_plan(recipe, overrides, parse_arms(arms), out=out, repeats=repeats, updates=updates, steps=steps)
    if plan.base.emulation is None:
        require_outside("--out", out, [Path(plan.base.model.path)])
    emulated = load_profile(plan.base.emulation.profile) if plan.base.emulation is not None else None
    with Progress(len(list(plan.jobs())), terminal or rich.console.Console()) as progress:
        predictions = _predict(plan, emulated, simulator, progress) if emulated else {}
        progress.print_plan(plan, {name: prediction.law_s for name, prediction in predictions.items()})
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        records: dict[str, list[RunRecord]] = {}
        interrupted: KeyboardInterrupt | None = None
        try:
            with _ray_session([planned.config for planned in plan.arms if planned.config is not None]):
                for job in plan.jobs():
                    records.setdefault(job.arm.name, []).append(_make_run(job, out, train, progress))
        except KeyboardInterrupt as error:
            interrupted = error
        overlap = _overlap(plan, records, predictions, started)
        if emulated is None:
            overlap = _with_measured_law(plan, overlap, simulator, progress)
    out.mkdir(parents=True, exist_ok=True)
    summaries = compare(overlap)
    write_overlap(out, overlap, list(summaries.values()), answer(summaries))
    write_report(out, overlap)
    if interrupted is not None:
        raise interrupted
    return overlap


def write_report(out: Path, overlap: Overlap) -> None:
    """Write overlap.md, overlap.html and, if anything was measured, overlap.png.

    Raises OSError if they cannot be written."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "overlap.md", markdown(overlap).encode())
    write_atomic(out / "overlap.html", page(overlap).encode(errors="replace"))
    if compare(overlap):
        from omni_async.commands.bench.figure import draw

        draw(overlap, out / "overlap.png")


@contextmanager
def _ray_session(configs: Sequence[Config]) -> Iterator[None]:
    """Run Ray for the duration of the block, with CPUs for the largest of these jobs.

    Does nothing if no job needs Ray, or if Ray is already running. Raises ConfigError if Ray cannot be started or
    joined."""
    on_ray = [config for config in configs if config.run.runtime == "ray"]
    if not on_ray:
        yield
        return
    from omni_async.runtime.on_ray.local import prepare_driver

    prepare_driver()  # before Ray is imported

    from omni_async.runtime.cluster import StartError
    from omni_async.runtime.on_ray.connection import connect

    run, cpus = on_ray[0].run, max(1, *(plan_placements(config).cpus for config in on_ray))
    store_bytes = max(config.placement.store_bytes or 0 for config in on_ray) or None
    try:
        connection = connect(cluster_address(run), cpus, run.startup_timeout_s, store_bytes=store_bytes)
    except (StartError, ValueError) as error:
        raise ConfigError(str(error)) from error
    try:
        yield
    finally:
        connection.close()


def _make_run(job: Job, out: Path, train: Train, progress: Progress) -> RunRecord:
    """Run one job, unless it is complete. An exception in it is recorded as that run's failure."""
    run, seconds, load = finished_run(job.inputs), None, None

    def failed(reason: str) -> RunRecord:
        folder = os.path.relpath(run, out) if run is not None else None
        record = RunRecord(round=job.round, status="failed", reason=" ".join(reason.split()), folder=folder)
        progress.print_run(job, record, None)
        return record

    if run is None:
        load, began = os.getloadavg()[0], time.monotonic()
        try:
            summary = train(job.inputs, progress.console_of(job))
        except RunDirectoryError as error:
            raise ConfigError(f"--out: {str(error).removeprefix('run.dir: ')}") from None
        except Exception as error:  # noqa: BLE001 (reported as this run's failure; the other runs go on)
            return failed(f"{type(error).__name__}: {error}")
        if summary.status == "interrupted":
            raise KeyboardInterrupt
        run, seconds = Path(job.config.run.dir) / summary.run, time.monotonic() - began
        if summary.status == "failed":
            return failed(summary.reason or "no reason given")
        stamp(run, job.inputs)
    try:
        measured = measure(run, job.config)
    except NotMeasurableError as error:
        return failed(str(error))
    record = RunRecord(round=job.round, status="done", folder=os.path.relpath(run, out), load=load, measured=measured)
    progress.print_run(job, record, seconds)
    return record


def _predict(plan: Plan, profile: Profile, simulator: Simulator, progress: Progress) -> dict[str, Prediction]:
    scale = plan.base.emulation.time_scale if plan.base.emulation is not None else 1.0
    predictions = {}
    progress.print_line("simulating every arm, some seconds each")
    for planned in plan.arms:
        if planned.config is not None:
            progress.show(f"simulating {planned.arm.name}")
            predictions[planned.arm.name] = _prediction(planned.config, profile, scale, simulator)
    return predictions


def _prediction(config: Config, profile: Profile, time_scale: float, simulator: Simulator) -> Prediction:
    """Predict an arm's step by the law and by the simulator, in measured seconds: `time_scale` of the profile's.

    In a schedule without overlap, the law with S = 0 is the sum of all stages; streaming inside the step shortens it.
    If the simulator fails, the reason is reported: the measurements are useful without it."""
    times = times_of(config, profile.scaled(time_scale))
    law = async_step(times, config.staleness.max_updates)
    try:
        simulated = simulator(config, profile) * time_scale
    except Exception as error:  # noqa: BLE001 (reported)
        return Prediction(times=times, law_s=law, not_simulated=f"{type(error).__name__}: {error}")
    return Prediction(times=times, law_s=law, simulated_s=simulated)


def _overlap(
    plan: Plan, records: dict[str, list[RunRecord]], predictions: dict[str, Prediction], started: str
) -> Overlap:
    emulation, placement = plan.base.emulation, plan.base.placement
    has_gpus = any(role.gpus for role in (placement.rollout, placement.reward, placement.trainer))
    secrets = secrets_in(msgspec.to_builtins(plan.base))  # an override's `{api_key: ...}` has no credential's form
    return Overlap(
        recipe=str(plan.recipe),
        command=shlex.join(redact_text(word, secrets) for word in sys.argv),
        started=started,
        machine=describe_machine(with_gpus=emulation is None and has_gpus),
        repeats=plan.repeats,
        updates=plan.base.trainer.updates,
        time_scale=emulation.time_scale if emulation is not None else 1.0,
        law=f"profile {emulation.profile}, times {emulation.time_scale:g}"
        if emulation is not None
        else "no run to take service times from",
        arms=tuple(
            _arm(planned, records.get(planned.arm.name, []), predictions.get(planned.arm.name)) for planned in plan.arms
        ),
    )


def _arm(planned: PlannedArm, runs: list[RunRecord], prediction: Prediction | None) -> ArmRecord:
    config = planned.config
    return ArmRecord(
        name=planned.arm.name,
        schedule=planned.arm.schedule,
        max_updates=planned.arm.max_updates,
        devices=num_existing_devices(config) if config is not None else None,
        config=redact(msgspec.to_builtins(config)) if config is not None else None,
        skipped=planned.skipped,
        prediction=prediction,
        runs=tuple(sorted(runs, key=lambda run: run.round)),
    )


def _with_measured_law(plan: Plan, overlap: Overlap, simulator: Simulator, progress: Progress) -> Overlap:
    """Add the law of real devices, from service times measured in a run.

    The source is the synchronous arm's median run, or otherwise the first arm's median run with service times."""
    for arm in sorted((arm for arm in overlap.arms if arm.measured), key=lambda arm: arm.name != "sync"):
        chosen = next(run for run in arm.runs if run.measured is median_run(arm))
        profile = run_profile(plan.out / str(chosen.folder))
        if profile is not None:
            predictions = _predict(plan, profile, simulator, progress)
            arms = tuple(replace(arm, prediction=predictions.get(arm.name)) for arm in overlap.arms)
            law = f"service times measured in {chosen.folder} ({arm.name}, the repeat with the median step)"
            return replace(overlap, arms=arms, law=law)
    return overlap
